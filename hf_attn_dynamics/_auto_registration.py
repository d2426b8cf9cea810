# Licensed under the Apache License, Version 2.0.
"""Makes the package's models known to the Auto classes without importing torch before anyone asks for one.

`AutoX.register` needs the classes themselves, and with them torch and Transformers' model files: seconds, for a user
who may only want a helper. So registration waits until Transformers itself imports its Auto classes.
"""

import importlib
import importlib.abc
import importlib.util
import sys


ARCHITECTURES = {"headwise_bert": "bert", "headwise_roberta": "roberta"}
_AUTO_CONFIG_MODULE = "transformers.models.auto.configuration_auto"
_AUTO_MODEL_MODULE = "transformers.models.auto.modeling_auto"


def _register_configurations() -> None:
    from transformers import AutoConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    for name, stock_type in ARCHITECTURES.items():
        module = importlib.import_module(f"hf_attn_dynamics.models.configuration_{name}")
        config_class = getattr(module, module.__all__[0])
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        TOKENIZER_MAPPING_NAMES.setdefault(config_class.model_type, TOKENIZER_MAPPING_NAMES[stock_type])


def _register_models() -> None:
    import transformers

    for name in ARCHITECTURES:
        classes = dict(importlib.import_module(f"hf_attn_dynamics.models.modeling_{name}").AUTO_CLASSES)
        config_class = classes.pop("AutoConfig")
        for auto_class, model_class in classes.items():
            getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)


_REGISTER = {_AUTO_CONFIG_MODULE: _register_configurations, _AUTO_MODEL_MODULE: _register_models}


class _LoaderThenRegister(importlib.abc.Loader):
    """Loads a module with its own loader, then registers."""

    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        _REGISTER[module.__name__]()

    def __getattr__(self, name):
        return getattr(self.loader, name)


class _AutoModuleFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself, but has registration run right after one of the Auto modules was imported."""

    def __init__(self):
        self.waiting = set(_REGISTER)

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThenRegister(spec.loader)
        return spec


def register_when_imported() -> None:
    """Register configurations and models now if Transformers' Auto modules are imported, else as soon as they are."""
    finder = _AutoModuleFinder()
    for name, register in _REGISTER.items():
        if name in sys.modules:
            finder.waiting.remove(name)
            register()
    if finder.waiting:
        sys.meta_path.insert(0, finder)
