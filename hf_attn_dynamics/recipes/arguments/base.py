# Licensed under the Apache License, Version 2.0.
"""Arguments that recipes have in common, and checks of values."""

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


@dataclasses.dataclass
class RunArguments:
    """Where a recipe runs, and whether it goes on with what is there."""

    resume: bool = dataclasses.field(default=False, metadata={"help": "Go on with the run in output_dir."})
    device: str = dataclasses.field(default="auto", metadata={"help": "auto, cpu or cuda."})
    cpu_threads: int | None = dataclasses.field(
        default=None, metadata={"help": "Threads of a process on the CPU; its share of the cores by default."}
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
        """Gives this process its share of the cores, see [`use_threads`]."""
        from ..run import use_threads

        use_threads(self.cpu_threads)


@dataclass
class PublishArguments(RunArguments):
    """[`RunArguments`] of a recipe that makes a model."""

    license: str | None = field(
        default=None, metadata={"help": "Licence of the weights, for the card, such as apache-2.0."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise ValueError(f"license must be an identifier of the Hub such as apache-2.0, got {self.license!r}.")


def _has_gpu() -> bool:
    import torch  # for this question alone

    return torch.cuda.is_available()


def refuse_flags(args: Any, without_effect: Mapping[str, str], preset: Mapping[str, Any] | None = None) -> None:
    """Refuses flags that a recipe does not read.

    Args:
        args (dataclass): Arguments.
        without_effect (`dict[str, str]`): Names of such flags, and what to do instead.
        preset (`dict`, *optional*): Defaults of flags where they are not those of the dataclass.

    Raises:
        ValueError: naming the first that differs from its default.
    """
    for name, instead in without_effect.items():
        value, field = getattr(args, name), type(args).__dataclass_fields__[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != (preset or {}).get(name, default):
            raise ValueError(f"{name}={value} has no effect here; {instead}.")


def check_names(argument: str, values: Sequence[Any], known: Iterable[str] | None = None) -> None:
    """Refuses values of a flag that takes several: no value, one twice, or one that is not known.

    Args:
        argument (`str`): Name of the flag.
        values (sequence): What was given.
        known (iterable of `str`, *optional*): What may be named.

    Raises:
        ValueError: naming the flag, what was given, and what may be.
    """
    known = None if known is None else list(known)
    for value in values if known is not None else ():
        if value not in known:
            raise ValueError(f"{argument} must be among {', '.join(known)}, got {value!r}.")
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{argument} must name something, and nothing twice, got {list(values)}.")
