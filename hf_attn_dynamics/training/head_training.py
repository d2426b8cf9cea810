# Licensed under the Apache License, Version 2.0.
"""Training heads with any trainer: their losses, gates in a group of their own, and heads that are removed."""

from transformers import PreTrainedModel

from ..models.head_gates import prune_closed_gates
from .epoch_masks import EpochMasks
from .fused_head import ask_fused_head
from .gates import GateWatch, open_heads
from .head_loss import INITIAL_WEIGHT_KEY, HeadLossMixin
from .head_plan import HeadPlan, LossWindow
from .prunable_trainer import PrunableMixin
from .sharding import whole_model
from .trainer_checks import check_gates_of_adapter, check_label_smoothing, check_read, check_trainer_arguments


class HeadwiseTrainerMixin(HeadLossMixin, PrunableMixin):
    """Trains headwise models with any trainer: `class X(HeadwiseTrainerMixin, trl.SFTTrainer)`.

    The loss of a step is `task loss + α_t · guidance loss + λ · gate penalty`, the first two the mean over the whole
    accumulated batch on all processes (over labels for the task loss, over sentences for the guidance loss): 4
    micro-batches of 2 give the gradient of 1 batch of 8, however uneven their token counts. The model forms it, from
    the weights and counts that the trainer hands over. Where the loss is not the model's, but that of a trainer's
    class, of label smoothing or of a `compute_loss_func`, the losses of heads are added to it. Gates are sampled once
    for each step, the same for all of its micro-batches and processes. They have an optimizer group of their own, and
    are never decayed.

    Labels are counted in the batch as the collator returns it. A subclass may give columns the names of the model in
    `compute_loss`, before it calls the method of this class: columns in `label_names` of the arguments that the model
    does not know are counted, in their order, as the label columns of the model that the batch lacks. Labels that only
    `compute_loss` creates cannot be counted in advance: their term is the mean over micro-batches, as in the stock
    Trainer. A loss that a subclass computes on its own is scaled as the stock Trainer does it, see its
    `loss_is_scaled_for_ga`.

    Besides `loss`, the log has `task_loss`, `guidance_loss` and `gate_penalty`, means over the steps since the last
    entry, the terms of a task loss that has several (`mlm_loss` and `nsp_loss`, for instance), the weights of the last
    step `guidance_weight` and `gate_penalty_weight`, and `expected_heads_encoder` (and `_decoder`, `_cross`), the
    expected number of open gates. Evaluation reports the task loss alone, as the mean over all labels of the
    evaluation set, whatever the batch size, and a collator with epochs masks as in its first one there; under a class
    with a loss of its own, it is that of the class. Other models are trained as by the trainer without this mixin.

    A callback may remove heads, and closed gates, while the model is trained, see [`PrunableMixin`]; once no gate is
    left, there is no gate penalty either. Heads cannot be removed between the micro-batches of a step, nor under FSDP
    or DeepSpeed. `train(resume_from_checkpoint=True)` goes on from the newest checkpoint that is whole, see
    [`newest_checkpoint`].

    Under arguments without those of [`HeadwiseArguments`] the defaults of these hold: a model with guidance is guided,
    and one with gates is charged nothing for them. Arguments and model are read whenever training starts, so that
    trials of `hyperparameter_search` and models of `model_init` are trained as asked for.

    Attributes:
        initial_guidance_weight (`float`, *optional*): α_0 of the run, known once it has started.

    Raises:
        ValueError: if `guidance_weight`, `gate_penalty` or `target_heads` is given and the model has no guidance or no
            gates, or fewer gates than are to stay; if `label_smoothing_factor` is, and its labels are not one column
            of classes; if an argument is given that no class of the trainer reads; see also
            [`check_trainer_arguments`]. While training, if no label counts in the first pass over the data, in its
            first 100 steps or in the whole run, whichever is shortest, and the model is not guided either: single
            micro-batches and steps may be without labels, and guidance can be learnt without any.
    """

    reads = (
        "guidance_weight", "guidance_schedule", "guidance_hold_steps", "gate_penalty", "target_heads",
        "target_warmup", "target_learning_rate", "gate_learning_rate",
    )  # fmt: skip

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if hasattr(self.data_collator, "set_epoch"):
            self.add_callback(EpochMasks(self))
        if self.is_headwise:
            ask_fused_head(self._plain_model)

    # ---- What training begins with ----

    def _read_arguments(self) -> None:
        super()._read_arguments()
        check_read(self.args, type(self))
        check_trainer_arguments(self.args, self.data_collator)
        callbacks, before = self.callback_handler.callbacks, self._heads.callbacks if self.is_headwise else []
        callbacks[:] = [callback for callback in callbacks if callback not in before]
        model = self._plain_model
        if not hasattr(model, "sentence_losses"):
            self._heads = None
            return
        plan = HeadPlan(model, self._argument)
        if self.args.save_strategy != "no":
            check_gates_of_adapter(model, model.head_gates())
        if not self.computes_loss:
            check_label_smoothing(model, self.args.label_smoothing_factor)
        self._heads = plan
        if plan.target is not None:
            self.add_callback(plan.target)
        if plan.watch is not None:
            plan.watch.on_init_end(self.args, self.state, self.control)
            # First of all callbacks, so that the others find the gates settled.
            callbacks.insert(0, plan.watch)

    def _begin_training(self) -> None:
        # What a resumed run had known it knows again, even if it was ended after its last step and gets no batch.
        super()._begin_training()
        self.initial_guidance_weight = self._known_initial_weight()
        self._window = LossWindow()

    def _known_initial_weight(self) -> float | None:
        """α_0 as asked for, or as the run that is being resumed had it; `None` if the first batch is to give it."""
        weight = self._argument("guidance_weight")
        if not self.is_guided or weight not in (None, "auto"):
            return weight if self.is_guided else None
        found = (entry[INITIAL_WEIGHT_KEY] for entry in self.state.log_history if INITIAL_WEIGHT_KEY in entry)
        return next(found, None)

    def train(self, *args, **kwargs):
        """The stock method, from whole checkpoints alone."""
        try:
            return super().train(*args, **kwargs)
        finally:
            # Also after an error: a loss that is computed then is of its batch alone.
            self._step = None

    def create_optimizer(self, *args, **kwargs):
        """The stock optimizer, with gates in a group of their own, never decayed.

        An optimizer that the trainer was given stays as it is. One of an earlier training goes on, unless heads have
        been removed since.
        """
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if not is_new:
            return optimizer
        gates = self._gates()
        own = {id(gate.log_alpha): gate.log_alpha for gate in gates.values()}
        moved = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in own]
        # A run that is resumed and has lost its gates since it began has their group still, and empty.
        if moved or (not gates and GateWatch.__name__ in self.state.stateful_callbacks):
            rate = self._argument("gate_learning_rate")
            optimizer.add_param_group({"params": moved, "lr": rate, "weight_decay": 0.0})
        return optimizer

    # ---- Logging, and heads that are removed ----

    def log(self, logs, start_time=None):
        """Adds each loss term under its own name to what the Trainer logs, as the mean over the logging window."""
        terms = {}
        if "loss" in logs or "train_loss" in logs:
            terms = self._window.means(self.state.global_step, lambda means: self.accelerator.reduce(means, "mean"))
        if terms:
            self._window = LossWindow()
            if self.is_guided:
                terms["guidance_weight"] = self._guidance_weight_at(self.state.global_step - 1)
            if self._heads.penalised:
                terms["gate_penalty_weight"] = float(self._step.gate_penalty_weight)
            if self._heads.gated:
                expected = open_heads(self._gates())
                terms |= {f"expected_heads_{kind}": value.item() for kind, value in expected.items()}
            logs = {**logs, **terms}
        super().log(logs, start_time)

    def _model_changed(self) -> None:
        super()._model_changed()
        if not self.is_headwise:
            return
        gates = self._gates()
        self._heads.follow(gates)
        if self._step is not None:
            self._step.gate_noise = self._noise(gates) if gates else None
            if not gates:
                self._step.gate_penalty_weight = None

    def prune(self) -> PreTrainedModel:
        """Removes the heads whose gates are closed, and then the gates, see [`prune_closed_gates`]; outputs stay.

        Where training ends with `target_heads`, exactly so many heads are left. The trainer goes on with the pruned
        model: evaluate it, save it, or train it further with arguments that ask for no gates.

        Returns:
            `PreTrainedModel`: the model of the trainer, pruned in place; under FSDP a copy on the CPU, and the model
            of the trainer stays as it is. All processes must call it.

        Raises:
            ValueError: if the model has no gates; see also [`prune_closed_gates`].
        """
        model = self._plain_model
        pruned = prune_closed_gates(whole_model(model))
        if pruned is model:
            self.model_wrapped = self.model
            self._model_changed()
        return pruned
