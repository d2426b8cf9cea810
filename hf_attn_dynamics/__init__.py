# Licensed under the Apache License, Version 2.0.
"""Guide, gate, remove and read attention heads in Hugging Face Transformers 5.

Importing the package registers its models with the Auto classes. The names in `__init__.pyi` and the headwise classes
are imported on first use. `dir()` lists the names that users reach for first, and the subpackages; their `dir()` lists
all names of each, that of `models` also the headwise classes. `__all__` has every name that can be imported from here.
"""

import importlib
import sys

from ._auto_registration import register_with_auto_classes
from ._moved import MOVED, find_moved_modules
from ._stub import import_name, import_on_first_use, public_names


__version__ = "0.1.0"

_NAMES = public_names(__name__)
_MODULES = _NAMES.modules_in(__name__)


def __getattr__(name: str):
    if name in _NAMES.module_of:
        value = import_name(_NAMES.module_of[name], name)
    elif name in _MODULES or name in MOVED:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "__all__":
        value = [*_NAMES.module_of, *_headwise_names()]
    elif (value := _headwise_class(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_NAMES.first, *_MODULES})


def _headwise_class(name: str) -> type | None:
    return getattr(_headwise_classes(), name, None) if name.startswith("Headwise") else None


def _headwise_names() -> list[str]:
    return [*_headwise_classes().headwise_names()]


def _headwise_classes():
    return importlib.import_module(f"{__name__}.models.headwise_classes")


# From here, since the files of `models` are saved beside checkpoints and import nothing above them.
import_on_first_use(f"{__name__}.models", _headwise_class, _headwise_names)
find_moved_modules()
register_with_auto_classes(sys.modules[__name__])
