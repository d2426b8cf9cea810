# Licensed under the Apache License, Version 2.0.
"""Configuration of headwise ELECTRA."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import ElectraConfig

from .compat import attention_kernel
from .configuration_headwise import HeadwiseConfigMixin
from .headwise_classes import __getattr__ as __getattr__  # earlier module of HeadwiseElectraConfig
from .size_limits import check_size_limits


_GENERATOR_SETTINGS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "layer_norm_eps",
)
# Values that generator and discriminator share, since they share embeddings.
_SHARED = ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size", "pad_token_id")


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseElectraConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for the settings of heads.

    Only [`HeadwiseElectraForJointPreTraining`], which trains a generator together with the discriminator, reads the
    next two arguments; all others describe the discriminator.

    Args:
        generator_settings (`dict`, *optional*): Values of the generator that differ from the discriminator:
            `hidden_size`, `num_attention_heads`, `intermediate_size` (by default a quarter of the discriminator's, as
            in the paper's small and large models, with `hidden_size` rounded to a multiple of `num_attention_heads`),
            `num_hidden_layers`, `hidden_act`, `hidden_dropout_prob`, `attention_probs_dropout_prob`,
            `initializer_range`, `layer_norm_eps`.
        discriminator_weight (`float`, defaults to 50.0): Weight λ of the discriminator's loss.

    Raises:
        ValueError: if a value above is invalid.

    Example:
        >>> from hf_attn_dynamics import HeadwiseElectraConfig
        >>> HeadwiseElectraConfig(gates={}).gates["initial_log_alpha"]
        2.5
    """

    # Outputs of the joint model other than its logits and its labels.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *HeadwiseConfigMixin.keys_to_ignore_at_inference,
        "generator_loss",
        "discriminator_loss",
        "generator_losses",
    ]

    # Not `generator`: Transformers treats an attribute of that name as a configuration.
    generator_settings: dict | None = None
    discriminator_weight: float | int = 50.0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not 0 < self.discriminator_weight < float("inf"):
            raise ValueError(f"discriminator_weight must be positive and finite, got {self.discriminator_weight}.")
        generator_config(self)


def generator_config(config: ElectraConfig) -> ElectraConfig:
    """Returns the configuration of the generator, given the configuration of the discriminator.

    Args:
        config (`ElectraConfig`): Configuration of the discriminator, with `generator_settings`.

    Raises:
        ValueError: if `generator_settings` has an unknown key or an invalid size.
    """
    given = getattr(config, "generator_settings", None) or {}
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(set(given) - set(_GENERATOR_SETTINGS)):
        keys = ", ".join(_GENERATOR_SETTINGS)
        raise ValueError(f"generator_settings has no key {unknown[0]!r}; its keys are {keys}.")
    check_size_limits(given, "generator_settings ")
    heads = given.get("num_attention_heads", max(1, config.num_attention_heads // 4))
    settings = {
        **{name: getattr(config, name) for name in _GENERATOR_SETTINGS},
        "num_attention_heads": heads,
        "hidden_size": heads * max(1, round(config.hidden_size / 4 / heads)),
        "intermediate_size": max(1, config.intermediate_size // 4),
        **given,
    }
    if settings["hidden_size"] % heads:
        raise ValueError(
            f"generator_settings hidden_size {settings['hidden_size']} must be divisible by its num_attention_heads, "
            f"{heads}; set both."
        )
    return ElectraConfig(
        **settings,
        **{name: getattr(config, name) for name in _SHARED},
        attn_implementation=attention_kernel(config),
        # The joint model ties the output layer to the embeddings of the discriminator.
        tie_word_embeddings=False,
    )
