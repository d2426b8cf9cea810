# Licensed under the Apache License, Version 2.0.
"""Table of the supported architectures and their differences.

Supporting an architecture takes one row of [`ARCHITECTURES`]. Class names follow from it and from the tables of
Transformers: a headwise class has the name of its stock class with `Headwise` in front, and an Auto class maps to the
headwise counterpart of its stock class. Importing this file imports neither PyTorch nor Transformers.
"""

from collections.abc import Callable
from typing import NamedTuple

from .compat import auto_class_names
from .loss_terms import HEAD_LOSSES


# Suffixes of the stock classes with a task head that have headwise counterparts: their loss is known.
# Batches for multiple choice have an extra dimension, which guidance does not support.
HEADS = tuple(end for end in HEAD_LOSSES if end != "ForMultipleChoice")


def _configuration() -> type:
    from .configuration_headwise import HeadwiseConfigMixin

    return HeadwiseConfigMixin


def _albert_configuration() -> type:
    from .configuration_headwise_albert import HeadwiseAlbertConfigMixin

    return HeadwiseAlbertConfigMixin


def _electra_configuration() -> type:
    from .configuration_headwise_electra import HeadwiseElectraConfigMixin

    return HeadwiseElectraConfigMixin


def _electra_models() -> dict[str, tuple[type, ...]]:
    from .modeling_headwise_electra import BASES

    return BASES


def _marian_configuration() -> type:
    from .configuration_headwise_marian import HeadwiseMarianConfigMixin

    return HeadwiseMarianConfigMixin


def _marian_models() -> dict[str, tuple[type, ...]]:
    from .modeling_headwise_marian import BASES

    return BASES


def _mpnet_configuration() -> type:
    from .configuration_headwise_mpnet import HeadwiseMPNetConfigMixin

    return HeadwiseMPNetConfigMixin


def _roberta_configuration() -> type:
    from .configuration_headwise_roberta import HeadwiseRobertaConfigMixin

    return HeadwiseRobertaConfigMixin


class Architecture(NamedTuple):
    """A row of [`ARCHITECTURES`].

    Attributes:
        stock_type (`str`): `model_type` of the stock configuration.
        configuration (`Callable`): Returns the mixin that precedes the stock configuration class.
        bases (`Callable`): Returns base classes by stock class name, where they are not [`HeadwiseMixin`] and the
            stock class.
        more (`tuple[str, ...]`): Keys of `bases` that no Auto class maps to.
        causal_encoder (`bool`): Whether the self-attention of the encoder is causal.
        shifts_source (`bool`): Whether the decoder reads the source, shifted by one, if no target is given.
    """

    stock_type: str
    configuration: Callable[[], type] = _configuration
    bases: Callable[[], dict[str, tuple[type, ...]]] = dict
    more: tuple[str, ...] = ()
    causal_encoder: bool = False
    shifts_source: bool = False

    @property
    def is_decoder(self) -> bool:
        """Whether the architecture is decoder-only, regardless of `config.is_decoder`."""
        names = auto_class_names(self.stock_type)
        return "AutoModelForCausalLM" in names and "AutoModelForMaskedLM" not in names

    @property
    def model_type(self) -> str:
        """`model_type` of the headwise configuration."""
        return f"headwise-{self.stock_type}"

    @property
    def stock_config(self) -> str:
        """Name of the stock configuration class."""
        from .compat import CONFIG_MAPPING_NAMES

        return CONFIG_MAPPING_NAMES[self.stock_type]

    def stock_models(self) -> dict[str, str]:
        """Names of the stock classes with headwise counterparts, by the name of their Auto class."""
        names = dict(auto_class_names(self.stock_type))
        if names.keys() & {"AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"}:
            # A decoder without an encoder, under the configuration of the encoder–decoder.
            names.pop("AutoModelForCausalLM", None)
        return {auto: name for auto, name in names.items() if auto == "AutoModel" or name.endswith(HEADS)}


ARCHITECTURES: dict[str, Architecture] = {
    row.stock_type: row
    for row in (
        Architecture("albert", _albert_configuration),
        Architecture("bart", shifts_source=True),
        Architecture("bert"),
        Architecture("camembert", _roberta_configuration),
        Architecture("clip_text_model", causal_encoder=True),
        Architecture("clip_vision_model"),
        Architecture("data2vec-text", _roberta_configuration),
        Architecture("deberta"),
        Architecture("deberta-v2"),
        Architecture("deit"),
        Architecture("distilbert"),
        Architecture("gemma"),
        Architecture("gemma2"),
        Architecture("gemma3_text"),
        Architecture("gpt2"),
        Architecture("gpt_neox"),
        Architecture("gpt_oss"),
        Architecture("granite"),
        Architecture("llama"),
        Architecture("m2m_100"),
        Architecture("mbart", shifts_source=True),
        Architecture("mistral"),
        Architecture("mixtral"),
        Architecture("modernbert"),
        Architecture("mpnet", _mpnet_configuration),
        Architecture("mt5"),
        Architecture("opt"),
        Architecture("pegasus"),
        Architecture("phi"),
        Architecture("qwen2"),
        Architecture("qwen2_moe"),
        Architecture("qwen3"),
        Architecture("qwen3_moe"),
        Architecture("siglip_vision_model"),
        Architecture("smollm3"),
        Architecture("starcoder2"),
        Architecture("t5"),
        Architecture("vit"),
        Architecture("whisper"),
        Architecture("xlm-roberta", _roberta_configuration),
        Architecture("electra", _electra_configuration, _electra_models, more=("ElectraForJointPreTraining",)),
        Architecture("marian", _marian_configuration, _marian_models),
        Architecture("roberta", _roberta_configuration),
    )
}


def headwise_name(stock_name: str) -> str:
    """Name of the headwise class of a stock class."""
    return f"Headwise{stock_name}"
