# Licensed under the Apache License, Version 2.0.
"""Flags that recipes share, and checks of their values."""

import argparse
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


CPU_ONLY = "ACCELERATE_USE_CPU"  # read by Accelerate


def flag(default: Any, help: str, *, earlier: str | Sequence[str] = ()) -> Any:
    """A field of a dataclass of flags.

    Args:
        default: The default; lists are copied.
        help (`str`): Explanation for `--help`.
        earlier (`str` or sequence of `str`): Earlier names of the flag, which stay valid and are not explained.
    """
    names = [earlier] if isinstance(earlier, str) else earlier
    # argparse knows each name with underscores and with hyphens.
    aliases = list(dict.fromkeys(f"--{one}" for name in names for one in (name, name.replace("_", "-"))))
    metadata = {"help": help, "aliases": aliases} if aliases else {"help": help}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def with_default(default: Any, kind: type, name: str) -> Any:
    """The flag `name` of another dataclass with another default."""
    return field(default=default, metadata=kind.__dataclass_fields__[name].metadata)


def hidden_flag() -> Any:
    """A flag of earlier versions that `--help` does not explain; None by default."""
    return field(default=None, metadata={"help": argparse.SUPPRESS})


@dataclasses.dataclass
class RunArguments:
    """Flags of every recipe: device, threads, resume."""

    resume: bool = flag(False, "Continue the run in output_dir.")
    device: str = flag("auto", "Device: auto, cpu or cuda.")
    cpu_threads: int | None = flag(
        None, "CPU threads per process; by default, the cores are divided among the processes."
    )

    def __post_init__(self):
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}.")
        if self.device == "cuda" and not _has_gpu():
            raise ValueError("device is cuda, but PyTorch finds no GPU here; use --device cpu or auto.")
        self.check_at_least(1, "cpu_threads")
        if self.device == "cpu":
            os.environ[CPU_ONLY] = "true"

    def check_at_least(self, least: int, *names: str) -> None:
        """Refuses values below `least`; None is no value."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")

    def check_positive(self, *names: str) -> None:
        """Refuses values that are not greater than 0, such as NaN."""
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}.")

    def use_threads(self) -> None:
        """Sets the number of CPU threads of this process, see [`use_threads`]."""
        from ..run import use_threads

        use_threads(self.cpu_threads)


@dataclass
class PublishArguments(RunArguments):
    """Flags of recipes that train models."""

    license: str | None = flag(None, "License of the weights in the model card, such as apache-2.0.")

    def __post_init__(self):
        super().__post_init__()
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise ValueError(f"license must be an identifier of the Hub such as apache-2.0, got {self.license!r}.")


@dataclass
class SizeArguments:
    """Flags for the size of a Transformer that is trained from random weights."""

    num_hidden_layers: int = flag(2, "Number of layers.")
    hidden_size: int = flag(128, "Hidden size; feed-forward layers are four times as wide.")
    num_attention_heads: int = flag(8, "Number of heads per layer.")
    vocab_size: int = flag(4000, "Vocabulary size of the tokenizer that is trained.")


@dataclass
class LoopArguments(RunArguments):
    """Flags of recipes without a `Trainer`, whose arguments have these otherwise."""

    output_dir: str = flag("runs", "Output folder; it must not hold another run.")
    seed: int = flag(0, "Random seed.")
    disable_tqdm: bool = flag(False, "Hide the progress bars.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(0, "seed")


@dataclass
class HubDataArguments:
    """Flags that name a dataset on the Hub."""

    dataset_name: str | None = flag(None, "Dataset on the Hub, instead of files.")
    dataset_config: str | None = flag(None, "Configuration of the dataset.")
    dataset_split: str = flag("train", "Split of the dataset to train on.")
    validation_split: str | None = flag("validation", "Split of the dataset to evaluate on.")


@dataclass
class TextDataArguments(HubDataArguments):
    """Flags that name text: files, or a dataset on the Hub."""

    train_file: list[str] | None = flag(
        None, "Files, folders or patterns to train on (txt, jsonl, csv, tsv, parquet)."
    )
    validation_file: list[str] | None = flag(None, "Files, folders or patterns to evaluate on.")


@dataclass
class LabelledTextArguments(TextDataArguments):
    """Flags that name texts with labels."""

    text_column: list[str] | None = flag(
        None, "Column of the texts, or two columns of a pair; name or position, found by default."
    )
    label_column: str | None = flag(None, "Column of the labels; name or position, found by default.")


def _has_gpu() -> bool:
    import torch  # for this question alone

    return torch.cuda.is_available()


# Flags of a trainer with a teacher, and what to do instead.
OF_HIDDEN_STATES = dict.fromkeys(
    ("hidden_distillation_weight", "hidden_distillation_layers"), "only prune_heads learns hidden states"
)
OF_A_TEACHER = {
    **dict.fromkeys(
        ("distillation_weight", "distillation_temperature"), "only distil_heads and prune_heads have a teacher"
    ),
    **OF_HIDDEN_STATES,
}


def refuse_flags(args: Any, without_effect: Mapping[str, str], preset: Mapping[str, Any] | None = None) -> None:
    """Refuses values of flags that the recipe would ignore.

    Args:
        args (dataclass): Flags.
        without_effect (`dict[str, str]`): What to do instead, by the names of ignored flags.
        preset (`dict`, *optional*): Defaults that differ from the dataclass.

    Raises:
        ValueError: naming the first flag whose value is not its default.
    """
    for name, instead in without_effect.items():
        value, field = getattr(args, name), type(args).__dataclass_fields__[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != (preset or {}).get(name, default):
            raise ValueError(f"{name}={value} has no effect here; {instead}.")


def check_names(argument: str, values: Sequence[Any], known: Iterable[str] | None = None) -> None:
    """Checks the values of a flag that takes a list.

    Args:
        argument (`str`): Name of the flag.
        values (sequence): Its values.
        known (iterable of `str`, *optional*): Allowed values.

    Raises:
        ValueError: if there are no values, repeated ones, or unknown ones.
    """
    known = None if known is None else list(known)
    for value in values if known is not None else ():
        if value not in known:
            raise ValueError(f"{argument} must be among {', '.join(known)}, got {value!r}.")
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{argument} must be non-empty and unique, got {list(values)}.")
