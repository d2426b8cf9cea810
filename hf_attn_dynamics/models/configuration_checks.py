# Licensed under the Apache License, Version 2.0.
"""Checks of configuration values."""

from typing import Any

from transformers import PreTrainedConfig

from .saved_code import SavedCodeMixin
from .size_limits import LimitedConfigMixin, LimitedModelMixin, check_size_limits


ATTENTIONS = ("learned", "uniform", "frozen")


class CheckedConfigMixin(SavedCodeMixin, LimitedConfigMixin):
    """A configuration that checks its values when it is created and when a model is built from it."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.check_values()

    def check_values(self) -> None:
        """Raises ValueError for invalid values; runs at construction, and again when a model is built.

        The second run covers values assigned in between, as by `from_pretrained(…, attention=…)`.
        """
        check_size_limits(vars(self))


class CheckedModelMixin(LimitedModelMixin):
    """A model whose configuration is a [`CheckedConfigMixin`]; precedes `PreTrainedModel`."""

    def __init__(self, config: CheckedConfigMixin, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        config.check_values()


def check_choice(config: PreTrainedConfig, name: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if getattr(config, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}.")


def check_classes(config: PreTrainedConfig) -> None:
    """Raises ValueError unless the task is single-label classification."""
    if config.num_labels < 2:
        raise ValueError(f"num_labels must be at least 2, got {config.num_labels}.")
    if config.problem_type not in (None, "single_label_classification"):
        raise ValueError(f"problem_type must be single_label_classification, got {config.problem_type!r}.")


def check_token_ids(config: PreTrainedConfig, size: str, *names: str, optional: bool = True) -> None:
    """Raises ValueError for special tokens that are not in the vocabulary.

    Args:
        config (`PreTrainedConfig`)
        size (`str`): Name of the vocabulary size.
        names (`str`): Names of the special tokens, such as `pad_token_id`; each is `None`, an id or a list of ids.
        optional (`bool`): Whether they may be `None`.
    """
    count = getattr(config, size)
    for name in names:
        given = getattr(config, name)
        for word in given if isinstance(given, list) else [given]:
            is_possible = optional if word is None else 0 <= word < count
            if not is_possible:
                none = "None or " if optional else ""
                raise ValueError(f"{name} must be {none}from 0 to {count - 1} ({size} is {count}), got {word}.")


def check_deviations(config: PreTrainedConfig, *names: str) -> None:
    """Raises ValueError for negative standard deviations; `None` is allowed."""
    for name in names:
        std = getattr(config, name)
        if std is not None and std < 0:
            raise ValueError(f"{name} must not be negative, got {std}.")


def check_dropout(config: PreTrainedConfig) -> None:
    """Raises ValueError for dropout outside [0, 1), or with a single LSTM layer, where it has no effect."""
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {config.dropout}.")
    if config.dropout and config.num_hidden_layers == 1:
        raise ValueError(
            f"dropout={config.dropout} is applied between LSTM layers, but num_hidden_layers is 1; set dropout=0."
        )


def check_attention(config: PreTrainedConfig) -> None:
    """Raises ValueError for an unknown `attention`, and for `train_attention_only` unless it is learned."""
    check_choice(config, "attention", ATTENTIONS)
    if config.train_attention_only and config.attention != "learned":
        raise ValueError(f"train_attention_only needs attention='learned', got {config.attention!r}.")
