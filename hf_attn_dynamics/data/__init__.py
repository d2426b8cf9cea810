# Licensed under the Apache License, Version 2.0.
"""Texts and tokenizers to learn from. The names in `__init__.pyi` are imported when they are first used."""

import importlib

from .._stub import imports_of_stub


_MODULE_OF, _ = imports_of_stub(__file__)
_MODULES = {module.partition(".")[0] for module in _MODULE_OF.values()}
__all__ = sorted(_MODULE_OF)


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
