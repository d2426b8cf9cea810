# Licensed under the Apache License, Version 2.0.
"""The mixin that makes a stock Transformers model headwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import initialization
from transformers.utils import ModelOutput

from .compat import StockExpertsMixin, attention_kernel, kernel_name
from .cost_table import CostTable
from .gate_costs import expected_cost
from .guidance_inputs import guidance_targets, guided_row_counts, measured_targets
from .guidance_settings import COLUMN_PREFIX
from .hard_coded_attention import install_hard_coded_attention
from .hard_concrete import HardConcreteGate
from .head_gates import gate_penalty, gates_of, install_gates
from .head_losses import SENTENCES, TaskLossMixin, add_head_losses, fraction_of_sentences, head_loss_parts, task_parts
from .head_roles import HeadLayer, locate_heads, roles_of
from .head_settings import HeadSettings
from .head_sites import HeadSite
from .headwise_arguments import headwise_forward
from .headwise_attention import carried, install_headwise_attention
from .headwise_call import OWN_ARGUMENTS, HeadRequest, HeadwiseCall
from .headwise_inputs import CheckedInputsMixin, is_plain_text
from .headwise_outputs import with_head_losses, with_loss
from .loaded_weights import check_loaded_heads, telling_damaged_weights
from .packing import number_of_sentences, packing_of
from .prunable_models import separate_configuration
from .resizing import HeadwiseVocabularyMixin
from .saved_code import is_of_this_package
from .size_limits import LimitedModelMixin
from .unit_pruning import apply_pruning


_OWN = frozenset(OWN_ARGUMENTS)
# Fractions of layers that stock models skip in training, by stack (LayerDrop).
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


@dataclass
class _Gates:
    """Gates of heads and of units by site, looked up once in a forward pass."""

    heads: dict[HeadSite, HardConcreteGate] = field(default_factory=dict)
    units: dict[HeadSite, HardConcreteGate] = field(default_factory=dict)

    @classmethod
    def of(cls, model: HeadwiseMixin) -> _Gates:
        return cls(model.head_gates(), model.unit_gates())

    @property
    def all(self) -> list[HardConcreteGate]:
        """In the order of their random numbers."""
        return [*self.heads.values(), *self.units.values()]


class HeadwiseMixin(CheckedInputsMixin, TaskLossMixin, HeadwiseVocabularyMixin, LimitedModelMixin, StockExpertsMixin):
    """Makes a stock Transformers model headwise: `class HeadwiseX(HeadwiseMixin, X)`.

    Parameter names do not change, so that checkpoints load in both directions. The forward pass accepts the arguments
    of the stock one and those below; keywords that would be ignored raise TypeError.

    Args:
        output_guidance_loss (`bool`, *optional*): Return `guidance_loss`, a differentiable float32 scalar, with the
            reduction `config.guidance["reduction"]`, and `guidance_losses`, a dictionary of its summands by pattern
            or target. They do not depend on padding.
        guidance_weight (`float`, `torch.Tensor` or `dict`, *optional*): α; adds `α · guidance_loss` to `loss`, and
            also returns `guidance_loss` and `guidance_losses`. A dictionary `{pattern or target: α}` gives each
            summand its own weight.
        guidance_rows (`torch.BoolTensor` of shape `(batch, target length)`, *optional*): Rows of the decoder and its
            cross-attention that the guidance loss is averaged over, for encoder–decoders given neither `labels` nor
            `decoder_attention_mask`; defaults to all rows.
        guidance_kernel (`str`, *optional*): What computes the guidance loss, and that of the attention of a teacher:
            `triton`; `blocks`, a loop over blocks of rows in PyTorch; or `auto` (default), Triton on GPUs where it is
            installed and compiles.
        output_gate_penalty (`bool`, *optional*): Return `gate_penalty`, the expected number of open heads and units,
            among those with gates: those whose gate and whose block's gate is open.
        gate_penalty_weight (`float` or `torch.Tensor`, *optional*): λ; adds `λ · gate_penalty` to `loss`, and also
            returns `gate_penalty`.
        gate_cost ([`CostTable`], *optional*): Costs of heads and units. `gate_penalty` is then the expected cost of
            the model, as a fraction of the cost of the model without pruning.
        gate_noise (`torch.Tensor` of shape `(gates,)`, *optional*): Uniform random numbers for all gates in the order
            of `head_gates()`, then `unit_gates()`, and in each of them for its elements, then for its block, in
            training mode; by default drawn from the global generator.
        num_items_in_batch (`int`, `torch.Tensor` or `dict`, *optional*): Number of labels in the whole accumulated
            batch over all processes, without ignored ones; or a dictionary by label column. The task loss is then the
            sum over this batch divided by this number, so that summing over micro-batches gives the mean over the
            whole batch; without it, the mean over this batch. A dictionary may also contain `sentences`, the number of
            sentences of the accumulated batch, and `forward_passes`, its number of forward passes: `guidance_loss` and
            `gate_penalty` are then parts to be summed, too. Numbers of rows by column of a target, as from
            `count_guided_rows()`, make the loss of this target a mean over the rows of the accumulated batch.
        guidance_counts (`dict`, *optional*): Replaces `num_items_in_batch` for the mean over rows that have a target,
            where another function computes the task loss: numbers of rows by column, and `sentences`.
            `guidance_loss` is then to be multiplied by the fraction of sentences of this batch.
        output_guided_hits (`bool`, *optional*): Return `guided_hits`, from which the accuracy of heads that are guided
            to targets in the batch follows: how often their strongest key is a target.
        teacher_attention (`dict`, *optional*): What the model learns from a teacher, for the guidance loss of a model
            with `guidance["teacher"]`: the `attention` that a [`Teacher`] returns for the same batch.
        guidance_NAME (`torch.Tensor`, *optional*): Target of each name in `guidance["targets"]`, for the guidance
            loss, see [`rows_of_target`]; ignored if neither the guidance loss nor hits are requested. With the form
            `sparse`, also `guidance_NAME_weights`.

    `output_attentions=True` returns the weights that multiply the values, as in stock models: in training mode after
    dropout. Call `model.eval()` for the softmax itself, or use `attention_maps` of this package.

    Raises:
        TypeError: for keywords that the stock forward pass or the kernel would ignore.
        ValueError: if the guidance loss or the gate penalty is requested from a model without guidance or gates, a
            weight is given without labels, `guidance_rows` without guidance of an encoder–decoder, `guidance_kernel`
            without the guidance loss or for tensors that Triton cannot take, or an input longer than the position
            embeddings; for a target that is missing or invalid; for empty batches and masks of another shape; and, on
            CPUs, for tokens, token types, positions and labels out of range, see [`check_integers`].
    """

    # The model divides its loss by the count that a trainer passes.
    accepts_loss_kwargs = True
    # Whether the forward pass takes inputs of an encoder and of a decoder.
    reads_targets: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        stock_forward = getattr(cls, "forward", None)
        if "forward" not in vars(cls) and stock_forward and not getattr(stock_forward, "is_headwise", False):
            cls.forward = headwise_forward(stock_forward)
            cls.reads_targets = "decoder_input_ids" in inspect.signature(stock_forward).parameters

    def post_init(self):
        """Checks the configuration, installs headwise and hard-coded attention and gates, and removes pruned parts,
        before weights are initialised or loaded."""
        if not hasattr(self.config, "check_heads"):
            raise TypeError(
                f"{type(self).__name__} needs a {self.config_class.__name__}, got {type(self.config).__name__}; "
                f"{self.config_class.__name__}.from_pretrained() converts it."
            )
        self._head_settings = self.config.check_heads()
        layers = locate_heads(self)
        self._check_sites(layers)
        self._by_interface = all(roles_of(layer.module).by_interface for layer in layers)
        install_headwise_attention(layers)
        install_hard_coded_attention(self, self._head_settings.hard_coded)
        apply_pruning(self)
        install_gates(self, self._head_settings.gates)
        super().post_init()

    def _check_sites(self, layers: list[HeadLayer]) -> None:
        """Raises ValueError if model and configuration disagree on the heads, or attention does not support guidance
        or hard-coding."""
        found = {layer.site: layer.num_heads for layer in layers}
        if found != self._head_settings.sites:
            odd = min(found.items() ^ self._head_settings.sites.items())
            raise ValueError(
                f"{type(self).__name__} and its configuration disagree on {odd[1]} heads at {odd[0]}: "
                "attention_sites() of the configuration must return the heads of each layer of the model."
            )
        for layer in layers:
            roles, kind = roles_of(layer.module), layer.site.kind
            if kind in self._head_settings.hard_coded and not roles.by_interface:
                raise ValueError(
                    f"hard_coded is set for the {layer.site} of {type(self).__name__}, but "
                    f"{type(layer.module).__name__} does not call an attention function: set hard_coded=None."
                )
            if kind in self._head_settings.guidance and roles.biased:
                raise ValueError(
                    f"guidance of {type(self).__name__} is requested at the {layer.site}, but "
                    f"{type(layer.module).__name__} adds relative positions to its scores, which guidance does not "
                    "support: set guidance=None, or name other sites."
                )

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, so that Transformers initialises missing weights as for stock classes.

        For custom code it skips weights that modules initialise in their children, such as Whisper's positions.
        """
        return False

    def initialize_weights(self):
        """Initialises weights that were not loaded, gates included."""
        super().initialize_weights()
        for gate in gates_of(self):
            gate.reset_parameters(initialization)

    @property
    def head_settings(self) -> HeadSettings:
        """Settings of heads, read again when the configuration changes."""
        if not self._head_settings.is_of(self.config):
            self._head_settings = self.config.head_settings()
        return self._head_settings

    def head_gates(self) -> dict[HeadSite, HardConcreteGate]:
        """Gates of heads and attention blocks by site, in the order of encoder, decoder and cross-attention, then
        layers."""
        headed = [module for module in self.modules() if "head_site" in vars(module)]
        found = {module.head_site: module.gate for module in headed if module.gate is not None}
        return {site: found[site] for site in self._head_settings.sites if site in found}

    def unit_gates(self) -> dict[HeadSite, HardConcreteGate]:
        """Gates of units and feed-forward blocks by site, in the order of encoder and decoder, then layers."""
        found = {one.unit_site: one.unit_gate for one in self.modules() if "unit_site" in vars(one)}
        return {site: found[site] for site in self._head_settings.sites if site in found}

    def add_gates(self, gates: dict) -> HeadwiseMixin:
        """Adds gates to an existing model, as `gates` in its configuration would have.

        Args:
            gates (`dict`): See [`HeadwiseConfigMixin`]; `{}` for the gates of the paper.

        Returns:
            the same model.

        Raises:
            ValueError: if the model has gates, or `gates` is invalid; the model is then unchanged.

        Example:
            >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel
            >>> model = HeadwiseBertModel(HeadwiseBertConfig(num_hidden_layers=2))
            >>> len(model.add_gates({}).head_gates())
            2
        """
        if gates is None:
            raise ValueError("gates must be a dictionary, {} for the gates of the paper, got None.")
        if self.config.gates is not None:
            raise ValueError(f"{type(self).__name__} already has gates; prune_closed_gates() removes them.")
        separate_configuration(self)
        try:
            self.config.gates = gates
            self.config.check_heads()
            install_gates(self, self.head_settings.gates)
        except ValueError:
            self.config.gates = None
            raise
        return self

    @property
    def target_columns(self) -> frozenset[str]:
        """Columns of a batch that the forward pass takes for `guidance["targets"]`, such as `guidance_syntax`."""
        return self.head_settings.target_columns

    def count_guided_rows(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Number of rows that count for each target that a batch brings, by column.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs, labels and targets of a forward pass.

        Returns:
            `dict[str, torch.Tensor]`: scalars, to be summed over micro-batches and processes, and passed to the
            forward pass in `num_items_in_batch` together with `sentences`; empty without `guidance["targets"]`.

        Raises:
            ValueError: if the column of a target is missing or invalid.
        """
        return guided_row_counts(self, self.head_settings, self.guidance_inputs(batch))

    def guidance_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch in which patterns look for tokens."""
        return batch

    def _forward(self, stock_forward: Callable, kwargs: dict[str, Any]) -> ModelOutput | tuple:
        """The forward pass, called by [`headwise_forward`] with all arguments by name."""
        if kwargs.get("output_attentions") and kernel_name(self.config) not in ("eager", "sdpa"):
            raise ValueError(
                f"output_attentions=True needs attention weights, which {attention_kernel(self.config)!r} does not "
                "return; call model.set_attn_implementation('sdpa')."
            )
        # Stock forward passes do not take them.
        columns = {name: kwargs.pop(name) for name in [*kwargs] if self._is_target_column(name)}
        # Compiled code cannot raise errors about values.
        is_checked = not torch.compiler.is_compiling()
        if is_checked and not is_plain_text(kwargs):
            self._check_shapes(**kwargs)
        if _OWN.isdisjoint(kwargs):
            if self.reads_targets:
                self._check_has_target(kwargs)
            return self.run_stock(stock_forward, is_checked, kwargs)
        request = HeadRequest(**{name: kwargs.pop(name) for name in OWN_ARGUMENTS if name in kwargs})
        request.check(self, kwargs)
        if self.reads_targets and not request.guided:
            self._check_has_target(kwargs)
        # With counts of an accumulated batch, the task loss is computed here and not by the stock head.
        is_part = request.num_items_in_batch is not None and bool(self.loss_terms)
        is_part = is_part and all(kwargs.get(name) is not None for name in self.label_columns)
        if is_part:
            self.check_loss_function()
        asked = request.guided or request.penalised or request.output_guided_hits
        if not (asked or is_part or request.gate_noise is not None):
            return self.run_stock(stock_forward, is_checked, kwargs)

        return_dict, batch = kwargs.pop("return_dict", None), kwargs
        # Looked up once, since it iterates over all modules.
        gates = _Gates.of(self) if request.penalised or request.gate_noise is not None else _Gates()
        call, sentences = self._call_for(request, batch, columns, gates)
        inputs = {**(self.without_labels(batch) if is_part else batch), "return_dict": True}
        if self._by_interface:
            outputs = self.run_stock(stock_forward, is_checked, {**inputs, "headwise": call})
        else:
            with carried(call):
                outputs = self.run_stock(stock_forward, is_checked, inputs)
        if not self._drops_layers:
            call.check_reached(self._requested_sites(request, gates))
        outputs = self._with_losses(outputs, request, call, gates, batch, is_part, sentences)
        if return_dict is None:
            return_dict = self.config.return_dict
        return outputs if return_dict else outputs.to_tuple()

    @property
    def _drops_layers(self) -> bool:
        """Whether the stock model skips layers at random, which then have no guidance loss and no gate noise."""
        return self.training and any(getattr(self.config, name, None) for name in _LAYER_DROPS)

    def _is_target_column(self, name: str) -> bool:
        return name.startswith(COLUMN_PREFIX) and name not in _OWN and name in self.target_columns

    def _call_for(
        self,
        request: HeadRequest,
        batch: dict[str, Any],
        columns: dict[str, torch.Tensor],
        gates: _Gates,
    ) -> tuple[HeadwiseCall, torch.Tensor | None]:
        """The call that carries the requested outputs to the attention layers, and the number of sentences."""
        targets, noise, unit_noise, measured, packing, sentences = None, None, None, None, None, None
        if request.guided or request.output_guided_hits:
            batch = {**self.guidance_inputs(batch), **columns, "guidance_rows": request.guidance_rows}
            packing = packing_of(self, batch)
        if request.output_guided_hits:
            measured = measured_targets(self, self.head_settings, batch, packing)
        if request.guided:
            counts = request.guidance_counts or request.num_items_in_batch
            sentences = number_of_sentences(batch, packing)
            fraction = fraction_of_sentences(sentences, counts)
            if fraction is None and isinstance(counts, dict) and (counted := self.target_columns & counts.keys()):
                raise ValueError(
                    f"the rows of {min(counted)} are counted, but not the sentences of the accumulated batch; add "
                    f"{SENTENCES!r} to the counts."
                )
            counts = None if fraction is None else {**counts, "fraction": fraction}
            targets = guidance_targets(self, self.head_settings, batch, packing, counts)
        if request.penalised or request.gate_noise is not None:
            if not gates.all:
                wanted = "the gate penalty is requested" if request.penalised else "gate_noise is given"
                raise ValueError(
                    f"{wanted}, but {type(self).__name__} has no gates: load or build the model with gates={{}}, for "
                    "instance."
                )
            noise, unit_noise = self._noise_by_site(gates, request.gate_noise)
        taught = self.head_settings.taught_indices if request.guided else None
        kernel = request.guidance_kernel or "auto"
        call = HeadwiseCall(targets, noise, measured, taught, request.teacher_attention, unit_noise, kernel)
        return call, sentences

    def _requested_sites(self, request: HeadRequest, gates: _Gates) -> list[HeadSite]:
        """Sites that a request must reach: with guided heads or, if noise is given, with gates."""
        indices = self.head_settings.guided_indices.items() if request.guided else ()
        sites = [HeadSite(kind, layer) for kind, layers in indices for layer in layers]
        if request.guided:
            sites += self.head_settings.taught_indices
        if request.gate_noise is not None:
            sites += [site for site, gate in gates.heads.items() if gate.num_gates]
        return sites

    def _noise_by_site(
        self, gates: _Gates, noise: torch.Tensor | None
    ) -> tuple[dict[HeadSite, torch.Tensor] | None, dict[HeadSite, torch.Tensor] | None]:
        """Random numbers of the gates of each attention module, and of each feed-forward block."""
        if noise is None:
            return None, None
        sizes = [gate.num_gates for gate in gates.all]
        if noise.shape != (sum(sizes),):
            raise ValueError(
                f"gate_noise must have shape ({sum(sizes)},), one for each gate, got {tuple(noise.shape)}."
            )
        if not self.training:
            raise ValueError("gate_noise is given, but gates are only sampled in training; call model.train().")
        if not self._by_interface and self.is_activation_checkpointing:
            raise ValueError(
                f"gate_noise does not reach the layers of {type(self).__name__} that gradient checkpointing "
                "recomputes; call model.activation_checkpointing_disable()."
            )
        parts = noise.split(sizes)
        of_units = dict(zip(gates.units, parts[len(gates.heads) :]))
        return dict(zip(gates.heads, parts)), {site: one for site, one in of_units.items() if len(one)}

    def _with_losses(
        self,
        outputs: ModelOutput,
        request: HeadRequest,
        call: HeadwiseCall,
        gates: _Gates,
        batch: dict[str, Any],
        is_part: bool,
        sentences: torch.Tensor | None,
    ) -> ModelOutput:
        """Adds the requested losses to the output of the stock forward pass."""
        anchor = next(value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point())
        losses: dict[str, Any] = {}
        if request.guided:
            by_name = call.guidance_losses(anchor)
            # Without any, all guided heads have been removed.
            zero = anchor.new_zeros((), dtype=torch.promote_types(anchor.dtype, torch.float32))
            if self._drops_layers:
                by_name = {name: by_name.get(name, zero) for name in self.head_settings.guided_names}
            losses["guidance_loss"] = torch.stack([*by_name.values()]).sum() if by_name else zero
            losses["guidance_losses"] = by_name
        if request.penalised:
            losses["gate_penalty"] = self._penalty(gates, request.gate_cost).to(anchor.device)
        losses = head_loss_parts(losses, sentences, request.num_items_in_batch)
        if call.hits:
            losses["guided_hits"] = call.hits
        loss = outputs.get("loss")
        if is_part:
            parts = task_parts(self.sentence_losses(outputs, batch), request.num_items_in_batch)
            loss = sum(term.weight * part for term, part in parts.items())
            loss = loss + self.router_loss(outputs, request.num_items_in_batch)
            if len(parts) > 1:
                losses["task_losses"] = {term.name: part.detach() for term, part in parts.items()}
        if request.guidance_weight is not None or request.gate_penalty_weight is not None:
            losses["task_loss"] = loss.detach()
            loss = add_head_losses(loss, losses, request.guidance_weight, request.gate_penalty_weight)
        if loss is not None:
            outputs = with_loss(outputs, loss)
        return with_head_losses(outputs, losses) if losses else outputs

    def _penalty(self, gates: _Gates, cost: CostTable | None) -> torch.Tensor:
        """Expected number of open heads and units, or the expected cost of the model as a fraction."""
        return gate_penalty(gates.all) if cost is None else expected_cost(self, cost)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Loads a checkpoint as the stock class does, but never initialises heads at random.

        Raises:
            FileNotFoundError: if the folder does not exist.
            ValueError: if the weights of attention do not fit `config.pruned_heads` or `config.hard_coded`, or are
                damaged.
            RuntimeError: if other weights do not fit, and `ignore_mismatched_sizes` is not set.
        """
        path = pretrained_model_name_or_path
        with_info = kwargs.pop("output_loading_info", False)
        ignored = kwargs.pop("ignore_mismatched_sizes", False)
        with telling_damaged_weights(path, kwargs.get("subfolder")):
            model, info = super().from_pretrained(
                path, *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
            )
        if path is not None:
            check_loaded_heads(path, model, info)
        for name, saved, built in sorted(info["mismatched_keys"]):
            if not ignored:
                raise RuntimeError(
                    f"{name} has shape {tuple(saved)} in {path}, but {tuple(built)} in {cls.__name__} with this "
                    "configuration; ignore_mismatched_sizes=True initialises it at random."
                )
        return (model, info) if with_info else model

    def save_pretrained(self, *args, **kwargs):
        """Saves the model as the stock class does; restores `config.auto_map`, which saving the code sets."""
        before = getattr(self.config, "auto_map", None)
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            if before is not None:
                self.config.auto_map = before
            elif hasattr(self.config, "auto_map"):
                del self.config.auto_map

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Registers derived custom classes; the configuration saves the code of the classes of this package."""
        if not is_of_this_package(cls):
            super().register_for_auto_class(auto_class)
