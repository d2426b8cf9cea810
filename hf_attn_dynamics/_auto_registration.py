# Licensed under the Apache License, Version 2.0.
"""Registers the package's models with the Auto classes by name, without importing torch.

`AutoX.register` needs the classes themselves, and with them torch and Transformers' model files, which takes seconds
and may cause circular imports. Transformers registers its own models by name, and imports them when they are looked
up; this package adds its names to the same tables as soon as Transformers imports them.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

from .models.architectures import ARCHITECTURES, headwise_name
from .models.compat import name_configuration, name_in_auto_class
from .models.own_architectures import OWN_ARCHITECTURES


def _configurations() -> dict[str, str]:
    """Names of the configuration classes of this package, by `model_type`."""
    headwise = {row.model_type: headwise_name(row.stock_config) for row in ARCHITECTURES.values()}
    return headwise | {model_type: f"{row.prefix}Config" for model_type, row in OWN_ARCHITECTURES.items()}


def _name_configurations(configuration_auto: ModuleType) -> None:
    configuration_auto.CONFIG_MAPPING_NAMES.update(_configurations())


def _name_models(modeling_auto: ModuleType) -> None:
    names = {
        row.model_type: {auto: headwise_name(name) for auto, name in row.stock_models().items()}
        for row in ARCHITECTURES.values()
    }
    names |= {
        model_type: {auto: f"{row.prefix}{head}" for auto, head in row.heads.items()}
        for model_type, row in OWN_ARCHITECTURES.items()
    }
    for model_type, configuration in _configurations().items():
        for auto, name in names[model_type].items():
            name_in_auto_class(getattr(modeling_auto, auto), configuration, model_type, name)


def _name_tokenizers(tokenization_auto: ModuleType) -> None:
    names, configurations = tokenization_auto.TOKENIZER_MAPPING_NAMES, _configurations()
    for row in ARCHITECTURES.values():
        if row.stock_type in names:
            names[row.model_type] = names[row.stock_type]
            name_configuration(tokenization_auto.TOKENIZER_MAPPING, configurations[row.model_type], row.model_type)


_WHEN_IMPORTED: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _name_configurations,
    "transformers.models.auto.modeling_auto": _name_models,
    "transformers.models.auto.tokenization_auto": _name_tokenizers,
}


class _NamingLoader(importlib.abc.Loader):
    """Loads one of the tables with its original loader, then adds names to it."""

    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        _WHEN_IMPORTED[module.__name__](module)

    def __getattr__(self, name):
        return getattr(self.loader, name)


class _TableFinder(importlib.abc.MetaPathFinder):
    """Finds each of the tables once, and wraps its loader in a [`_NamingLoader`]."""

    def __init__(self, waiting: set[str]):
        self.waiting = waiting

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _NamingLoader(spec.loader)
        return spec


def register_with_auto_classes(package: ModuleType) -> None:
    """Adds the package's models to the tables of the Auto classes, immediately or when these are imported.

    Args:
        package (`ModuleType`): Module that has the classes as attributes.
    """
    for model_type in (*(row.model_type for row in ARCHITECTURES.values()), *OWN_ARCHITECTURES):
        sys.modules[f"transformers.models.{model_type.replace('-', '_')}"] = package
    waiting = {name for name in _WHEN_IMPORTED if name not in sys.modules}
    for name in _WHEN_IMPORTED.keys() - waiting:
        _WHEN_IMPORTED[name](sys.modules[name])
    if waiting:
        sys.meta_path.insert(0, _TableFinder(waiting))
