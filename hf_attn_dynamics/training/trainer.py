# Licensed under the Apache License, Version 2.0.
"""A Trainer that adds the losses of attention heads to the task loss, and normalises all of them exactly."""

import logging
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerState,
)

from ..models.compat import TRAINER_STATE_NAME, generation_arguments, load_random_state, prepared_batch
from ..models.head_gates import HardConcreteGate, prune_closed_gates
from ..models.ignored_labels import is_labelled
from ..models.token_mask import num_sentences
from .arguments import HeadwiseTrainingArguments
from .gates import GateWatch, TargetHeads, gate_noise, open_heads
from .layer_rates import layer_factors, spread_rates
from .resuming import save_nonfinite_batch
from .schedules import guidance_weight_at
from .sharding import shard_embeddings, whole_model
from .weight_average import WeightAverageTrainer


logger = logging.getLogger(__name__)

INITIAL_WEIGHT_KEY = "guidance_weight_initial"
EPOCH_RNG_STATE = "epoch_rng_state.safetensors"  # in checkpoints: random numbers when the pass over the data began
SENTENCES = "sentences"  # beside label columns in counts
UNLABELLED_STEPS = 100  # that a run may begin with


class _EpochCallback(TrainerCallback):
    """Tells the collator which pass over the data begins, so that it can mask each example anew."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.epoch = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.epoch = self.trainer._first_epoch - 1

    def on_epoch_begin(self, args, state, control, **kwargs):
        # Counted, since for a stream `state.epoch` is the share of `max_steps`.
        self.epoch += 1
        self.trainer.data_collator.set_epoch(self.epoch)


class _FreshRunCallback(TrainerCallback):
    """Forgets what belongs to an earlier run, whenever training starts, also when it is started over.

    What a resumed run had known it knows again, even if it was ended after its last step and gets no batch any more.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.initial_guidance_weight = self.trainer._known_initial_weight()
        self.trainer._window = {}
        self.trainer._labels_met = 0 if self.trainer._is_headwise and not state.global_step else None

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer._labels_met is not None:
            self.trainer._look_for_labels(at_last=state.global_step in (UNLABELLED_STEPS, state.max_steps))

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.trainer._labels_met is not None and state.global_step:
            self.trainer._look_for_labels(at_last=True)


class HeadwiseTrainer(WeightAverageTrainer):
    """`Trainer` for headwise models: adds what heads cost, and makes gradients exact under accumulation.

    The loss of a step is `task loss + α_t · guidance loss + λ · gate penalty`, the first two the mean over the whole
    accumulated batch on all processes (over labels for the task loss, over sentences for the guidance loss): 4
    micro-batches of 2 give the gradient of 1 batch of 8, however uneven their token counts. Gates are sampled once for
    each step, the same for all of its micro-batches and processes. They have an optimizer group of their own, and are
    never decayed.

    Labels are counted in the batch as the collator returns it. A subclass may give columns the names of the model in
    `compute_loss`, before it calls the method of this class: columns in `label_names` of the arguments that the model
    does not know are counted, in their order, as the label columns of the model that the batch lacks. Labels that only
    `compute_loss` creates cannot be counted in advance: their term is the mean over micro-batches, as in the stock
    Trainer. A loss that a subclass computes on its own is scaled as the stock Trainer does it, see its
    `loss_is_scaled_for_ga`.

    Besides `loss`, the log has `task_loss`, `guidance_loss` and `gate_penalty`, means over the steps since the last
    entry, the terms of a task loss that has several (`mlm_loss` and `nsp_loss`, for instance), the weights of the last
    step `guidance_weight` and `gate_penalty_weight`, and `expected_heads_encoder` (and `_decoder`, `_cross`), the
    expected number of open gates. A loss that is not finite stops training, see [`training_step`].
    Evaluation reports the task loss alone, as the mean over all labels of the evaluation set, whatever the batch size,
    and a collator with epochs masks as in its first one there. With `ema_decay` the model that is evaluated, saved and
    returned has the moving average of the weights, see [`WeightAverageTrainer`]. Other models are trained as the stock
    Trainer does.

    A callback may remove heads, and closed gates, while the model is trained: what is left trains on, with new
    optimizer state for the tensors that were cut and the old state for all others; once no gate is left, there is no
    gate penalty either. Heads cannot be removed between the micro-batches of a step, nor under FSDP or DeepSpeed.
    Where a checkpoint that a run is resumed from, or that `load_best_model_at_end` loads, has other heads than the
    model, the model gets those of the checkpoint. `train(resume_from_checkpoint=True)` goes on from the newest
    checkpoint that is whole, see [`newest_checkpoint`].

    Under plain `TrainingArguments` the defaults of [`HeadwiseTrainingArguments`] hold: a model with guidance is
    guided, and one with gates is charged nothing for them. Arguments and model are read whenever training starts, so
    that trials of `hyperparameter_search` and models of `model_init` are trained as asked for.

    Attributes:
        initial_guidance_weight (`float`, *optional*): α_0 of the run, known once it has started.

    Raises:
        ValueError: if `guidance_weight`, `gate_penalty` or `target_heads` is given and the model has no guidance or no
            gates, or fewer gates than are to stay; if `label_smoothing_factor` is, and its labels are not one column
            of classes; if `layer_rate_decay` is, and it has no single stack of layers; see also
            [`check_trainer_arguments`]. While training, if no label counts in the first pass over the data, in its
            first 100 steps or in the whole run, whichever is shortest, and the model is not guided either: single
            micro-batches and steps may be without labels, and guidance can be learnt without any.
    """

    def __init__(self, *args, **kwargs):
        self._own_callbacks: list[TrainerCallback] = []
        self._frozen: set[str] = set()
        self._optimizer: torch.optim.Optimizer | None = None
        self._first_epoch = 0
        self._epoch_rng_state: torch.Tensor | None = None
        self._counts: dict[str, torch.Tensor] | None = None
        self._labels_met: torch.Tensor | int | None = None  # so far; `None` once it is known that there are some
        self._balanced: list[torch.Tensor] | None = None
        self._window: dict[str, torch.Tensor] = {}
        self._window_start = 0
        self._evaluated: dict[Any, list] | None = None
        self._is_predicting = False
        self.initial_guidance_weight: float | None = None
        super().__init__(*args, **kwargs)
        if hasattr(self.data_collator, "set_epoch"):
            self.add_callback(_EpochCallback(self))
        self.add_callback(_FreshRunCallback(self))

    def _argument(self, name: str) -> Any:
        """An argument of the trainer's own, which plain `TrainingArguments` have the default of."""
        return getattr(self.args, name, getattr(HeadwiseTrainingArguments, name))

    def _read_arguments(self) -> None:
        super()._read_arguments()
        if isinstance(self.args, HeadwiseTrainingArguments):
            self.args.check_values()
        check_trainer_arguments(self.args, self.data_collator)
        model = self.accelerator.unwrap_model(self.model)
        self._is_headwise = hasattr(model, "sentence_losses")
        guidance = getattr(model.config, "guidance", None) if self._is_headwise else None
        weight = self._argument("guidance_weight")
        self._guided = guidance is not None and weight != 0
        if guidance is None and weight not in (None, 0):
            raise ValueError(
                f"guidance_weight={weight}, but {type(model).__name__} has no guidance: build it from a headwise "
                'configuration with guidance={"fraction": 0.5}, for instance, or set guidance_weight=0.'
            )
        self._set_up_gates(model)
        self._freezes_decoder = self._is_decoder_frozen(model)
        if (decay := self._argument("layer_rate_decay")) != 1:
            layer_factors(model, decay)
        if self._is_headwise:
            _check_label_smoothing(model, self.args.label_smoothing_factor)

    def _set_up_gates(self, model: nn.Module) -> None:
        """Callbacks that drive, watch and settle the gates of a model that has any."""
        callbacks = self.callback_handler.callbacks
        callbacks[:] = [callback for callback in callbacks if callback not in self._own_callbacks]
        gates = model.head_gates() if self._is_headwise else {}
        target, penalty = self._argument("target_heads"), self._argument("gate_penalty")
        _check_gates(model, gates, target, penalty)
        if self.args.save_strategy != "no":
            _check_gates_of_adapter(model, gates)
        self._gated, self._penalised = bool(gates), target is not None or penalty > 0
        self._target: TargetHeads | None = None
        if target is not None:
            total = sum(len(gate.log_alpha) for gate in gates.values())
            if target > total:
                raise ValueError(f"target_heads={target}, but {type(model).__name__} has {total} gated heads.")
            rate, warmup = self._argument("target_learning_rate"), self._argument("target_warmup")
            self._target = TargetHeads(total, target, rate, warmup)
            self.add_callback(self._target)
        watches = [GateWatch(target)] if gates else []
        for watch in watches:
            watch.on_init_end(self.args, self.state, self.control)
        # First of all callbacks, so that the others find the gates settled.
        callbacks[:0] = watches
        self._own_callbacks = [*watches, *([self._target] if self._target else [])]

    def _is_decoder_frozen(self, model: nn.Module) -> bool:
        frozen, is_seq2seq = self._argument("freeze_decoder"), getattr(model.config, "is_encoder_decoder", False)
        if frozen and not is_seq2seq:
            raise ValueError(f"freeze_decoder=True, but {type(model).__name__} has no decoder beside an encoder.")
        if frozen is None:
            return is_seq2seq and self._penalised and set(model.config.gate_settings()) == {"encoder"}
        return frozen

    # ---- Training ----

    def train(self, *args, **kwargs):
        """The stock method; a decoder that is frozen requires gradients again afterwards."""
        try:
            return super().train(*args, **kwargs)
        finally:
            # Also after an error: a loss that is computed then is of its batch alone.
            self._counts = None
            for name, parameter in self._all_parameters():
                if name in self._frozen:
                    parameter.requires_grad_(True)
            self._frozen = set()

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
        model = self.accelerator.unwrap_model(self.model)
        pruned = prune_closed_gates(whole_model(model))
        if pruned is model:
            self.model_wrapped = self.model
            self._model_changed()
        return pruned

    def _hp_search_setup(self, trial):
        super()._hp_search_setup(trial)
        # Not before, since `model_init` has made another model by now.
        frozen = self._decoder_parameters() if self._freezes_decoder else {}
        # By name, since tensors of pruned layers are others.
        self._frozen = set(frozen)
        for parameter in frozen.values():
            parameter.requires_grad_(False)

    def _init_training_state(self, max_steps, num_steps, num_epochs, resume_from_checkpoint, trial):
        """Where training begins: the number of the pass over the data, and of the micro-batch within it.

        The stock method takes a stream for one pass that never ends, and would go on from its beginning.
        """
        begins = super()._init_training_state(max_steps, num_steps, num_epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is not None and num_epochs == sys.maxsize and self.state.global_step:
            saved = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME))
            # Of a stream, `epoch` is the number of the pass, and then the share of `max_steps` done within it.
            passes = math.ceil(saved.epoch) - 1
            steps = 0 if self.args.ignore_data_skip else round((saved.epoch - passes) * saved.max_steps)
            begins = passes, steps * self.args.gradient_accumulation_steps
        self._first_epoch = begins[0]
        return begins

    def _run_epoch(self, *args, **kwargs):
        """The stock epoch; none for a run that goes on from the checkpoint of its last step, which gets no other."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        checkpoint = kwargs.get("resume_from_checkpoint")
        if checkpoint is not None and kwargs["epoch"] == kwargs["epochs_trained"]:
            before = Path(checkpoint) / EPOCH_RNG_STATE
            if not kwargs["steps_trained_in_current_epoch"]:
                load_random_state(self, checkpoint)
            elif before.is_file():
                # The stock loop skips what was trained on, but a sampler that has no generator draws another order.
                torch.set_rng_state(load_file(before)["cpu"])
        self._epoch_rng_state = torch.get_rng_state()
        return super()._run_epoch(*args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        """The stock method; beside the model of a checkpoint, the random numbers with which the pass began."""
        super().save_model(output_dir, _internal_call)
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        if is_checkpoint and self.args.should_save and self._epoch_rng_state is not None:
            # Sharded weights are written later, into a folder that need not be there yet.
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_file({"cpu": self._epoch_rng_state}, Path(output_dir) / EPOCH_RNG_STATE)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The stock step, which a loss that is not finite ends before the weights are changed.

        Not under fp16, whose scaled losses may overflow for a step.

        Raises:
            FloatingPointError: if the loss is NaN or infinite; the batch is kept in `output_dir` if it can be.
        """
        is_scaled = self.loss_is_scaled_for_ga
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.loss_is_scaled_for_ga = is_scaled
        # The stock trainer asks as well, to keep such losses out of its log: this does not wait any longer.
        if not self.args.fp16 and not loss.isfinite():
            step, folder, process = self.state.global_step + 1, self.args.output_dir, self.args.process_index
            raise FloatingPointError(save_nonfinite_batch(loss, step, inputs, folder, process))
        return loss

    def _all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters by name, those that have several by each of them."""
        return list(self.accelerator.unwrap_model(self.model).named_parameters(remove_duplicate=False))

    def _decoder_parameters(self) -> dict[str, nn.Parameter]:
        """All that the encoder does not own alone: embeddings that it shares with the decoder stay as they are."""
        model = self.accelerator.unwrap_model(self.model)
        encoder = next(name for name, module in model.named_modules() if module is model.get_encoder())
        named = self._all_parameters()
        return {name: p for name, p in named if not name.startswith(f"{encoder}.") and p.requires_grad}

    def create_optimizer(self, *args, **kwargs):
        """The stock optimizer, with rates by layers if asked for, and gates in a group of their own, never decayed.

        An optimizer that the trainer was given stays as it is. One of an earlier training goes on, unless heads have
        been removed since.

        Raises:
            ValueError: if `layer_rate_decay` is given, and an optimizer, too.
        """
        if self.accelerator.is_fsdp2 and not isinstance(self.model, FSDPModule):
            shard_embeddings(self.model, self.accelerator)
        model, decay = self.accelerator.unwrap_model(self.model), self._argument("layer_rate_decay")
        is_own = self.optimizer is not None and self._optimizer is getattr(self.optimizer, "optimizer", self.optimizer)
        if is_own and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            held = {id(p) for p in model.parameters()}
            if not held.issuperset(id(p) for group in self.optimizer.param_groups for p in group["params"]):
                # What is left of layers that were pruned would never be trained.
                self.optimizer, self.model_wrapped = None, self.model
        if self.optimizer is not None:
            if decay != 1 and not is_own:
                raise ValueError(
                    f"layer_rate_decay={decay}, but the trainer was given an optimizer with its own rates."
                )
            return super().create_optimizer(*args, **kwargs)
        optimizer = self._optimizer = super().create_optimizer(*args, **kwargs)
        if decay != 1:
            spread_rates(optimizer, model, decay)
        rate = self._argument("gate_learning_rate")
        if not self._gated:
            if GateWatch.__name__ in self.state.stateful_callbacks:
                # Of a run that is resumed, which has lost its gates since it began: their group is there, and empty.
                optimizer.add_param_group({"params": [], "lr": rate, "weight_decay": 0.0})
            return optimizer
        gates = {id(gate.log_alpha): gate.log_alpha for gate in model.head_gates().values()}
        moved = []
        for group in optimizer.param_groups:
            moved += [p for p in group["params"] if id(p) in gates]
            group["params"] = [p for p in group["params"] if id(p) not in gates]
        if moved:
            optimizer.add_param_group({"params": moved, "lr": rate, "weight_decay": 0.0})
        return optimizer

    def _model_changed(self) -> None:
        """Goes on with the gates that are left; without any, open heads cost nothing any more."""
        super()._model_changed()
        gates = self.accelerator.unwrap_model(self.model).head_gates() if self._is_headwise else {}
        self._gated = bool(gates)
        self._penalised = self._penalised and self._gated
        if not gates:
            return
        left = sum(len(gate.log_alpha) for gate in gates.values())
        if self._target is not None and self._target.target > left:
            raise ValueError(
                f"target_heads={self._target.target}, but heads were removed while training, and {left} gated heads "
                "are left: remove fewer, or lower target_heads."
            )
        if self._counts is not None:
            self._gate_noise = gate_noise(gates, self.args.seed, self.state.global_step).to(self.args.device)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Fetches the micro-batches of one step, and counts their labels and sentences over all processes.

        At the end of a stream, those that are too few for a step are left out: the stock loop would add up their
        gradient, take no step, and leave it to the first step of the next pass.

        Raises:
            ValueError: if that is the whole stream.
        """
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._is_headwise and 0 < len(samples) < num_batches:
            if not self.state.global_step:
                raise ValueError(
                    f"a step takes gradient_accumulation_steps={num_batches} batches, but train_dataset gives only "
                    f"{len(samples)}; lower that, or per_device_train_batch_size."
                )
            return [], None
        if self._is_headwise and samples:
            if not self._window:
                self._window_start = self.state.global_step
            counts = [self._count(batch) for batch in samples]
            names = sorted({name for count in counts for name in count})
            totals = torch.stack([sum(count[name] for count in counts if name in count) for name in names]).to(device)
            if self.args.average_tokens_across_devices:
                totals = self.accelerator.reduce(totals, "sum")
            self._counts = dict(zip(names, totals.clamp(min=1)))
            if self._labels_met is not None:
                columns = self.accelerator.unwrap_model(self.model).label_columns
                places = [place for place, name in enumerate(names) if name in columns]
                # Those that only a subclass makes are not counted, and nothing is known of a loss of the user's own.
                is_known = bool(places) and self.compute_loss_func is None
                self._labels_met = self._labels_met + totals[places].sum() if is_known else None
            self._micro_batches = len(samples)
            if self._guided and self.initial_guidance_weight is None:
                self.initial_guidance_weight = self._balanced_weight(samples, num_items)
                self.log({INITIAL_WEIGHT_KEY: self.initial_guidance_weight})
            if self._gated:
                self._start_gate_step()
        return samples, num_items

    def _look_for_labels(self, at_last: bool) -> None:
        """Refuses, or warns of, a run that has met no label; all processes look at once."""
        met = int(self.accelerator.reduce(torch.as_tensor(self._labels_met, device=self.args.device), "sum"))
        if not met and not at_last:
            return
        self._labels_met = None
        if met:
            return
        columns = " and ".join(self.accelerator.unwrap_model(self.model).label_columns)
        found = f"train_dataset has given no label in {self.state.global_step} steps: all {columns} are ignored"
        if not self._guided:
            raise ValueError(f"{found}, and there is nothing to learn; give labels that are not -100.")
        logger.warning("%s, and guidance alone has been learnt.", found)

    def _count(self, batch: dict) -> dict[str, torch.Tensor]:
        """Labels of each column, and sentences, of one micro-batch as the collator has made it."""
        model = self.accelerator.unwrap_model(self.model)
        missing = [name for name in model.label_columns if batch.get(name) is None]
        others = [name for name in self.label_names if name not in model.label_columns and batch.get(name) is not None]
        # A subclass may give columns the names that the model knows in `compute_loss`, which has not run yet.
        renamed = {own: batch[name] for own, name in zip(missing, others)} if len(missing) == len(others) else {}
        return {**model.count_labels({**batch, **renamed}), SENTENCES: num_sentences(batch)}

    def _start_gate_step(self) -> None:
        gates = self.accelerator.unwrap_model(self.model).head_gates()
        self._gate_noise = gate_noise(gates, self.args.seed, self.state.global_step).to(self.args.device)
        self._gate_penalty_weight = self._argument("gate_penalty")
        if self._target is not None:
            self._gate_penalty_weight = self._target.step(gates, self.state.global_step, self.state.max_steps)

    @property
    def guidance_weight(self) -> float:
        """α of the step that is being computed."""
        return self._guidance_weight_at(self.state.global_step)

    def _guidance_weight_at(self, step: int) -> float:
        schedule, hold_steps = self._argument("guidance_schedule"), self._argument("guidance_hold_steps")
        return guidance_weight_at(step, self.state.max_steps, self.initial_guidance_weight, schedule, hold_steps)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Task loss plus weighted guidance loss in training; the task loss alone in evaluation."""
        if not self._is_headwise:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._balanced is not None:
            outputs, loss, guidance_loss = self._losses(model, inputs, num_items_in_batch)
            self._balanced.append(torch.stack([loss.float(), guidance_loss.float()]))
            return (loss, outputs) if return_outputs else loss
        if not model.training:
            return self._evaluation_loss(model, inputs, return_outputs, num_items_in_batch)

        if self.loss_is_scaled_for_ga is None:
            # It is divided by counts of the whole accumulated batch; one that a subclass returns instead may not be.
            self.loss_is_scaled_for_ga = True
        # Outside `train`, the batch is all there is.
        is_step = self._counts is not None
        arguments = {}
        if self._penalised:
            arguments["output_gate_penalty"] = True
        if self._gated and is_step:
            arguments["gate_noise"] = self._gate_noise
        outputs, loss, guidance_loss = self._losses(model, inputs, num_items_in_batch, **arguments)
        self._record("task_loss", loss)
        for name, value in (outputs.get("task_losses") or {}).items():
            self._record(f"{name}_loss", value * self._summed_processes)
        if self._guided:
            self._record("guidance_loss", guidance_loss)
            if self.initial_guidance_weight is not None:
                loss = loss + self.guidance_weight * guidance_loss
        if self._penalised:
            penalty = outputs["gate_penalty"] / (self._micro_batches if is_step else 1)
            self._record("gate_penalty", penalty)
            loss = loss + (self._gate_penalty_weight if is_step else self._argument("gate_penalty")) * penalty
        return (loss, outputs) if return_outputs else loss

    @property
    def _summed_processes(self) -> int:
        """Factor of losses whose counts are sums over processes, where gradients are means over them."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    def _losses(self, model, inputs: dict, num_items_in_batch, **arguments: Any) -> tuple:
        """Outputs of a micro-batch, and its parts of the task loss and of the guidance loss (`None` without guidance).

        Both are to be summed over micro-batches and averaged over processes.
        """
        counts = self._count(inputs) if self._counts is None else self._counts_of_step(inputs)
        arguments |= {**inputs, "return_dict": True}
        if self._guided:
            arguments["output_guidance_loss"] = True
        if self._has_own_loss:
            arguments |= self._inputs_from_labels(inputs)
            if num_items_in_batch is None and self._counts is not None and inputs.get("labels") is not None:
                # The stock trainer has looked for a column of this name before a subclass gave it.
                num_items_in_batch = self._counts.get("labels")
            if torch.is_tensor(num_items_in_batch):
                # A step may be without any label.
                num_items_in_batch = num_items_in_batch.clamp(min=1)
            loss, outputs = super().compute_loss(model, arguments, True, num_items_in_batch)
            if self._counts is not None and num_items_in_batch is None:
                # Without a column of labels that is counted, a function can but take the mean of the micro-batch.
                loss = loss / self._micro_batches
        else:
            outputs = model(**arguments, num_items_in_batch=counts)
            loss = self._loss_of(outputs, inputs) * self._summed_processes
        guidance_loss = None
        if self._guided:
            share = num_sentences(inputs) / counts[SENTENCES]
            guidance_loss = outputs["guidance_loss"] * share * self._summed_processes
        return outputs, loss, guidance_loss

    def _counts_of_step(self, inputs: dict) -> dict[str, torch.Tensor]:
        """Counts of the whole accumulated batch.

        Labels that only `compute_loss` of a subclass makes are in none: that column is the mean over micro-batches.
        """
        model = self.accelerator.unwrap_model(self.model)
        if all(name in self._counts or inputs.get(name) is None for name in model.label_columns):
            return self._counts
        parts = self._micro_batches * self._summed_processes
        return {
            **{name: count.clamp(min=1) * parts for name, count in model.count_labels(inputs).items()},
            **self._counts,
        }

    def _inputs_from_labels(self, inputs: dict) -> dict:
        """What an encoder–decoder reads off labels beside its loss: the stock method takes them out of the batch."""
        model, labels = self.accelerator.unwrap_model(self.model), inputs.get("labels")
        if labels is None or not model.config.is_encoder_decoder:
            return {}
        return {**model.without_labels(inputs), **({"guidance_rows": is_labelled(labels)} if self._guided else {})}

    def _loss_of(self, outputs, inputs: dict) -> torch.Tensor:
        if outputs.get("loss") is None:
            model = self.accelerator.unwrap_model(self.model)
            needed = " and ".join(model.label_columns) or "labels, which it does not take"
            raise ValueError(
                f"{type(model).__name__} needs {needed} for its loss, but the batch has {', '.join(inputs)}."
            )
        return outputs["loss"]

    @property
    def _has_own_loss(self) -> bool:
        """Whether the user replaced the model's loss, by label smoothing or a function."""
        return self.label_smoother is not None or self.compute_loss_func is not None

    def _known_initial_weight(self) -> float | None:
        """α_0 as asked for, or as the run that is being resumed had it; `None` if the first batch is to give it."""
        if not self._guided:
            return None
        weight = self._argument("guidance_weight")
        if weight not in (None, "auto"):
            return weight
        found = (entry[INITIAL_WEIGHT_KEY] for entry in self.state.log_history if INITIAL_WEIGHT_KEY in entry)
        return next(found, None)

    @torch.no_grad()
    def _balanced_weight(self, samples: list[dict], num_items_in_batch) -> float:
        """α_0 at which both losses are equal on the first batch; without dropout, so that no random number is used."""
        self.model.eval()
        sums, self._balanced = torch.zeros(2, device=self.args.device), []
        try:
            for number, batch in enumerate(samples, 1):
                batch = prepared_batch(self, batch)
                # As in training, since a subclass may change the batch.
                self.compute_loss(self.model, batch, num_items_in_batch=num_items_in_batch)
                if len(self._balanced) < number:
                    # Its loss is all its own.
                    HeadwiseTrainer.compute_loss(self, self.model, batch, num_items_in_batch=num_items_in_batch)
            for losses in self._balanced:
                sums += losses
        finally:
            self._balanced = None
        self.model.train()
        sums = self.accelerator.reduce(sums, "mean")
        task_loss, guidance_loss = sums.tolist()
        if not (guidance_loss > 0 and 0 < task_loss < math.inf):
            raise ValueError(
                f"guidance_weight=auto found a task loss of {task_loss} and a guidance loss of {guidance_loss} on "
                "the first batch, which can not be balanced; set guidance_weight to a number."
            )
        return task_loss / guidance_loss

    # ---- Logging ----

    def _record(self, name: str, value: torch.Tensor) -> None:
        """Adds to the sum of this logging window, on the device: reading it would wait for every step."""
        value = value.detach().float()
        self._window[name] = self._window[name] + value if name in self._window else value

    def log(self, logs, start_time=None):
        """Adds each loss term under its own name to what the Trainer logs, as the mean over the logging window."""
        steps = self.state.global_step - self._window_start
        if self._window and steps > 0 and ("loss" in logs or "train_loss" in logs):
            names = sorted(self._window)
            means = self.accelerator.reduce(torch.stack([self._window[name] for name in names]) / steps, "mean")
            terms = dict(zip(names, means.tolist()))
            if self._guided:
                terms["guidance_weight"] = self._guidance_weight_at(self.state.global_step - 1)
            if self._penalised:
                terms["gate_penalty_weight"] = float(self._gate_penalty_weight)
            if self._gated:
                expected = open_heads(self.accelerator.unwrap_model(self.model).head_gates())
                terms |= {f"expected_heads_{kind}": value.item() for kind, value in expected.items()}
            self._window = {}
            logs = {**logs, **terms}
        super().log(logs, start_time)

    # ---- Evaluation ----

    def _evaluation_loss(self, model, inputs, return_outputs, num_items_in_batch):
        unwrapped = self.accelerator.unwrap_model(model)
        # By the names that the model knows: a subclass may have put them in place of `label_names`.
        is_labelled = any(inputs.get(name) is not None for name in unwrapped.label_columns)
        is_smoothed = self.label_smoother is not None and inputs.get("labels") is not None
        if self.compute_loss_func is not None or not is_labelled or self._evaluated is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**unwrapped.without_labels(inputs), return_dict=True)
        losses = self._smoothed_losses if is_smoothed else unwrapped.sentence_losses
        loss = 0.0
        for term, (sums, counts) in losses(outputs, inputs).items():
            loss = loss + term.weight * sums.sum() / counts.sum().clamp(min=1)
            # Sentences that only fill up the last batch of a process are dropped here.
            whole = self.accelerator.gather_for_metrics((sums, counts.to(sums.dtype)))
            self._evaluated[term].append(torch.stack(whole).sum(1))
        return (loss, outputs) if return_outputs else loss

    def _smoothed_losses(self, outputs, inputs: dict) -> dict:
        """What `sentence_losses` of the model is without smoothing; the stock smoother reads one column of labels."""
        model, labels = self.accelerator.unwrap_model(self.model), inputs["labels"]
        (term,) = model.loss_terms
        sums = [
            self.label_smoother({"logits": logits[None]}, own[None], num_items_in_batch=1)
            for logits, own in zip(outputs["logits"], labels)
        ]
        counts = labels.ne(self.label_smoother.ignore_index).view(len(labels), -1).sum(1)
        return {term._replace(weight=1.0): (torch.stack(sums), counts)}

    def predict(self, *args, **kwargs):
        """The stock method; where no label of the test set counts, there is no `test_loss`."""
        self._is_predicting = True
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._is_predicting = False

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """The stock loop, with the loss averaged over labels instead of over batches.

        Of a task loss with several terms, those without any label are left out.

        Raises:
            ValueError: if no label of the evaluation set counts.
        """
        self._evaluated = defaultdict(list)
        epoch = getattr(self.data_collator, "epoch", None)
        if epoch is not None:
            # Every evaluation is to predict the same tokens.
            self.data_collator.set_epoch(0)
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            if self._evaluated:
                means = {}
                for term, parts in self._evaluated.items():
                    total, count = torch.stack(parts).double().sum(0).tolist()
                    if count:
                        means[term] = total / count
                # Labels that the model makes itself are of those in the batch.
                is_labelled = any(not term.made for term in means)
                if not is_labelled and not self._is_predicting:
                    columns = " and ".join(dict.fromkeys(term.labels for term in self._evaluated if not term.made))
                    raise ValueError(
                        f"eval_dataset has no label: all {columns} are ignored; give some that are not -100, or call "
                        "predict() for predictions alone."
                    )
                output.metrics.pop(f"{metric_key_prefix}_loss", None)
                if is_labelled:
                    loss = sum(term.weight * mean for term, mean in means.items())
                    output.metrics[f"{metric_key_prefix}_loss"] = loss
                if len(self._evaluated) > 1:
                    output.metrics.update({f"{metric_key_prefix}_{t.name}_loss": mean for t, mean in means.items()})
        finally:
            self._evaluated = None
            if epoch is not None:
                self.data_collator.set_epoch(epoch)
        return output


class HeadwiseSeq2SeqTrainer(HeadwiseTrainer, Seq2SeqTrainer):
    """[`HeadwiseTrainer`] for encoder–decoder models; evaluates by generating, as `Seq2SeqTrainer` does.

    Raises:
        TypeError: if its arguments are not `Seq2SeqTrainingArguments`.
    """

    def __init__(self, model=None, args=None, *rest, **kwargs):
        if not isinstance(args, Seq2SeqTrainingArguments):
            raise TypeError(
                f"{type(self).__name__} needs args of HeadwiseSeq2SeqTrainingArguments or Seq2SeqTrainingArguments, "
                f"got {type(args).__name__}."
            )
        super().__init__(model, args, *rest, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        """The loop of [`HeadwiseTrainer`], without the sentences that only fill up the last batch of a process.

        With `num_return_sequences` above 1 they are kept, as by the stock loop: of the last batch, only as many
        sequences as it has sentences would be left.
        """
        asked = generation_arguments(self).get("num_return_sequences")
        default = getattr(getattr(self.model, "generation_config", None), "num_return_sequences", None)
        if not self.args.predict_with_generate or (asked or default or 1) == 1:
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """The stock step, with the loss averaged over labels when it generates, too."""
        step = Seq2SeqTrainer.prediction_step
        if not self.args.predict_with_generate or prediction_loss_only or self._evaluated is None:
            return step(self, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        losses = []

        def forward(**batch):
            """What the stock step takes for the model when it has generated, for a loss of its own."""
            _, num_items = Trainer.get_batch_samples(self, iter([batch]), 1, self.args.device)
            loss, outputs = self.compute_loss(model, batch, return_outputs=True, num_items_in_batch=num_items)
            losses.append(loss.detach().mean())
            return {**outputs, "loss": loss}

        _, generated, labels = step(self, forward, inputs, False, ignore_keys, **gen_kwargs)
        return (losses[0] if losses else None), generated, labels


def check_trainer_arguments(args, data_collator=None) -> None:
    """Refuses what [`HeadwiseTrainer`] can not do, before a model is built.

    Args:
        args (`TrainingArguments`): Arguments of the trainer.
        data_collator (*optional*): Its collator.

    Raises:
        ValueError: if a number among them is none that training can begin with; if one process sees several GPUs,
            since `nn.DataParallel` can not carry the losses of heads; or if data workers would keep a collator whose
            masks are to change between epochs.
    """
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}.")
    for name in ("learning_rate", "num_train_epochs"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {getattr(args, name)}.")
    for name in ("seed", "data_seed"):
        if not 0 <= (getattr(args, name) or 0) < 2**32:
            raise ValueError(f"{name} must be from 0 to 2**32 - 1, got {getattr(args, name)}.")
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, which would mean nn.DataParallel: start one process a GPU with "
            "`accelerate launch`, or set CUDA_VISIBLE_DEVICES to one of them."
        )
    if args.dataloader_persistent_workers and hasattr(data_collator, "set_epoch"):
        raise ValueError(
            "dataloader_persistent_workers=True keeps the collator's first epoch in its workers, so that masks would "
            "never change; set it to False."
        )


def _check_gates(model: nn.Module, gates: dict, target: int | None, penalty: float) -> None:
    """Refuses a price of open heads where none could close."""
    if target is None and not penalty:
        return
    given = f"gate_penalty={penalty}" if target is None else f"target_heads={target}"
    if not gates:
        raise ValueError(
            f"{given}, but {type(model).__name__} has no gates: load or build it with gates={{}}, for instance, or "
            "call add_gates({})."
        )
    if not any(gate.log_alpha.requires_grad for gate in gates.values()):
        raise ValueError(
            f"{given}, but every gate of {type(model).__name__} is frozen, and none would close: name 'gate' in "
            "modules_to_save of the adapter that froze them, or call requires_grad_(True) on each of "
            "model.head_gates().values() first."
        )
    if any(gate.is_offloaded for gate in gates.values()):
        raise ValueError(
            f"{given}, but gates of {type(model).__name__} are offloaded by its device_map, where no gradient reaches "
            "them: load it without device_map."
        )


def _check_gates_of_adapter(model: nn.Module, gates: dict) -> None:
    """Refuses gates that are trained beside an adapter of PEFT, which alone is saved."""
    if hasattr(model, "peft_config") and any(
        isinstance(gate, HardConcreteGate) and gate.log_alpha.requires_grad for gate in gates.values()
    ):
        raise ValueError(
            f"gates of {type(model).__name__} are trained, but checkpoints of its adapter would not have them: name "
            "'gate' in modules_to_save of the adapter's configuration, or set save_strategy='no'."
        )


def _check_label_smoothing(model: nn.Module, factor: float) -> None:
    """Refuses to smooth what the stock smoother can not read: all but one column of classes, with its logits."""
    terms = {(term.labels, term.logits, term.kind) for term in model.loss_terms}
    is_classes = terms == {("labels", "logits", "class")}
    if terms == {("labels", "logits", "problem")}:
        problem = model.config.problem_type
        is_classes = model.config.num_labels > 1 and problem in (None, "single_label_classification")
    if factor and not is_classes:
        raise ValueError(
            f"label_smoothing_factor={factor}, but {type(model).__name__} does not learn one column of classes from "
            "labels, which is all that can be smoothed; set it to 0."
        )
