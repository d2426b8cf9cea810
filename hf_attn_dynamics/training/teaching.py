# Licensed under the Apache License, Version 2.0.
"""A trainer with a teacher: the arguments and the loss that a student gets from it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..analysis.running import unwrapped
from ..models.compat import is_fused_by_trl
from ..models.head_gates import remove_gates
from ..models.head_losses import labelled_rows
from .distillation import (
    Teacher,
    TeacherOutput,
    check_is_model,
    check_tokenizers,
    logit_distillation_loss,
    vocabulary_sizes,
)
from .hidden_distillation import HiddenMatching, check_hidden_states, checked_layers, stacks_of
from .trainer_checks import has_classes
from .training_hooks import TrainingHooksMixin


class TeacherMixin(TrainingHooksMixin):
    """A trainer whose headwise model may learn from a teacher, see [`HeadwiseTrainerMixin`].

    Args:
        teacher (`PreTrainedModel` or `str`, *optional*): Any model that reads the same tokens. It is moved to the
            device of the trainer, runs in evaluation mode without gradients, and is neither trained nor saved.
            `"self"` stands for a copy of the model as the trainer gets it, without gates.
    """

    def __init__(self, *args, teacher: PreTrainedModel | str | None = None, **kwargs):
        self.teacher = teacher
        self._teacher: Teacher | None = None  # in a training with a teacher
        self._hidden: HiddenMatching | None = None  # in a training with hidden states of a teacher
        self._read_from: tuple = ()  # what it was checked against
        super().__init__(*args, **kwargs)

    @property
    def hidden_pairs(self) -> dict[str, dict[int, int]]:
        """Layers that learn the hidden states of layers of the teacher in the current step, by stack."""
        return {} if self._hidden is None else self._hidden.pairs

    def _read_teacher(self) -> None:
        """Checks the teacher against model and arguments."""
        model, weight = self._plain_model, self._argument("distillation_weight")
        hidden_weight = self._argument("hidden_distillation_weight")
        is_headwise = hasattr(model, "head_settings")
        learns_attention = is_headwise and model.head_settings.is_taught and self._argument("guidance_weight") != 0
        known, self._teacher = self._teacher, None
        if self._hidden is not None:
            self.remove_callback(self._hidden)
            self._hidden = None
        if self.teacher is None:
            if learns_attention or weight or hidden_weight:
                given = f"distillation_weight={weight}" if weight else f"hidden_distillation_weight={hidden_weight}"
                given = "guidance['teacher']" if learns_attention else given
                raise ValueError(
                    f"{given} needs a teacher: pass {type(self).__name__}(…, teacher=model), or leave it out."
                )
            return
        if isinstance(self.teacher, str) and self.teacher == "self":
            self.teacher = _copy_without_gates(model)
        check_is_model(self.teacher)
        if not is_headwise:
            raise ValueError(
                f"only headwise models learn from a teacher, got {type(model).__name__}: load it as a headwise model."
            )
        if not (learns_attention or weight or hidden_weight):
            raise ValueError(
                "teacher is given, but nothing is learned from it: build the model with "
                'guidance={"teacher": {"layers": {0: 0}}}, for instance, set distillation_weight or '
                "hidden_distillation_weight, or leave it out."
            )
        if any(term.made for term in model.loss_terms):
            raise ValueError(
                f"{type(model).__name__} replaces tokens in its forward pass, which a teacher would not see: train "
                "another model with a teacher."
            )
        if weight and not has_classes(model):
            raise ValueError(
                f"distillation_weight needs a task loss over classes or tokens, which {type(model).__name__} does not "
                "have; set it to 0."
            )
        if not hasattr(self.teacher, "hf_device_map"):
            self.teacher.to(self.args.device)
        layers = self._hidden_layers(model) if hidden_weight else None
        tokenizer, sizes = getattr(self, "processing_class", None), vocabulary_sizes(self.teacher, model)
        source = (self.teacher, model, model.head_settings if learns_attention else None, tokenizer, sizes, layers)
        if known is None or source != self._read_from or not known.is_current():
            self._check_tokenizer(tokenizer)
            known = Teacher(self.teacher, model, None if learns_attention else {}, layers)
        self._teacher, self._read_from = known, source
        if layers is not None:
            self._hidden = HiddenMatching(layers, self._sum_of_processes)
            self.add_callback(self._hidden)

    def _hidden_layers(self, model: PreTrainedModel) -> dict[str, list[int]]:
        """Layers of the teacher whose hidden states are learned, by stack."""
        check_hidden_states(unwrapped(self.teacher), model)
        return checked_layers(unwrapped(self.teacher), stacks_of(model), self._argument("hidden_distillation_layers"))

    def _sum_of_processes(self, values: torch.Tensor) -> torch.Tensor:
        """Sums parts of means over processes: their mean if each process divides by counts of its own."""
        return self.accelerator.reduce(values, "mean") * self._summed_processes

    def _check_tokenizer(self, own: Any) -> None:
        """Compares the tokenizer of the trainer with the one in the folder of the teacher, where there are both."""
        name = getattr(self.teacher, "name_or_path", None)
        if not isinstance(own, PreTrainedTokenizerBase) or not name:
            return
        try:
            other = AutoTokenizer.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError):
            return  # saved without its tokenizer, or with one of a library that is missing
        check_tokenizers(own, other)

    @property
    def _distillation_weight(self) -> float:
        return self._argument("distillation_weight") if self._teacher is not None else 0.0

    def _lesson(self, inputs: Mapping[str, Any]) -> TeacherOutput | None:
        """Output of the teacher for a micro-batch; `None` without a teacher."""
        return None if self._teacher is None else self._teacher(self._plain_model.without_labels(dict(inputs)))

    def _with_distillation(
        self,
        task_loss: torch.Tensor,
        outputs: Mapping[str, Any],
        lesson: TeacherOutput,
        inputs: Mapping[str, Any],
        counts: Mapping[str, torch.Tensor],
        processes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(1 − w) · task loss + w · distillation loss` of a micro-batch, and the distillation loss.

        Args:
            task_loss (`torch.Tensor`): Task loss.
            outputs (`ModelOutput`): Outputs of the student, with logits.
            lesson ([`TeacherOutput`]): Output of the teacher.
            inputs (`dict`): The micro-batch, with labels.
            counts (`dict`): Number of labels of the whole accumulated batch, by column.
            processes (`int`): Factor of losses that are divided by these counts.
        """
        model, weight = self._plain_model, self._distillation_weight
        term = model.loss_terms[0]
        rows = labelled_rows(model.loss_terms, model.config, inputs).view(outputs["logits"].shape[:-1])
        loss = logit_distillation_loss(
            outputs["logits"],
            lesson.logits,
            self._argument("distillation_temperature"),
            rows,
            counts[term.labels],
        )
        loss = loss * processes
        return (1 - weight) * task_loss + weight * loss.to(task_loss.device), loss


def _copy_without_gates(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with all of its remaining heads and units, which belongs to no folder."""
    teacher = copy.deepcopy(model)
    teacher.name_or_path = ""
    if is_fused_by_trl(teacher.forward):
        del teacher.forward
    if getattr(teacher.config, "gates", None) is not None:
        remove_gates(teacher)
    return teacher.requires_grad_(False)
