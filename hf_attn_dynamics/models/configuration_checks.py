# Licensed under the Apache License, Version 2.0.
"""What configurations refuse."""

from typing import Any

from transformers import PreTrainedConfig

from .saved_code import SavedCodeMixin
from .size_limits import LimitedConfigMixin, LimitedModelMixin, check_size_limits


ATTENTIONS = ("learned", "uniform", "frozen")


class CheckedConfigMixin(SavedCodeMixin, LimitedConfigMixin):
    """A configuration that refuses impossible values, when it is made and when a model is made of it."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.check_values()

    def check_values(self) -> None:
        """Refuses values that are not possible; runs at construction, and again when a model is built.

        The second time is for values assigned in between, as `from_pretrained(…, attention=…)` does.

        Raises:
            ValueError: naming the value.
        """
        check_size_limits(vars(self))


class CheckedModelMixin(LimitedModelMixin):
    """A model whose configuration is a [`CheckedConfigMixin`]; it goes before `PreTrainedModel`."""

    def __init__(self, config: CheckedConfigMixin, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        config.check_values()


def check_choice(config: PreTrainedConfig, name: str, choices: tuple[str, ...]) -> None:
    """Refuses what is not among the choices.

    Raises:
        ValueError: naming the choices.
    """
    if getattr(config, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(config, name)!r}.")


def check_classes(config: PreTrainedConfig) -> None:
    """Refuses what is no choice among classes of which one is right.

    Raises:
        ValueError: if so.
    """
    if config.num_labels < 2:
        raise ValueError(f"num_labels must be at least 2, got {config.num_labels}.")
    if config.problem_type not in (None, "single_label_classification"):
        raise ValueError(f"problem_type must be single_label_classification, got {config.problem_type!r}.")


def check_words(config: PreTrainedConfig, size: str, *names: str, optional: bool = True) -> None:
    """Refuses words that are not in a vocabulary.

    Args:
        config (`PreTrainedConfig`)
        size (`str`): Name of the vocabulary's size.
        names (`str`): Of words, such as `pad_token_id`; each is `None`, a word or a list of words.
        optional (`bool`): Whether they may be `None`.

    Raises:
        ValueError: naming the first of them that is not.
    """
    count = getattr(config, size)
    for name in names:
        given = getattr(config, name)
        for word in given if isinstance(given, list) else [given]:
            is_possible = optional if word is None else 0 <= word < count
            if not is_possible:
                none = "None or " if optional else ""
                raise ValueError(f"{name} must be {none}one of {size}={count} words, got {word}.")


def check_deviations(config: PreTrainedConfig, *names: str) -> None:
    """Refuses standard deviations of new weights that are negative; `None` leaves one to its default.

    Raises:
        ValueError: naming the first of them.
    """
    for name in names:
        std = getattr(config, name)
        if std is not None and std < 0:
            raise ValueError(f"{name} must not be negative, got {std}.")


def check_dropout(config: PreTrainedConfig) -> None:
    """Refuses dropout that is no probability, or that would be applied nowhere.

    Raises:
        ValueError: if so.
    """
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {config.dropout}.")
    if config.dropout and config.num_hidden_layers == 1:
        raise ValueError(
            f"dropout={config.dropout} is applied between LSTM layers, but num_hidden_layers is 1; set dropout=0."
        )


def check_attention(config: PreTrainedConfig) -> None:
    """Refuses attention that there is not, and to train attention only where there is none to train.

    Raises:
        ValueError: if so.
    """
    check_choice(config, "attention", ATTENTIONS)
    if config.train_attention_only and config.attention != "learned":
        raise ValueError(f"train_attention_only needs attention='learned', got {config.attention!r}.")
