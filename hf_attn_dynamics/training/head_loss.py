# Licensed under the Apache License, Version 2.0.
"""The loss of a training step: label counts, requested head losses, and losses of other trainers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import ModelOutput

from ..models.compat import keep_dataset_columns, prepared_batch
from ..models.hard_concrete import HardConcreteGate
from ..models.head_gates import gates_of
from ..models.head_losses import FORWARD_PASSES, SENTENCES, add_head_losses, head_loss_parts
from ..models.ignored_labels import is_labelled
from ..models.packing import count_sentences
from .distillation import TeacherOutput
from .gates import gate_noise
from .head_plan import HeadPlan, HeadStep, LossWindow
from .hidden_distillation import count_tokens
from .label_evaluation import LabelEvaluationMixin
from .label_watch import LabelWatch, TargetWatch
from .teaching import TeacherMixin


INITIAL_WEIGHT_KEY = "guidance_weight_initial"
HEAD_LOSS_OF = {"guidance_weight": "guidance_loss", "gate_penalty_weight": "gate_penalty"}


class HeadLossMixin(LabelEvaluationMixin, TeacherMixin):
    """A trainer that passes weights and counts to headwise models, see [`HeadwiseTrainerMixin`]."""

    def __init__(self, *args, **kwargs):
        self._heads: HeadPlan | None = None  # for a headwise model
        self._step: HeadStep | None = None  # the current step
        self._window = LossWindow()
        self._label_watch, self._target_watch = LabelWatch(self), TargetWatch(self)
        self.initial_guidance_weight: float | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(self._label_watch)
        self.add_callback(self._target_watch)

    @property
    def is_headwise(self) -> bool:
        """Whether the model is headwise."""
        return self._heads is not None

    @property
    def is_guided(self) -> bool:
        """Whether heads are guided during training."""
        return self.is_headwise and self._heads.guided

    def _gates(self) -> list[HardConcreteGate]:
        return gates_of(self._plain_model) if self.is_headwise else []

    def _set_signature_columns_if_needed(self):
        """The stock method, which collects the columns to keep; adds those of guidance targets."""
        super()._set_signature_columns_if_needed()
        keep_dataset_columns(self, sorted(getattr(self.model, "target_columns", ())))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Fetches the micro-batches of one step, and counts their labels and sentences over all processes.

        An incomplete step at the end of a stream is dropped: the stock loop would add its gradient to the first step
        of the next epoch.

        Raises:
            ValueError: if the stream has too few micro-batches for a single step.
        """
        # Callbacks of the step before may have removed gates.
        self._follow_model()
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self.is_headwise or not samples:
            return samples, num_items
        if len(samples) < num_batches:
            if not self.state.global_step:
                raise ValueError(
                    f"a step needs gradient_accumulation_steps={num_batches} batches, but train_dataset has only "
                    f"{len(samples)}; lower it, or per_device_train_batch_size."
                )
            return [], None
        self._window.begin_step(self.state.global_step)
        counts = self._counts_of_step(samples, device)
        self._step = HeadStep(counts, guidance_kernel=self._argument("guidance_kernel"))
        if self._hidden is not None:
            if not self._hidden.distances:
                self._rehearsed(samples, num_items)
                self._hidden.finish_step()
            self._hidden.begin_step(self._plain_model)
        if self.is_guided:
            if self.initial_guidance_weight is None:
                self.initial_guidance_weight = self._balanced_weight(samples, num_items)
                self.log({INITIAL_WEIGHT_KEY: self.initial_guidance_weight})
            self._step.guidance_weight = self.guidance_weight
            self._step.counts_hits = self._is_logged and bool(self._plain_model.target_columns)
        if self._heads.gated:
            self._step.gate_noise = self._noise()
            self._step.gate_penalty_weight = self._heads.gate_penalty_weight(self._plain_model, self.state)
            self._step.gate_cost = self._heads.cost
        return samples, num_items

    @property
    def _is_logged(self) -> bool:
        """Whether the next entry of the log covers the current step; an entry of an epoch covers all its steps."""
        step, way = self.state.global_step + 1, self.args.logging_strategy
        if way == IntervalStrategy.EPOCH or (step == 1 and self.args.logging_first_step):
            return True
        every = self.state.logging_steps
        return way == IntervalStrategy.STEPS and every > 0 and step % every == 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The stock step, which restores `loss_is_scaled_for_ga`."""
        is_scaled = self.loss_is_scaled_for_ga
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.loss_is_scaled_for_ga = is_scaled

    def _counts_of_step(self, samples: list[dict], device: torch.device) -> dict[str, torch.Tensor]:
        counts = [self._count(batch) for batch in samples]
        names = sorted({name for count in counts for name in count})
        totals = torch.stack([sum(count[name] for count in counts if name in count) for name in names]).to(device)
        if self.args.average_tokens_across_devices:
            totals = self.accelerator.reduce(totals, "sum")
        labels = [total for total, name in zip(totals, names) if name in self._plain_model.label_columns]
        # Unknown if a subclass creates the labels, or the user computes the loss.
        self._label_watch.add(sum(labels) if labels and self.compute_loss_func is None else None)
        columns = self._plain_model.target_columns
        self._target_watch.add_counts({name: total for total, name in zip(totals, names) if name in columns})
        counts = dict(zip(names, totals.clamp(min=1)))
        return {**counts, FORWARD_PASSES: len(samples) * self._summed_processes}

    def _count(self, batch: dict) -> dict[str, torch.Tensor]:
        """Number of labels of each column, and of sentences, of one micro-batch from the collator."""
        model = self._plain_model
        missing = [name for name in model.label_columns if batch.get(name) is None]
        others = [name for name in self.label_names if name not in model.label_columns and batch.get(name) is not None]
        # `compute_loss` of a subclass may rename columns later.
        renamed = {own: batch[name] for own, name in zip(missing, others)} if len(missing) == len(others) else {}
        rows = model.count_guided_rows({**batch, **renamed}) if self.is_guided else {}
        counts = {**model.count_labels({**batch, **renamed}), **rows, SENTENCES: count_sentences(model, batch)}
        if self._hidden is not None:
            counts |= count_tokens(model, {**batch, **renamed}, self._hidden.stacks)
        return counts

    @property
    def _summed_processes(self) -> int:
        """Factor of losses with counts summed over processes, since gradients are averaged over them."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    @property
    def guidance_weight(self) -> float | dict[str, float]:
        """α of the current step; by name if patterns and targets have different schedules."""
        return self._guidance_weight_at(self.state.global_step)

    def _guidance_weight_at(self, step: int) -> float | dict[str, float]:
        return self._heads.guidance_weight(step, self.state.max_steps, self.initial_guidance_weight)

    def _noise(self) -> torch.Tensor:
        model, step = self._plain_model, self.state.global_step
        return gate_noise(model.head_gates(), self.args.seed, step, model.unit_gates()).to(self.args.device)

    # ---- The loss ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Task loss plus weighted head losses in training; only the task loss in evaluation."""
        if not self.is_headwise:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_rehearsed = self._step is not None and self._step.rehearsed is not None
        if not (model.training or is_rehearsed):
            return self.evaluation_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.loss_is_scaled_for_ga is None and not is_rehearsed:
            # This loss is divided by counts of the whole accumulated batch; a subclass may return another loss.
            self.loss_is_scaled_for_ga = True
        # Outside of training, the step is this batch.
        step = self._step or self._only_step(inputs)
        if not self._plain_model.label_columns or self._has_own_loss:
            loss, outputs, parts = self._loss_with_heads(model, inputs, return_outputs, num_items_in_batch, step)
        else:
            loss, outputs, parts = self._loss_of_model(model, inputs, step)
        if is_rehearsed:
            step.rehearsed.append(parts)
        elif step is self._step:
            self._window.record(parts)
        return (loss, outputs) if return_outputs else loss

    @property
    def _has_own_loss(self) -> bool:
        """Whether the trainer computes the loss, instead of the model."""
        return self.label_smoother is not None or self.compute_loss_func is not None or self.computes_loss

    def _only_step(self, inputs: dict) -> HeadStep:
        """A step with a single batch, outside of training."""
        processes = self._summed_processes
        counts = {name: count * processes for name, count in self._count(inputs).items()}
        return HeadStep(
            {**counts, FORWARD_PASSES: processes},
            self.guidance_weight if self.is_guided and self.initial_guidance_weight is not None else None,
            self._heads.penalty if self._heads.penalised else None,
            gate_cost=self._heads.cost,
            guidance_kernel=self._argument("guidance_kernel"),
        )

    def _loss_of_model(self, model: nn.Module, inputs: dict, step: HeadStep) -> tuple:
        """The loss that the model computes for a micro-batch, its outputs, and the parts of the loss by name."""
        own = self._plain_model
        if any(inputs.get(name) is None for name in own.label_columns):
            needed, given = " and ".join(own.label_columns), ", ".join(inputs)
            raise ValueError(f"{type(own).__name__} needs {needed} for its loss, but the batch has {given}.")
        lesson, counts, processes = self._lesson(inputs), self._counts_for(inputs, step), self._summed_processes
        # With the logits of a teacher, the head losses are added to what becomes of the task loss.
        weights = _requests(step) if self._distillation_weight else step.weights
        arguments = {**inputs, **weights, **step.others, **_attention(lesson, step), "return_dict": True}
        arguments |= self._hidden_request
        if step.counts_hits:
            arguments["output_guided_hits"] = True
        loss, outputs = super().compute_loss(model, arguments, True, counts)
        self._window.record_hits(outputs.get("guided_hits"))
        parts = {f"{name}_loss": value for name, value in (outputs.get("task_losses") or {}).items()}
        parts |= {name: outputs[name] for name in ("guidance_loss", "gate_penalty") if outputs.get(name) is not None}
        parts |= _by_name(outputs.get("guidance_losses") or {})
        parts = {name: value * processes for name, value in parts.items()}
        alone = outputs.get("task_loss")
        parts["task_loss"] = loss if alone is None else alone * processes
        if self._distillation_weight:
            loss, distilled = self._with_distillation(loss, outputs, lesson, inputs, counts, processes)
            by_name = {name: one * processes for name, one in (outputs.get("guidance_losses") or {}).items()}
            loss = add_head_losses(loss, {**parts, "guidance_losses": by_name}, **step.weights)
            parts["distillation_loss"] = distilled
        loss = self._with_hidden_states(loss, outputs, lesson, inputs, counts, step, parts)
        return loss, outputs, parts

    def _loss_with_heads(
        self, model: nn.Module, inputs: dict, return_outputs: bool, num_items: Any, step: HeadStep
    ) -> tuple:
        """The same for a loss that the trainer computes, to which head losses are added."""
        counts, weights, lesson = self._counts_for(inputs, step), step.weights, self._lesson(inputs)
        arguments = {**inputs, **self._inputs_from_labels(inputs), **step.others, **_requests(step)}
        arguments |= {**_attention(lesson, step), **self._hidden_request, "return_dict": True}
        if self.is_guided and self._plain_model.target_columns:
            arguments |= {"guidance_counts": counts, "output_guided_hits": step.counts_hits}
        if not self._has_own_loss:
            # A model with an unknown loss: its reduction is unknown, too.
            num_items = None
        elif (num_items is None or self.computes_loss) and step is self._step and inputs.get("labels") is not None:
            # The stock trainer counts labels before a subclass renames columns, and includes the first label of a
            # sentence for some models that ignore it.
            num_items = counts.get("labels", num_items)
        if torch.is_tensor(num_items):
            # A step may have no labels.
            num_items = num_items.clamp(min=1)
        # Fused output layers of other trainers return no hidden states.
        body = nullcontext([]) if self._hidden is None else _outputs_of(self._plain_model.base_model)
        with _outputs_of(model) as seen, body as of_body:
            found = super().compute_loss(model, arguments, return_outputs, num_items)
        task_loss, outputs = found if return_outputs else (found, None)
        if num_items is None:
            # Without counted labels, it is the mean over micro-batches.
            task_loss = task_loss / (counts[FORWARD_PASSES] // self._summed_processes)
        self._window.record_hits(seen[0].get("guided_hits"))
        heads = {HEAD_LOSS_OF[name]: seen[0][HEAD_LOSS_OF[name]] for name in weights}
        if "guidance_loss" in heads:
            heads["guidance_losses"] = seen[0]["guidance_losses"]
        sentences = count_sentences(self._plain_model, inputs) if "guidance_loss" in heads else None
        parts, processes = head_loss_parts(heads, sentences, counts), self._summed_processes
        by_name = {name: value * processes for name, value in parts.pop("guidance_losses", {}).items()}
        parts = {name: value * processes for name, value in parts.items()}
        loss, named = task_loss, {**parts, **_by_name(by_name), "task_loss": task_loss}
        if self._distillation_weight:
            loss, named["distillation_loss"] = self._with_distillation(
                loss, seen[0], lesson, inputs, counts, processes
            )
        loss = add_head_losses(loss, {**parts, "guidance_losses": by_name}, **weights)
        states = next((one for one in (*seen, *of_body) if "hidden_states" in one), seen[0])
        loss = self._with_hidden_states(loss, states, lesson, inputs, counts, step, named)
        return loss, outputs, named

    @property
    def _hidden_request(self) -> dict[str, bool]:
        """Arguments that request the hidden states of the student, if they are learned."""
        return {} if self._hidden is None else {"output_hidden_states": True}

    def _with_hidden_states(
        self,
        loss: torch.Tensor,
        outputs: Any,
        lesson: TeacherOutput | None,
        inputs: dict,
        counts: dict[str, torch.Tensor],
        step: HeadStep,
        parts: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Adds the loss of the hidden states to the loss of a micro-batch and to its parts."""
        if self._hidden is None:
            return loss
        within = step is self._step
        # Rehearsals of other losses are not a part of the step.
        is_measured = within and (step.rehearsed is None or not self._hidden.distances)
        is_alone = not within or not self._hidden.distances
        hidden = self._hidden.loss(
            self._plain_model, outputs, lesson.hidden_states, inputs, counts, is_alone, is_measured
        )
        parts["hidden_distillation_loss"] = hidden = hidden * self._summed_processes
        return loss + self._argument("hidden_distillation_weight") * hidden.to(loss.device)

    def _counts_for(self, inputs: dict, step: HeadStep) -> dict[str, torch.Tensor]:
        """Counts of the whole accumulated batch.

        If only `compute_loss` of a subclass creates a label column, its loss is the mean over micro-batches.
        """
        model, counts = self._plain_model, step.counts
        if all(name in counts or inputs.get(name) is None for name in model.label_columns):
            return counts
        labels = model.count_labels(inputs)
        return {**{name: count.clamp(min=1) * counts[FORWARD_PASSES] for name, count in labels.items()}, **counts}

    def _inputs_from_labels(self, inputs: dict) -> dict:
        """Inputs that an encoder–decoder derives from labels, which the stock method removes from the batch."""
        model, labels = self._plain_model, inputs.get("labels")
        if labels is None or not model.config.is_encoder_decoder:
            return {}
        return {**model.without_labels(inputs), **({"guidance_rows": is_labelled(labels)} if self.is_guided else {})}

    @torch.no_grad()
    def _balanced_weight(self, samples: list[dict], num_items_in_batch) -> float:
        """α_0 that balances both losses on the first batch, in evaluation mode, without using random numbers."""
        self._step.guidance_weight = 1.0
        sums = torch.zeros(2, device=self.args.device)
        for parts in self._rehearsed(samples, num_items_in_batch):
            sums += torch.stack([parts["task_loss"].float(), parts["guidance_loss"].float()])
        task_loss, guidance_loss = self.accelerator.reduce(sums, "mean").tolist()
        if not (guidance_loss > 0 and 0 < task_loss < math.inf):
            raise ValueError(
                f"guidance_weight=auto found a task loss of {task_loss} and a guidance loss of {guidance_loss} on "
                "the first batch, which cannot be balanced; set guidance_weight to a number."
            )
        return task_loss / guidance_loss

    @torch.no_grad()
    def _rehearsed(self, samples: list[dict], num_items_in_batch) -> list[dict[str, torch.Tensor]]:
        """Parts of the loss of each micro-batch by name, in evaluation mode, without using random numbers."""
        self.model.eval()
        self._step.rehearsed = rehearsed = []
        for number, batch in enumerate(samples, 1):
            batch = prepared_batch(self, batch)
            # The method of a subclass, which may change the batch.
            self.compute_loss(self.model, batch, num_items_in_batch=num_items_in_batch)
            if len(rehearsed) < number:
                # The subclass does not call this class.
                HeadLossMixin.compute_loss(self, self.model, batch, num_items_in_batch=num_items_in_batch)
        self._step.rehearsed = None
        self.model.train()
        return rehearsed


def _requests(step: HeadStep) -> dict[str, bool]:
    """Arguments that request the head losses without adding them to the loss of the model."""
    return {f"output_{HEAD_LOSS_OF[name]}": True for name in step.weights}


def _attention(lesson: TeacherOutput | None, step: HeadStep) -> dict[str, Any]:
    """The attention of a teacher, as an argument of the model, if the step is guided."""
    is_read = lesson is not None and lesson.attention and step.guidance_weight is not None
    return {"teacher_attention": lesson.attention} if is_read else {}


def _by_name(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Guidance losses by their names in the log; nothing for a single one, which is the sum."""
    return {f"guidance_loss_{name}": loss for name, loss in losses.items()} if len(losses) > 1 else {}


@contextmanager
def _outputs_of(model: nn.Module) -> Iterator[list[ModelOutput]]:
    """Context that collects the outputs of the forward passes of a model."""
    seen: list[ModelOutput] = []
    hook = model.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
    try:
        yield seen
    finally:
        hook.remove()
