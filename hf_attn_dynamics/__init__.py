# Licensed under the Apache License, Version 2.0.
"""Guide, gate, remove and read attention heads in Hugging Face Transformers 5.

Importing the package registers its models with the Auto classes. The names in `__init__.pyi` and the headwise classes
are imported on first use; `dir()` imports Transformers' tables of models to list the latter.
"""

import importlib
import sys

from ._auto_registration import register_with_auto_classes
from ._moved import MOVED, find_moved_modules
from ._stub import imports_of_stub


__version__ = "0.1.0"

_MODULE_OF, _SUBPACKAGES = imports_of_stub(__file__)


def __getattr__(name: str):
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name in _SUBPACKAGES or name in MOVED:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name == "__all__":
        value = [*_MODULE_OF, *_headwise_classes().headwise_names()]
    elif (value := getattr(_headwise_classes(), name, None) if name.startswith("Headwise") else None) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES, *__getattr__("__all__")})


def _headwise_classes():
    return importlib.import_module(f"{__name__}.models.headwise_classes")


find_moved_modules()
register_with_auto_classes(sys.modules[__name__])
