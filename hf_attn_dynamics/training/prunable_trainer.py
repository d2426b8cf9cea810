# Licensed under the Apache License, Version 2.0.
"""Trainers that support pruning during training."""

import copy
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, PreTrainedModel, Trainer
from transformers.training_args import OptimizerNames
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from .._files import read_json
from ..models.added_biases import add_output_biases
from ..models.compat import activate_neftune, attention_kernel
from ..models.head_gates import gates_of, remove_gates
from ..models.head_pruning import prune_heads
from ..models.head_roles import locate_heads
from ..models.head_sites import config_value, heads_by_site, kinds_of
from ..models.unit_pruning import RECORDS, apply_pruning, prune_units
from ..models.unit_ranges import units_by_site
from ..models.unit_roles import locate_units
from .resumed_training import ResumedTrainingMixin


logger = logging.getLogger(__name__)


class PrunableMixin(ResumedTrainingMixin):
    """A trainer that continues training after a callback has removed heads.

    [`prune_heads`] and [`prune_closed_gates`] replace tensors. The optimizer of the stock Trainer would keep the old
    ones, and pruned layers would not be trained any further. Here, the new tensors replace the old ones in the
    optimizer, with new state; other parameters keep their state, and learning rates follow their schedule. Any
    callback may remove heads, except between the micro-batches of one step.

    If a checkpoint has other heads than the model, as after resuming a run from before or after its pruning, the model
    is rebuilt with the heads of the checkpoint; likewise for the best checkpoint with `load_best_model_at_end`. If
    heads were removed between two trainings, the second one starts with a new optimizer.

    Raises:
        ValueError: while training, if heads are removed between micro-batches, or under FSDP, DeepSpeed or an
            optimizer with its own copies of parameters.
    """

    def __init__(self, *args, **kwargs):
        self._held: dict[str, nn.Parameter] = {}  # parameters in the optimizer, by name
        super().__init__(*args, **kwargs)

    def train(self, *args, **kwargs):
        """The stock method, which only resumes complete checkpoints, see [`ResumedTrainingMixin`]."""
        try:
            output = super().train(*args, **kwargs)
            # Callbacks may have removed heads after the last step.
            self._follow_model()
            return output
        finally:
            self._held = {}

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The stock step, after updating the optimizer for removed heads."""
        self._follow_model(within_step=True)
        if not isinstance(model, DistributedDataParallel) or model is self.model_wrapped:
            return super().training_step(model, inputs, num_items_in_batch)
        # The stock loop still has the wrapper from before the removal.
        with nullcontext() if self.accelerator.sync_gradients else self.model_wrapped.no_sync():
            return super().training_step(self.model_wrapped, inputs, num_items_in_batch)

    def save_model(self, output_dir=None, _internal_call=False):
        """The stock method, after updating the optimizer for removed heads."""
        self._follow_model()
        super().save_model(output_dir, _internal_call)

    # ---- Heads that are removed during training ----

    def _prepare_training(self) -> None:
        if not self._holds_parts:
            # Before other mixins read the parameters.
            if self._resumed_from is not None:
                self._take_heads_of(self._resumed_from)
            self._forget_optimizer_of_others()
        super()._prepare_training()

    def _forget_optimizer_of_others(self) -> None:
        """Drops an optimizer of an earlier training whose parameters have been replaced."""
        if self._is_optimizer_own:
            held = {id(p) for p in self._plain_model.parameters()}
            if not held.issuperset(id(p) for group in self.optimizer.param_groups for p in group["params"]):
                self.optimizer, self.model_wrapped = None, self.model

    def _begin_training(self) -> None:
        super()._begin_training()
        self._held = self._named_parameters()

    def _own_tensors(self) -> str | None:
        """Name of the component that copied the parameters at the start of training, if any."""
        if self._holds_parts:
            return "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
        optim = OptimizerNames(self.args.optim).value
        return f"optim={optim}" if any(word in optim for word in ("layerwise", "lomo")) else None

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._plain_model.named_parameters())

    def _follow_model(self, within_step: bool = False) -> None:
        """Updates the optimizer if parameters have been replaced or removed."""
        if not self._held:
            return
        now = self._named_parameters()
        # FSDP replaces parameters in each pass, but keeps their names.
        replaced = {
            name: parameter
            for name, parameter in self._held.items()
            if name not in now or (now[name] is not parameter and not self.is_fsdp_enabled)
        }
        if not replaced:
            return
        name = next(iter(replaced))
        if holder := self._own_tensors():
            raise ValueError(
                f"{name} was replaced or removed, but {holder} has a copy of the old tensor: remove heads and gates "
                f"before or after training, or train without {holder}."
            )
        if within_step and any(p.grad is not None for p in now.values()):
            raise ValueError(
                f"{name} was replaced between the micro-batches of one step, whose gradients would be lost: remove "
                "heads in on_step_end instead of on_substep_end, for example."
            )
        _exchange(self.optimizer, replaced, now)
        self._held = now
        if isinstance(self.model_wrapped, DistributedDataParallel):
            self.model_wrapped = _rewrapped(self.model_wrapped, self.model, self.accelerator.ddp_handler)
        self._model_changed()

    def _parameters_replaced(self, before: dict[str, nn.Parameter]) -> None:
        """Follows replaced parameters, also outside training.

        Args:
            before (`dict[str, nn.Parameter]`): Parameters before they were replaced, by name.
        """
        if self._held:
            self._follow_model()
            return
        now = self._named_parameters()
        replaced = {name: parameter for name, parameter in before.items() if now.get(name) is not parameter}
        if self._is_optimizer_own:
            # The next training creates another one; until then, the memory of this one is freed.
            _forget(self.optimizer, replaced)
        elif self.optimizer is not None:
            _exchange(self.optimizer, replaced, now)
        self.model_wrapped = self.model
        self._model_changed()

    # ---- Checkpoints with other heads ----

    def _load_best_model(self):
        if not self._holds_parts:
            self._take_heads_of(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _take_heads_of(self, folder: str | Path) -> None:
        """Rebuilds the model with the heads and gates of a checkpoint, if they differ."""
        model, before = self._plain_model, self._named_parameters()
        embeddings = model.get_input_embeddings() if self.neftune_noise_alpha is not None else None
        if not take_heads_of(model, folder):
            return
        logger.warning(
            "%s has other heads, units, biases or gates than the model; the model was rebuilt with these.", folder
        )
        if self.args.activation_checkpointing and not model.is_activation_checkpointing:
            # The modules may be new.
            settings = dict(self.args.activation_checkpointing_kwargs or {})
            own = {name: settings.pop(name) for name in ("every_n_layers", "offload") if name in settings}
            model.activation_checkpointing_enable(settings or None, **own)
        if self.neftune_noise_alpha is not None and model.get_input_embeddings() is not embeddings:
            self.neftune_hook_handle = activate_neftune(model, self.neftune_noise_alpha)
        self._held = {}
        self._parameters_replaced(before)


class PrunableTrainer(PrunableMixin, Trainer):
    """`Trainer` that supports pruning during training, and that only resumes complete checkpoints."""


def _exchange(
    optimizer: torch.optim.Optimizer, replaced: dict[str, nn.Parameter], now: dict[str, nn.Parameter]
) -> None:
    """Replaces parameters of an optimizer by those with the same name, without state; drops removed ones."""
    successors = {id(parameter): now.get(name) for name, parameter in replaced.items()}
    for group in optimizer.param_groups:
        # Empty groups are kept, since schedules have a rate for each group.
        followed = [successors.get(id(parameter), parameter) for parameter in group["params"]]
        group["params"] = [parameter for parameter in followed if parameter is not None]
    _forget(optimizer, replaced)


def _forget(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Drops the state of parameters."""
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)


def _rewrapped(wrapper: DistributedDataParallel, model: nn.Module, handler: Any) -> DistributedDataParallel:
    """A new wrapper for data parallelism with the settings of an earlier one."""
    settings = {} if handler is None else handler.to_kwargs()
    return DistributedDataParallel(
        model, device_ids=wrapper.device_ids, output_device=wrapper.output_device, **settings
    )


def take_heads_of(model: nn.Module, folder: str | Path) -> bool:
    """Changes the heads, units and gates of a model to those of a checkpoint, in place, so that its weights fit.

    Args:
        model (`nn.Module`): The model. Heads and units that the checkpoint lacks are removed; if it has further ones,
            all modules of the model are replaced by new ones with random weights.
        folder (`str` or `Path`): The checkpoint.

    Returns:
        `bool`: whether the model was changed.
    """
    file = Path(folder) / CONFIG_NAME
    if not isinstance(model, PreTrainedModel) or hasattr(model, "peft_config") or not file.is_file():
        return False
    saved = read_json(file)
    has_gates = saved.get("gates") is not None
    is_gated = bool(gates_of(model))
    now = model.config.to_dict()
    if not (has_gates or is_gated or any(one.get(name) for one in (saved, now) for name in RECORDS)):
        return False
    removed = _surplus(model, saved, file)
    has_biases, is_biased = (bool(one.get("added_biases")) for one in (saved, now))
    if removed is None or (has_gates and not is_gated) or (is_biased and not has_biases):
        _rebuild(model, folder)
        return True
    heads, units = removed
    if not (heads or units) and (is_gated, is_biased) == (has_gates, has_biases):
        return False
    prune_heads(model, heads or {})
    if units:
        # Units of mixtures of experts cannot be located.
        prune_units(model, units)
    if not has_gates and hasattr(model, "head_gates"):
        remove_gates(model)
    if has_biases:
        add_output_biases(model)
    return True


def _surplus(model: PreTrainedModel, saved: dict[str, Any], file: Path) -> tuple[dict | None, dict | None] | None:
    """Heads and units that a model has and the checkpoint lacks; `None` if the model lacks any of the checkpoint."""
    found: list[dict | None] = []
    layers = {layer.site: (layer.num_heads, layer.heads) for layer in locate_heads(model)}
    has_units = saved.get("pruned_units") or getattr(model.config, "pruned_units", None)
    blocks = {layer.site: (layer.num_units, layer.units) for layer in locate_units(model)} if has_units else {}
    for name, sites, read in (("pruned_heads", layers, heads_by_site), ("pruned_units", blocks, units_by_site)):
        sizes = {site: size for site, (size, _) in sites.items()}
        gone = read(saved.get(name) or {}, sizes, f"{name} of {file}", from_json=True) if sites else {}
        surplus = {site: sorted(set(present).intersection(gone.get(site, ()))) for site, (_, present) in sites.items()}
        left = sum(len(present) for _, present in sites.values()) - sum(map(len, surplus.values()))
        if left != sum(sizes.values()) - sum(map(len, gone.values())):
            return None
        found.append(config_value(surplus, kinds_of(sizes)))
    return found[0], found[1]


def _rebuild(model: PreTrainedModel, folder: str | Path) -> None:
    """Replaces the modules, parameters and configuration of a model by those of a new one like the checkpoint."""
    config = type(model.config).from_pretrained(folder, attn_implementation=attention_kernel(model.config))
    fresh = type(model)(copy.deepcopy(config))
    apply_pruning(fresh)
    fresh.to(device=model.device, dtype=model.dtype).train(model.training)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in fresh.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))
    for part in (fresh.named_children(), fresh.named_parameters(recurse=False), fresh.named_buffers(recurse=False)):
        for name, value in part:
            setattr(model, name, value)
    model.config = fresh.config
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        # Whisper's names heads.
        model.generation_config = GenerationConfig.from_pretrained(folder)
