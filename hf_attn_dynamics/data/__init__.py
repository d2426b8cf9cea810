# Licensed under the Apache License, Version 2.0.
"""Datasets and tokenizers. The names in `__init__.pyi` are imported on first use."""

import importlib
import sys
from types import ModuleType

from .._stub import imports_of_stub


_MODULE_OF, _ = imports_of_stub(__file__)
_MODULES = {module.partition(".")[0] for module in _MODULE_OF.values()}
__all__ = sorted(_MODULE_OF)


class _Package(ModuleType):
    def __setattr__(self, name: str, value):
        # Until 0.2: importing a module by its earlier name does not replace the function of that name.
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str):
    if name in _MODULE_OF:
        try:
            value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ("datasets", "pyarrow"):
                raise
            message = f'{name} needs the library datasets: pip install "hf_attn_dynamics[recipes]".'
            raise ModuleNotFoundError(message, name=error.name) from error
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
