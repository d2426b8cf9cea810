# Licensed under the Apache License, Version 2.0.
"""Arguments of [`HeadwiseTrainer`] and of other trainers with [`HeadwiseTrainerMixin`]."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ..models.guidance_settings import GUIDANCE_KERNELS, check_guidance_kernel
from .schedules import GUIDANCE_SCHEDULES, GuidanceSchedules


_REAL = (
    "gate_penalty", "target_warmup", "target_learning_rate", "gate_learning_rate", "layer_rate_decay", "ema_decay",
    "distillation_weight", "distillation_temperature", "hidden_distillation_weight", "target_speedup", "target_flops",
)  # fmt: skip
_WHOLE = ("target_heads", "latency_batch", "latency_length")
# Each replaces the penalty coefficient; `None` by default.
_TARGETS = ("target_heads", "target_speedup", "target_flops")


def _number(name: str, value: object) -> float | int:
    """Converts an argument to an int or float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}.") from None
    if name in _REAL:
        return number
    if not number.is_integer():
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    return int(number)


def _parsed(name: str, value: Any) -> Any:
    """The dictionary that a JSON string contains; other values are not changed."""
    if not isinstance(value, str) or not value.strip().startswith(("{", "[")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}={value} is not valid JSON: {error}.") from None


def _layers(name: str, value: Any) -> list[int]:
    """Checks a list of layers, and sorts it."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not value or not all(type(layer) is int and layer >= 0 for layer in value):
        raise ValueError(f"{name} must be a list of layers from 0, got {value!r}.")
    if len(set(value)) < len(value):
        raise ValueError(f"{name} must be unique, got {list(value)}.")
    return sorted(value)


@dataclass
class HeadwiseArguments:
    """Arguments for guidance, gates, layer-wise learning rates and weight averaging, mixed into trainer arguments.

    For example, `class HeadwiseSFTConfig(HeadwiseArguments, trl.SFTConfig)`, under `@dataclass(repr=False)`, combines
    them with `SFTConfig` and its defaults.

    Args:
        guidance_weight (`str` or `float`, *optional*): α_0, the weight of the guidance loss at the first step; 0 for
            none. `auto`, the default for models whose configuration has guidance, makes the weighted guidance loss
            equal to the task loss on the first batch (the paper's rule).
        guidance_schedule (`str` or `dict[str, str]`, defaults to `"linear"`): Schedule of α: `linear` decay to 0 at
            the last step, `hold_linear` (constant for `guidance_hold_steps`, then linear), `constant`, or `hold`
            (constant for `guidance_hold_steps`, then 0). A dictionary, or its JSON, gives patterns and targets their
            own schedules; those that it leaves out are `linear`.
        guidance_hold_steps (`int` or `dict[str, int]`, defaults to 0): Steps for which `hold_linear` and `hold` hold
            α_0; or a dictionary by pattern and target, or its JSON.
        guidance_kernel (`str`, defaults to `"auto"`): What computes the guidance loss, and that of the attention of a
            teacher: `triton`; `blocks`, a loop over blocks of rows in PyTorch; or `auto`, Triton on GPUs where it is
            installed and compiles.
        gate_penalty (`float`, defaults to 0): λ, the coefficient of the gate penalty.
        target_heads (`int`, *optional*): Number of gated heads to keep, instead of `gate_penalty`: exactly this number
            of gates are open after the last step, when it is evaluated and saved. Excludes `load_best_model_at_end`.
        target_speedup (`float`, *optional*): Cost in seconds of the model without pruning over its cost at the end,
            above 1, instead of `gate_penalty` or `target_heads`: after the last step, gates are open such that the
            pruned model is at least so much faster, by the table of costs, and no further head or unit fits.
        target_flops (`float`, *optional*): The same for the fraction of FLOPs that is left, between 0 and 1.
        latency_table (`str`, *optional*): File of a [`CostTable`] for `target_speedup`. Without it, or a table that
            the trainer is given, [`measure_latency_table`] measures one on the device of the trainer.
        latency_batch, latency_length (`int`, default to 8 and 128): Shape of the batch for which costs are measured or
            counted; at most as many tokens as the model has positions, none for images.
        target_warmup (`float`, defaults to 0.5): Fraction of the run over which the target decreases to
            `target_heads`, or the cost to that of `target_speedup` or `target_flops`.
        target_learning_rate (`float`, defaults to 1e-4): Learning rate of the penalty coefficient under a target, in
            loss per excess head, or excess percent of the cost, and step.
        gate_learning_rate (`float`, defaults to 0.1): Learning rate of the gates, which have no weight decay.
        distillation_weight (`float`, defaults to 0): w, the weight of the logits of the teacher; the task
            loss becomes `(1 − w) · task loss + w · distillation loss`, see [`logit_distillation_loss`]; 1 for no task
            loss. The attention of a teacher is a part of the guidance loss.
        distillation_temperature (`float`, defaults to 2): Temperature by which the logits are divided.
        hidden_distillation_weight (`float`, defaults to 0): β, the weight of the hidden states of a teacher with the
            same hidden size, whose loss is added, see [`hidden_distillation_loss`]. The layers of the student are
            matched to those of the teacher in each step (CoFi, Xia et al. 2022).
        hidden_distillation_layers (`list[int]` or `dict[str, list[int]]`, *optional*): Layers of the teacher that are
            learned, counted from 0; by stack for an encoder–decoder, `{"encoder": [2, 5], "decoder": [5]}`. A string
            may list them, `"2,5"`, or be JSON. By default every k-th with k = ⌈layers / 4⌉, down from the last: 2, 5,
            8 and 11 of twelve layers, as in CoFi.
        freeze_decoder (`bool`, *optional*): Train the encoder only. By default, runs with `gate_penalty` or a
            target of gates do so if only the encoder of an encoder–decoder has gates.
        layer_rate_decay (`float`, defaults to 1): Factor of the learning rate between successive layers, from the last
            layer down to the embeddings, see [`layer_factors`]. Gates have a separate rate.
        ema_decay (`float`, defaults to 0): Decay of the exponential moving average of the weights that is evaluated,
            saved and returned, over about `1 / (1 - ema_decay)` steps, see [`WeightAverage`]; 0 for no averaging.

    Raises:
        ValueError: if a value is invalid; the message names the argument and the value.
    """

    guidance_weight: float | str | None = field(
        default=None,
        metadata={
            "help": "Initial weight of the guidance loss: a number, or 'auto' to equal the first task loss, as "
            "by default for a model with guidance."
        },
    )
    # `None` stands for the default. Without it in the union, HfArgumentParser would parse flags as dictionaries.
    guidance_schedule: dict[str, str] | str | None = field(
        default="linear",
        metadata={
            "help": f"Schedule of the guidance weight: one of {', '.join(GUIDANCE_SCHEDULES)}; or a dictionary by "
            "pattern and target."
        },
    )
    guidance_hold_steps: dict[str, int] | str | int | None = field(
        default=0,
        metadata={
            "help": "Steps for which guidance_schedule=hold_linear or hold holds the initial weight; or a dictionary "
            "by pattern and target."
        },
    )
    guidance_kernel: str = field(
        default="auto",
        metadata={"help": f"What computes the guidance loss: {', '.join(GUIDANCE_KERNELS)} (Triton where it runs)."},
    )

    gate_penalty: float = field(default=0.0, metadata={"help": "Coefficient of the expected number of open gates."})
    target_heads: int | None = field(
        default=None, metadata={"help": "Number of gated heads to keep, instead of gate_penalty."}
    )
    target_speedup: float | None = field(
        default=None, metadata={"help": "Speed-up of the pruned model, instead of gate_penalty or target_heads."}
    )
    target_flops: float | None = field(
        default=None, metadata={"help": "Fraction of FLOPs that the pruned model has left, instead of target_speedup."}
    )
    latency_table: str | None = field(
        default=None, metadata={"help": "File of a cost table for target_speedup; measured here without it."}
    )
    latency_batch: int = field(
        default=8, metadata={"help": "Sentences of the batch for which target_speedup or target_flops holds."}
    )
    latency_length: int = field(
        default=128, metadata={"help": "Tokens of each sentence of this batch, at most the model's positions."}
    )
    target_warmup: float = field(
        default=0.5, metadata={"help": "Fraction of the run over which heads or costs decrease to the target."}
    )
    target_learning_rate: float = field(
        default=1e-4, metadata={"help": "Learning rate of the penalty coefficient under a target."}
    )
    gate_learning_rate: float = field(default=0.1, metadata={"help": "Learning rate of the gates."})
    distillation_weight: float = field(
        default=0.0, metadata={"help": "Weight of the logits of a teacher; the task loss has the rest of 1."}
    )
    distillation_temperature: float = field(
        default=2.0, metadata={"help": "Temperature by which the logits of student and teacher are divided."}
    )
    hidden_distillation_weight: float = field(
        default=0.0, metadata={"help": "Weight of the hidden states of a teacher, added to the loss."}
    )
    # HfArgumentParser reads flags of a union as its second type.
    hidden_distillation_layers: dict[str, list[int]] | str | list[int] | None = field(
        default=None,
        metadata={
            "help": "Layers of the teacher whose hidden states are learned, from 0, such as 2,5,8,11; or JSON by "
            "stack, encoder and decoder."
        },
    )
    freeze_decoder: bool | None = field(
        default=None, metadata={"help": "Train the encoder only; by default if only the encoder is pruned."}
    )

    layer_rate_decay: float = field(
        default=1.0, metadata={"help": "Factor of the learning rate from each layer to the one below."}
    )
    ema_decay: float = field(
        default=0.0, metadata={"help": "Decay of the weight average that is evaluated and saved; 0 for none."}
    )

    # The dataclass's own would show tokens of the Hub.
    __repr__ = TrainingArguments.__repr__

    def __post_init__(self):
        self.check_values()
        # Only here: copies of arguments may train without a teacher.
        if self.hidden_distillation_layers is not None and not self.hidden_distillation_weight:
            raise ValueError(
                f"hidden_distillation_layers={self.hidden_distillation_layers} needs a hidden_distillation_weight "
                "above 0."
            )
        if (
            self.distillation_temperature != HeadwiseArguments.distillation_temperature
            and not self.distillation_weight
        ):
            raise ValueError(
                f"distillation_temperature={self.distillation_temperature} needs a distillation_weight above 0."
            )
        for name, targets in self.used_with().items():
            if getattr(self, name) != getattr(type(self), name) and not any(map(self._is_set, targets)):
                raise ValueError(f"{name}={getattr(self, name)} needs {' or '.join(targets)}.")
        super().__post_init__()

    def used_with(self) -> dict[str, tuple[str, ...]]:
        """Arguments that have an effect only together with one of some others."""
        of_speed = ("target_speedup", "target_flops")
        return {
            **dict.fromkeys(("target_warmup", "target_learning_rate"), ("target_heads", *of_speed)),
            **dict.fromkeys(("latency_batch", "latency_length"), of_speed),
        }

    def _is_set(self, name: str) -> bool:
        return getattr(self, name) is not None

    @classmethod
    def names(cls) -> list[str]:
        """Names of the arguments of [`HeadwiseArguments`]."""
        return [argument.name for argument in fields(HeadwiseArguments)]

    def check_values(self) -> None:
        """Checks the arguments of [`HeadwiseArguments`], again after they were changed.

        Numbers may be strings, as YAML reads `1e-3`.

        Raises:
            ValueError: if a value is invalid; the message names the argument and the value.
        """
        for name in (*_REAL, *_WHOLE):
            if (value := getattr(self, name)) is not None or name not in _TARGETS:
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
        self._check_schedules()
        if not 0 <= self.distillation_weight <= 1:
            raise ValueError(f"distillation_weight must be between 0 and 1, got {self.distillation_weight}.")
        if not 0 < self.distillation_temperature < math.inf:
            raise ValueError(
                f"distillation_temperature must be above 0 and finite, got {self.distillation_temperature}."
            )
        self._check_hidden_states()
        if not 0 < self.layer_rate_decay <= 1:
            raise ValueError(f"layer_rate_decay must be above 0 and at most 1, got {self.layer_rate_decay}.")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {self.ema_decay}.")

    def _check_hidden_states(self):
        weight, layers = self.hidden_distillation_weight, self.hidden_distillation_layers
        if not 0 <= weight < math.inf:
            raise ValueError(f"hidden_distillation_weight must be finite and at least 0, got {weight}.")
        if layers is None:
            return
        name = "hidden_distillation_layers"
        if isinstance(layers, str):
            layers = _parsed(name, layers if layers.strip().startswith(("{", "[")) else f"[{layers}]")
        if isinstance(layers, Mapping):
            if not layers or not set(layers) <= {"encoder", "decoder"}:
                raise ValueError(f"{name} must name encoder or decoder, got {layers!r}.")
            self.hidden_distillation_layers = {
                kind: _layers(f"{name} of the {kind}", own) for kind, own in layers.items()
            }
        else:
            self.hidden_distillation_layers = _layers(name, layers)

    def _check_schedules(self):
        name = "guidance_hold_steps"
        schedule, steps = (_parsed(one, getattr(self, one)) for one in ("guidance_schedule", name))
        if isinstance(steps, Mapping):
            steps = {of: _number(f"{name} of {of!r}", one) for of, one in steps.items()}
        else:
            steps = _number(name, 0 if steps is None else steps)
        self.guidance_schedule, self.guidance_hold_steps = "linear" if schedule is None else schedule, steps
        GuidanceSchedules(self.guidance_schedule, self.guidance_hold_steps)
        check_guidance_kernel(self.guidance_kernel)

    def _check_gates(self):
        for name in ("gate_penalty", "target_learning_rate", "gate_learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}.")
        if not 0 <= self.target_warmup <= 1:
            raise ValueError(f"target_warmup must be between 0 and 1, got {self.target_warmup}.")
        if self.target_heads is not None and self.target_heads < 1:
            raise ValueError(f"target_heads must be at least 1, got {self.target_heads}.")
        if self.target_speedup is not None and not 1 < self.target_speedup < math.inf:
            raise ValueError(f"target_speedup must be finite and above 1, got {self.target_speedup}.")
        if self.target_flops is not None and not 0 < self.target_flops < 1:
            raise ValueError(f"target_flops must be between 0 and 1, got {self.target_flops}.")
        for name in ("latency_batch", "latency_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.latency_table is not None and self.target_speedup is None:
            raise ValueError(f"latency_table={self.latency_table} needs a target_speedup.")
        set_ones = [f"gate_penalty={self.gate_penalty}"] if self.gate_penalty else []
        set_ones += [f"{name}={getattr(self, name)}" for name in _TARGETS if getattr(self, name) is not None]
        if len(set_ones) > 1:
            raise ValueError(f"{set_ones[0]} and {set_ones[1]} both set the penalty coefficient; pass one of them.")
        if self.load_best_model_at_end and set_ones and not self.gate_penalty:
            raise ValueError(
                f"load_best_model_at_end=True conflicts with {set_ones[0]}, which is reached only after the last "
                "step; set it to False."
            )


@dataclass(repr=False)
class HeadwiseTrainingArguments(HeadwiseArguments, TrainingArguments):
    """[`HeadwiseArguments`] combined with `TrainingArguments`, whose defaults do not change."""


@dataclass(repr=False)
class HeadwiseSeq2SeqTrainingArguments(HeadwiseTrainingArguments, Seq2SeqTrainingArguments):
    """[`HeadwiseTrainingArguments`] combined with `Seq2SeqTrainingArguments`, whose defaults do not change."""
