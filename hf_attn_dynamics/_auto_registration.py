# Licensed under the Apache License, Version 2.0.
"""Makes the package's models known to the Auto classes without importing torch before anyone asks for one.

`AutoX.register` needs the classes themselves, and with them torch and Transformers' model files: seconds, for a user
who may only want a helper, and in the middle of imports that are not finished. The Auto classes also know models by
name, and import them when they are looked up: Transformers' own models are registered that way, and so are these,
as soon as Transformers imports the tables.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


# model_type -> configuration, model_type of the stock parent, and the class behind each Auto class.
_HEADS = {
    "AutoModel": "Model",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}
ARCHITECTURES = {
    "headwise-bert": ("HeadwiseBert", "bert", {**_HEADS, "AutoModelForPreTraining": "ForPreTraining"}),
    "headwise-electra": ("HeadwiseElectra", "electra", {**_HEADS, "AutoModelForPreTraining": "ForPreTraining"}),
    "headwise-marian": ("HeadwiseMarian", "marian", {"AutoModel": "Model", "AutoModelForSeq2SeqLM": "MTModel"}),
    "headwise-roberta": ("HeadwiseRoberta", "roberta", {**_HEADS, "AutoModelForPreTraining": "ForMaskedLM"}),
}
# The same for models that extend no stock one: they have no tokenizer of their own.
OWN_ARCHITECTURES = {
    "bag-of-words-proxy": (
        "Proxy",
        {"AutoModelForSeq2SeqLM": "ForSeq2Seq", "AutoModelForSequenceClassification": "ForSequenceClassification"},
    ),
    "bow-attention": ("BowAttention", {"AutoModelForSequenceClassification": "ForSequenceClassification"}),
    "lstm-attention": ("Lstm", {"AutoModelForSequenceClassification": "ForSequenceClassification"}),
    "lstm-attention-seq2seq": ("LstmSeq2Seq", {"AutoModelForSeq2SeqLM": "ForConditionalGeneration"}),
}
_CLASSES = {
    **{model_type: (prefix, heads) for model_type, (prefix, _, heads) in ARCHITECTURES.items()},
    **OWN_ARCHITECTURES,
}


def _name_configurations(configuration_auto: ModuleType) -> None:
    for model_type, (prefix, _) in _CLASSES.items():
        configuration_auto.CONFIG_MAPPING_NAMES[model_type] = f"{prefix}Config"


def _name_models(modeling_auto: ModuleType) -> None:
    from .models.compat import name_in_auto_class

    for model_type, (prefix, heads) in _CLASSES.items():
        for auto_class, head in heads.items():
            name_in_auto_class(getattr(modeling_auto, auto_class), f"{prefix}Config", model_type, prefix + head)


def _name_tokenizers(tokenization_auto: ModuleType) -> None:
    from .models.compat import name_configuration

    for model_type, (prefix, stock_type, _) in ARCHITECTURES.items():
        names = tokenization_auto.TOKENIZER_MAPPING_NAMES
        names[model_type] = names[stock_type]
        name_configuration(tokenization_auto.TOKENIZER_MAPPING, f"{prefix}Config", model_type)


_WHEN_IMPORTED: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _name_configurations,
    "transformers.models.auto.modeling_auto": _name_models,
    "transformers.models.auto.tokenization_auto": _name_tokenizers,
}


class _NamingLoader(importlib.abc.Loader):
    """Loads one of the tables with its own loader, then adds to it."""

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
    """Finds the tables where they are, each once, and puts a [`_NamingLoader`] in front of their loader."""

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
    """Add the package's models to the tables of the Auto classes, now or as soon as these are imported.

    Args:
        package (`ModuleType`): Where Transformers will find the classes, as attributes.
    """
    for model_type in _CLASSES:
        sys.modules[f"transformers.models.{model_type.replace('-', '_')}"] = package
    waiting = {name for name in _WHEN_IMPORTED if name not in sys.modules}
    for name in _WHEN_IMPORTED.keys() - waiting:
        _WHEN_IMPORTED[name](sys.modules[name])
    if waiting:
        sys.meta_path.insert(0, _TableFinder(waiting))
