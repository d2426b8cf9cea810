# Licensed under the Apache License, Version 2.0.
"""What the configuration of headwise ELECTRA has beside that of any headwise model."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import ElectraConfig

from .compat import attention_kernel
from .configuration_headwise import HeadwiseConfigMixin
from .headwise_classes import __getattr__ as __getattr__  # the former place of HeadwiseElectraConfig
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
# What generator and discriminator must have in common, since they share embeddings.
_SHARED = ("vocab_size", "embedding_size", "max_position_embeddings", "type_vocab_size", "pad_token_id")


@dataclass(kw_only=True, repr=False, eq=False)
class HeadwiseElectraConfigMixin(HeadwiseConfigMixin):
    """See [`HeadwiseConfigMixin`] for what is said of heads.

    The next two are for [`HeadwiseElectraForJointPreTraining`] alone, which trains a generator beside the
    discriminator; heads and sizes elsewhere in the configuration are those of the discriminator.

    Args:
        generator_settings (`dict`, *optional*): What the generator has otherwise than the discriminator:
            `hidden_size`, `num_attention_heads`, `intermediate_size` (a quarter of the discriminator's by default, as
            in the paper's small and large models, the first rounded to a multiple of the second),
            `num_hidden_layers`, `hidden_act`, `hidden_dropout_prob`, `attention_probs_dropout_prob`,
            `initializer_range`, `layer_norm_eps`.
        discriminator_weight (`float`, defaults to 50.0): λ, factor of the discriminator's loss beside the generator's.

    Raises:
        ValueError: if a value above is not possible.

    Example:
        >>> from hf_attn_dynamics import HeadwiseElectraConfig
        >>> HeadwiseElectraConfig(gates={}).gates["initial_log_alpha"]
        2.5
    """

    # What the joint model has beside its logits, and which tokens it replaced.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        *HeadwiseConfigMixin.keys_to_ignore_at_inference,
        "generator_loss",
        "discriminator_loss",
        "generator_losses",
    ]

    # Not `generator`: Transformers takes what has that name for a configuration.
    generator_settings: dict | None = None
    discriminator_weight: float | int = 50.0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not 0 < self.discriminator_weight < float("inf"):
            raise ValueError(f"discriminator_weight must be positive and finite, got {self.discriminator_weight}.")
        generator_config(self)


def generator_config(config: ElectraConfig) -> ElectraConfig:
    """Configuration of the generator that is trained beside a discriminator with this one.

    Args:
        config (`ElectraConfig`): Configuration of the discriminator; its `generator_settings` say what is to differ.

    Raises:
        ValueError: if `generator_settings` has an unknown key, a size that no model has, or a width that its
            heads do not divide.
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
            f"generator_settings hidden_size {settings['hidden_size']} is no multiple of its {heads} heads; set its "
            "num_attention_heads, too."
        )
    return ElectraConfig(
        **settings,
        **{name: getattr(config, name) for name in _SHARED},
        attn_implementation=attention_kernel(config),
        # The joint model ties the output layer, too, to the embeddings of the discriminator.
        tie_word_embeddings=False,
    )
