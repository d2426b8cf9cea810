# Licensed under the Apache License, Version 2.0.
"""Training of headwise models with any trainer: head losses, the optimizer group of gates, and removed heads."""

import logging
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ..models.cost_table import CostTable
from ..models.gate_costs import expected_cost
from ..models.head_gates import gates_of, prune_closed_gates
from .epoch_masks import EpochMasks
from .fused_head import add_head_losses_to_fused_head
from .gates import GateWatch, expected_open
from .head_loss import INITIAL_WEIGHT_KEY, HeadLossMixin
from .head_plan import HeadPlan, LossWindow
from .measured_costs import costs_of, stored_costs
from .prunable_trainer import PrunableMixin
from .sharding import whole_model
from .trainer_checks import (
    check_gates_of_adapter,
    check_label_smoothing,
    check_read,
    check_target_columns,
    check_trainer_arguments,
)


logger = logging.getLogger(__name__)


class HeadwiseTrainerMixin(HeadLossMixin, PrunableMixin):
    """Trains headwise models with any trainer: `class X(HeadwiseTrainerMixin, trl.SFTTrainer)`.

    The loss of a step is `task loss + α_t · guidance loss + λ · gate penalty`, where the summands of the guidance loss
    by pattern and target may have their own α_t. The first two are means over the whole accumulated batch of all
    processes (over labels for the task loss, over sentences for the guidance loss, over rows with a target for targets
    that the batch brings): 4 micro-batches of 2 give the gradient of 1 batch of 8, even with different token counts.
    The model computes the loss from the weights and counts that the trainer passes. If the trainer's class, label
    smoothing or a `compute_loss_func` computes the task loss, the head losses are added to it. Gates are sampled once
    per step, the same for all micro-batches and processes. They have a separate optimizer group without weight decay.

    With a `teacher`, the model learns its attention as a part of the guidance loss (`guidance["teacher"]` of its
    configuration), its logits (`distillation_weight`), its hidden states (`hidden_distillation_weight`), or several of
    them. With logits, the task loss becomes `(1 − w) · task loss + w · distillation loss`, the latter the mean over
    labelled rows, see [`logit_distillation_loss`]. With hidden states, `β · hidden distillation loss` is added, the
    mean over the non-padding tokens of the accumulated batch, see [`hidden_distillation_loss`]. The layers of a step
    are matched by the distances in the step before, see [`match_hidden_layers`], and before the first step by those of
    the student in evaluation mode on its batch. The log then has `distillation_loss` and `hidden_distillation_loss`.
    The teacher runs once for each micro-batch, in evaluation mode, and is neither trained nor saved.

    Labels are counted in the batch that the collator returns. A subclass may rename label columns in `compute_loss`
    before it calls the method of this class: columns in `args.label_names` that the model does not know are counted,
    in order, as the label columns that the batch lacks. Labels that only `compute_loss` creates cannot be counted in
    advance: their term is the mean over micro-batches, as in the stock Trainer. A loss that a subclass computes itself
    is scaled as in the stock Trainer, see its `loss_is_scaled_for_ga`.

    In addition to `loss`, the log has `task_loss`, `guidance_loss` and `gate_penalty`, means over the steps since the
    last entry; the terms of a task loss with several (such as `mlm_loss` and `nsp_loss`); `guidance_loss_NAME` of each
    pattern and target, if there are several; the weights of the last step, `guidance_weight` and
    `gate_penalty_weight`, with `guidance_weight_NAME` of each name instead if schedules differ; `guided_accuracy_NAME`
    for each of `guidance["targets"]`, the fraction of pairs of a guided head and a row whose strongest key is a
    target, in the last step or, with `logging_strategy="epoch"`, in the epoch; `expected_heads_encoder` (and
    `_decoder`, `_cross`) and `expected_units_encoder`, the expected number of open heads and units; and, with
    `target_speedup` or `target_flops`, `expected_cost`, the expected fraction of the dense model's cost, which then is
    the gate penalty. Evaluation reports the task loss, as the mean over all labels of the evaluation set for any batch
    size, with the masks of epoch 0 if the collator has epochs, and accuracies of guided heads if the evaluation set
    has their targets; a trainer class with its own loss evaluates that loss only. Models that are not headwise are
    trained as without this mixin.

    A callback may remove heads and gates during training, see [`PrunableMixin`]; without gates there is no gate
    penalty. Heads cannot be removed between the micro-batches of a step, nor under FSDP or DeepSpeed.
    `train(resume_from_checkpoint=True)` resumes from the newest complete checkpoint, see [`newest_checkpoint`].

    Arguments without those of [`HeadwiseArguments`] get their defaults: a model with guidance is guided, and gates are
    not penalised. Arguments and model are read whenever training starts, which includes trials of
    `hyperparameter_search` and models of `model_init`.

    Args:
        teacher (`PreTrainedModel` or `str`, *optional*): Any model that reads the same tokens as the model of the
            trainer, or `"self"` for a copy of this model as the trainer gets it, without gates; all other arguments
            are those of the trainer class.
        latency_table ([`CostTable`], *optional*): Costs for `target_speedup`, such as those of
            [`measure_latency_table`] on the machine on which the model will run, instead of a measurement on the
            device of the trainer.

    Attributes:
        hidden_pairs (`dict[str, dict[int, int]]`): `{layer of the model: layer of the teacher}` whose hidden states
            are compared in the current step, by stack (`encoder`, `decoder`).
        initial_guidance_weight (`float`, *optional*): α_0 of the run, known once it has started.

    Raises:
        ValueError: if `guidance_weight`, `gate_penalty`, `target_heads`, `target_speedup` or `target_flops` is set for
            a model without guidance or gates, or with too few gates; if costs belong to another architecture, or show
            that a target cannot be reached; if schedules name patterns or targets that no head is guided to; if
            `label_smoothing_factor` is set and the labels are not one column of classes; if no class of the trainer
            reads an argument that is set; if a teacher is missing, not used, or does not fit (other tokens, missing
            layers or heads, attention that does not follow from queries and keys alone, hidden states of another
            size); see also [`check_trainer_arguments`]. While training, if the model is not guided and all labels are
            ignored, or a target has no row that counts, in the first epoch, the first 100 steps or the whole run,
            whichever is shortest; and if the column of a target is missing or invalid, before the first step.
    """

    reads = (
        "guidance_weight", "guidance_schedule", "guidance_hold_steps", "guidance_kernel", "gate_penalty",
        "target_heads", "target_speedup", "target_flops", "latency_table", "latency_batch", "latency_length",
        "target_warmup", "target_learning_rate", "gate_learning_rate", "distillation_weight",
        "distillation_temperature", "hidden_distillation_weight", "hidden_distillation_layers",
    )  # fmt: skip

    def __init__(self, *args, latency_table: CostTable | None = None, **kwargs):
        self._latency_table = latency_table
        super().__init__(*args, **kwargs)
        if hasattr(self.data_collator, "set_epoch"):
            self.add_callback(EpochMasks(self))
        if self.is_headwise:
            add_head_losses_to_fused_head(self._plain_model)

    # ---- Start of training ----

    def _read_arguments(self) -> None:
        super()._read_arguments()
        check_read(self.args, type(self))
        check_trainer_arguments(self.args, self.data_collator)
        callbacks, before = self.callback_handler.callbacks, self._heads.callbacks if self.is_headwise else []
        callbacks[:] = [callback for callback in callbacks if callback not in before]
        model = self._plain_model
        if not hasattr(model, "sentence_losses"):
            self._heads = None
            self._read_teacher()
            return
        plan = HeadPlan(model, self._argument, self._given_table())
        if self.args.save_strategy != "no":
            check_gates_of_adapter(model, gates_of(model))
        self._read_teacher()
        if not self.computes_loss:
            check_label_smoothing(model, self.args.label_smoothing_factor)
        self._check_sharding(model)
        self._heads = plan
        if plan.target is not None:
            self.add_callback(plan.target)
        if plan.watch is not None:
            plan.watch.on_init_end(self.args, self.state, self.control)
            # The first callback, so that the others see the final gates.
            callbacks.insert(0, plan.watch)

    def _check_sharding(self, model: PreTrainedModel) -> None:
        """Raises ValueError if parts of heads or sentences are in other processes, or the values of gates unknown."""
        sizes = {"tensors": self.get_tp_size(), "contexts": self.get_cp_size(), "sequences": self.get_sp_size()}
        for what, size in sizes.items():
            if size > 1:
                raise ValueError(
                    f"headwise models do not support parallelism over {what} (here {size} processes): train with data "
                    "parallelism or FSDP2, or load a model without guidance and gates by its stock class."
                )
        is_fsdp1 = self.is_fsdp_enabled and not self.accelerator.is_fsdp2
        is_zero3 = self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage == 3
        if gates_of(model) and (is_fsdp1 or is_zero3):
            what = "version 1 of FSDP" if is_fsdp1 else "stage 3 of DeepSpeed's ZeRO"
            raise ValueError(
                f"{what} shards gates, whose values are needed outside the forward pass: use FSDP2 (fsdp_version: 2), "
                "or stage 2."
            )

    def _given_table(self) -> CostTable | None:
        """Costs that the user gives for a target speed-up, as an object or a file."""
        path, speedup = self._argument("latency_table"), self._argument("target_speedup")
        if self._latency_table is None:
            return None if path is None else CostTable.load(path)
        if path is not None or speedup is None:
            other = f"latency_table={path} is set, too" if path is not None else "target_speedup is not set"
            raise ValueError(f"{type(self).__name__} got a latency_table, but {other}: leave one out, or set both.")
        return self._latency_table

    def _prepare_training(self) -> None:
        super()._prepare_training()
        if self.is_headwise and self._heads.needs_table:
            table = stored_costs(self._resumed_from)
            if table is None:
                table = costs_of(self._plain_model, self._argument, self.args.device)
            self._heads.take_table(self._plain_model, table)
        if self.is_headwise and self._heads.cost is not None and self.accelerator.is_main_process:
            logger.info("what pruning can gain:\n%s", self._heads.cost)
        if self.is_guided:
            check_target_columns(self._plain_model, self.train_dataset, self.data_collator)

    def _begin_training(self) -> None:
        # Read from the log of a resumed run, even if it was complete and gets no batch.
        super()._begin_training()
        self.initial_guidance_weight = self._known_initial_weight()
        self._window = LossWindow()

    def _known_initial_weight(self) -> float | None:
        """α_0 from the arguments or the log of a resumed run; `None` if the first batch determines it."""
        weight = self._argument("guidance_weight")
        if not self.is_guided or weight not in (None, "auto"):
            return weight if self.is_guided else None
        found = (entry[INITIAL_WEIGHT_KEY] for entry in self.state.log_history if INITIAL_WEIGHT_KEY in entry)
        return next(found, None)

    def train(self, *args, **kwargs):
        """The stock method, which only resumes complete checkpoints."""
        try:
            return super().train(*args, **kwargs)
        finally:
            # Also after an error: a loss that is computed later belongs to a single batch.
            self._step = None

    def create_optimizer(self, *args, **kwargs):
        """The stock optimizer, with gates in a separate group without weight decay.

        An optimizer that was passed to the trainer is not changed. The optimizer of an earlier training is kept,
        unless heads have been removed since.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if not is_new:
            return optimizer
        gates = self._gates()
        own = {id(parameter) for gate in gates for parameter in gate.parameters()}
        moved = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in own]
        # A resumed run whose gates have been removed still has their group, which is empty.
        if moved or (not gates and GateWatch.__name__ in self.state.stateful_callbacks):
            rate = self._argument("gate_learning_rate")
            optimizer.add_param_group({"params": moved, "lr": rate, "weight_decay": 0.0})
        return optimizer

    # ---- Logging, and removed heads ----

    def log(self, logs, start_time=None):
        """Adds to the log the mean of each loss term over the logging window, and accuracies in its last step."""
        self._follow_model()
        terms = {}
        if "loss" in logs or "train_loss" in logs:
            terms = self._window.means(self.state.global_step, lambda means: self.accelerator.reduce(means, "mean"))
        if terms:
            terms |= self._window.accuracies(lambda sums: self.accelerator.reduce(sums, "sum"))
            self._window = LossWindow()
            if self.is_guided:
                weight = self._guidance_weight_at(self.state.global_step - 1)
                by_name = weight.items() if isinstance(weight, Mapping) else ()
                terms |= {f"guidance_weight_{name}": own for name, own in by_name} or {"guidance_weight": weight}
            if self._heads.penalised:
                terms["gate_penalty_weight"] = float(self._step.gate_penalty_weight)
            if self._heads.gated:
                terms |= self._expected()
            logs = {**logs, **terms}
        super().log(logs, start_time)

    def _expected(self) -> dict[str, float]:
        """Expected numbers of open heads and units, and the expected cost under a target speed-up."""
        model, expected = self._plain_model, {}
        for name, gates in (("heads", model.head_gates()), ("units", model.unit_gates())):
            expected |= {f"expected_{name}_{kind}": value.item() for kind, value in expected_open(gates).items()}
        if self._heads.cost is not None:
            with torch.no_grad():
                expected["expected_cost"] = expected_cost(model, self._heads.cost).item()
        return expected

    def _model_changed(self) -> None:
        super()._model_changed()
        if not self.is_headwise:
            return
        self._heads.follow(self._plain_model)
        if self._step is not None:
            self._step.gate_noise = self._noise() if self._heads.gated else None
            if not self._heads.gated:
                self._step.gate_penalty_weight = None

    def prune(self) -> PreTrainedModel:
        """Removes the heads and units with closed gates, then all gates; outputs do not change, see
        [`prune_closed_gates`].

        After training with `target_heads`, exactly this number of heads remains; after `target_speedup`, the pruned
        model reaches the target, or a little more. The trainer can evaluate, save or train the pruned model, with
        arguments that need no gates. All processes must call this method.

        Returns:
            `PreTrainedModel`: the model of the trainer, pruned in place; under FSDP a pruned copy on the CPU.

        Raises:
            ValueError: if the model has no gates; see also [`prune_closed_gates`].
        """
        model, before = self._plain_model, self._named_parameters()
        pruned = prune_closed_gates(whole_model(model))
        if pruned is model:
            self._parameters_replaced(before)
        return pruned
