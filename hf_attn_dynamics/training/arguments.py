# Licensed under the Apache License, Version 2.0.
"""Arguments of [`HeadwiseTrainer`]."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from .schedules import GUIDANCE_SCHEDULES


@dataclass
class HeadwiseTrainingArguments(TrainingArguments):
    """`TrainingArguments` and the weights of the losses that attention heads add. No stock default differs.

    Args:
        guidance_weight (`str` or `float`, defaults to `"auto"`): α_0, the weight of the guidance loss at the first
            step; 0 for none. `auto` makes the guidance loss as large as the task loss on the first batch (the paper's
            rule), and asks for no guidance if the model's configuration has none.
        guidance_schedule (`str`, defaults to `"linear"`): How α falls: `linear` to 0 at the last step, `hold_linear`
            (held for `guidance_hold_steps`, then linear), or `constant`.
        guidance_hold_steps (`int`, defaults to 0): Steps that `hold_linear` holds α_0.

    Raises:
        ValueError: if one of these is not possible; the message names the argument and the value.
    """

    guidance_weight: str = field(
        default="auto",
        metadata={"help": "Initial weight of the guidance loss: a number, or 'auto' to equal the first task loss."},
    )
    guidance_schedule: str = field(
        default="linear",
        metadata={"help": f"How the guidance weight falls: one of {', '.join(GUIDANCE_SCHEDULES)}."},
    )
    guidance_hold_steps: int = field(
        default=0, metadata={"help": "Steps for which guidance_schedule=hold_linear holds the initial weight."}
    )

    def __post_init__(self):
        if self.guidance_weight != "auto":
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
        super().__post_init__()
