# Licensed under the Apache License, Version 2.0.
"""Arguments of [`HeadwiseTrainer`], and of other trainers that [`HeadwiseTrainerMixin`] goes before."""

import math
from dataclasses import dataclass, field, fields

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from .schedules import GUIDANCE_SCHEDULES


_REAL = (
    "gate_penalty", "target_warmup", "target_learning_rate", "gate_learning_rate", "layer_rate_decay", "ema_decay"
)  # fmt: skip
_WHOLE = ("target_heads", "guidance_hold_steps")


def _number(name: str, value: object) -> float | int:
    """An argument as the number that it is to be."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}.") from None
    if name in _REAL:
        return number
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return int(number)


@dataclass
class HeadwiseArguments:
    """Weights of the losses of heads, rates by layer, and averaging: what goes before arguments of a trainer.

    `class HeadwiseSFTConfig(HeadwiseArguments, trl.SFTConfig)`, for instance, under `@dataclass(repr=False)`, has all
    of them, and the defaults of `SFTConfig`.

    Args:
        guidance_weight (`str` or `float`, *optional*): α_0, the weight of the guidance loss at the first step; 0 for
            none. `auto`, the default for models whose configuration has guidance, makes the guidance loss as large as
            the task loss on the first batch (the paper's rule).
        guidance_schedule (`str`, defaults to `"linear"`): How α falls: `linear` to 0 at the last step, `hold_linear`
            (held for `guidance_hold_steps`, then linear), or `constant`.
        guidance_hold_steps (`int`, defaults to 0): Steps that `hold_linear` holds α_0.
        gate_penalty (`float`, defaults to 0): λ, what an open gate costs: the weight of the gate penalty.
        target_heads (`int`, *optional*): Instead of a price, the number of gated heads that stay: exactly so many
            gates are open after the last step, as it is evaluated and saved. Not with `load_best_model_at_end`.
        target_warmup (`float`, defaults to 0.5): Share of the run over which the number of open heads falls to that.
        target_learning_rate (`float`, defaults to 1e-4): How fast the price of an open head follows, in loss for each
            head too many and step.
        gate_learning_rate (`float`, defaults to 0.1): Rate of the gates, which are never decayed.
        freeze_decoder (`bool`, *optional*): Train the encoder alone. By default, so do runs with `gate_penalty` or
            `target_heads` whose encoder–decoder has gates in the encoder only.
        layer_rate_decay (`float`, defaults to 1): Factor of the learning rate from one layer to the one before, down
            to the embeddings, see [`layer_factors`]. Gates have their own rate.
        ema_decay (`float`, defaults to 0): Evaluate, save and return an exponential moving average of the weights,
            over about `1 / (1 - ema_decay)` steps, see [`WeightAverage`]; 0 for the weights themselves.

    Raises:
        ValueError: if one of these is not possible; the message names the argument and the value.
    """

    guidance_weight: float | str | None = field(
        default=None,
        metadata={
            "help": "Initial weight of the guidance loss: a number, or 'auto' to equal the first task loss, as "
            "by default for a model with guidance."
        },
    )
    guidance_schedule: str = field(
        default="linear",
        metadata={"help": f"How the guidance weight falls: one of {', '.join(GUIDANCE_SCHEDULES)}."},
    )
    guidance_hold_steps: int = field(
        default=0, metadata={"help": "Steps for which guidance_schedule=hold_linear holds the initial weight."}
    )

    gate_penalty: float = field(default=0.0, metadata={"help": "Weight of the expected number of open gates."})
    target_heads: int | None = field(
        default=None, metadata={"help": "Number of gated heads that stay, instead of gate_penalty."}
    )
    target_warmup: float = field(
        default=0.5, metadata={"help": "Share of the run over which the number of open heads falls to target_heads."}
    )
    target_learning_rate: float = field(
        default=1e-4, metadata={"help": "How fast the price of an open head follows target_heads."}
    )
    gate_learning_rate: float = field(default=0.1, metadata={"help": "Learning rate of the gates."})
    freeze_decoder: bool | None = field(
        default=None, metadata={"help": "Train the encoder alone; by default if only the encoder is to lose heads."}
    )

    layer_rate_decay: float = field(
        default=1.0, metadata={"help": "Factor of the learning rate from one layer to the one before."}
    )
    ema_decay: float = field(
        default=0.0, metadata={"help": "Decay of the moving average of the weights that is evaluated and saved, or 0."}
    )

    # A dataclass would write another one, which shows tokens of the Hub as they are.
    __repr__ = TrainingArguments.__repr__

    def __post_init__(self):
        self.check_values()
        super().__post_init__()

    @classmethod
    def names(cls) -> list[str]:
        """Names of the arguments that are added here."""
        return [argument.name for argument in fields(HeadwiseArguments)]

    def check_values(self) -> None:
        """Checks the arguments that are added here, also those that have been changed since.

        Numbers may be texts: to YAML, `1e-3` is one.

        Raises:
            ValueError: names the argument and the value.
        """
        for name in (*_REAL, *_WHOLE):
            if (value := getattr(self, name)) is not None or name != "target_heads":
                setattr(self, name, _number(name, value))
        self._check_gates()
        if self.guidance_weight not in (None, "auto"):
            try:
                self.guidance_weight = float(self.guidance_weight)
            except (TypeError, ValueError):
                raise ValueError(
                    f"guidance_weight must be a number or 'auto', got {self.guidance_weight!r}."
                ) from None
            if not (math.isfinite(self.guidance_weight) and self.guidance_weight >= 0):
                raise ValueError(f"guidance_weight must be finite and at least 0, got {self.guidance_weight}.")
        if self.guidance_schedule not in GUIDANCE_SCHEDULES:
            raise ValueError(
                f"guidance_schedule must be one of {', '.join(GUIDANCE_SCHEDULES)}, got {self.guidance_schedule!r}."
            )
        if self.guidance_hold_steps < 0:
            raise ValueError(f"guidance_hold_steps must be at least 0, got {self.guidance_hold_steps}.")
        if self.guidance_hold_steps and self.guidance_schedule != "hold_linear":
            raise ValueError(
                f"guidance_hold_steps={self.guidance_hold_steps} is only read by guidance_schedule='hold_linear', "
                f"but that is {self.guidance_schedule!r}."
            )
        if not 0 < self.layer_rate_decay <= 1:
            raise ValueError(f"layer_rate_decay must be above 0 and at most 1, got {self.layer_rate_decay}.")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {self.ema_decay}.")

    def _check_gates(self):
        for name in ("gate_penalty", "target_learning_rate", "gate_learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}.")
        if not 0 <= self.target_warmup <= 1:
            raise ValueError(f"target_warmup must lie between 0 and 1, got {self.target_warmup}.")
        if self.target_heads is not None:
            if self.target_heads < 1:
                raise ValueError(f"target_heads must be at least 1, got {self.target_heads}.")
            if self.load_best_model_at_end:
                raise ValueError(
                    f"load_best_model_at_end=True would undo target_heads={self.target_heads}: so many gates are open "
                    "after the last step, not at an earlier one; set it to False."
                )
            if self.gate_penalty:
                raise ValueError(
                    f"gate_penalty={self.gate_penalty} and target_heads={self.target_heads} both set the price of an "
                    "open head; give one of them."
                )


@dataclass(repr=False)
class HeadwiseTrainingArguments(HeadwiseArguments, TrainingArguments):
    """[`HeadwiseArguments`] and those of `TrainingArguments`; no stock default differs."""


@dataclass(repr=False)
class HeadwiseSeq2SeqTrainingArguments(HeadwiseTrainingArguments, Seq2SeqTrainingArguments):
    """[`HeadwiseTrainingArguments`] and those of `Seq2SeqTrainingArguments`; no stock default differs."""
