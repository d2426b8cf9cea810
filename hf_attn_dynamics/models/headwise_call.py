# Licensed under the Apache License, Version 2.0.
"""Requested outputs of one forward pass, and the terms that its attention layers add."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from .attention_distillation import AttentionInputs, taught_loss
from .compat import call_after_backward
from .cost_table import CostTable
from .guidance_loss import guide_heads, guided_hits
from .guidance_settings import check_each_weighted, check_guidance_kernel, check_guided_names
from .guidance_targets import GuidanceTargets, LayerTargets
from .head_sites import HeadSite
from .teacher_settings import TEACHER


@dataclass
class HeadRequest:
    """The headwise arguments of a forward pass, see [`HeadwiseMixin`]."""

    # Names without "label": trainers would treat such an argument as a label column.
    output_guidance_loss: bool | None = None
    guidance_weight: float | torch.Tensor | Mapping[str, float | torch.Tensor] | None = None
    guidance_rows: torch.Tensor | None = None
    guidance_kernel: str | None = None
    output_gate_penalty: bool | None = None
    gate_penalty_weight: float | torch.Tensor | None = None
    gate_cost: CostTable | None = None
    gate_noise: torch.Tensor | None = None
    num_items_in_batch: Any = None
    guidance_counts: Any = None
    output_guided_hits: bool | None = None
    teacher_attention: Mapping[HeadSite, AttentionInputs] | None = None

    @property
    def guided(self) -> bool:
        """Whether the guidance loss is requested."""
        return bool(self.output_guidance_loss) or self.guidance_weight is not None

    @property
    def penalised(self) -> bool:
        """Whether the gate penalty is requested."""
        return bool(self.output_gate_penalty) or self.gate_penalty_weight is not None

    def check(self, model: Any, batch: Mapping[str, Any]) -> None:
        """Checks the requests against a model and a batch.

        Raises:
            ValueError: if a weight is given without labels, a weight is given for a name that no guided head has,
                `guidance_kernel` is unknown or given without the guidance loss,
                `guidance_rows` are given without the guidance loss of an encoder–decoder, `gate_cost` is given
                without the gate penalty, or `teacher_attention` is missing, lacks a layer, or is given to a model that
                learns from no teacher.
        """
        name = type(model).__name__
        missing = [column for column in model.label_columns if batch.get(column) is None]
        for weight, output in (("guidance_weight", "guidance_loss"), ("gate_penalty_weight", "gate_penalty")):
            if getattr(self, weight) is not None and (missing or not model.loss_terms):
                needed = f"pass {missing[0]}" if missing else f"{name} has none"
                raise ValueError(f"{weight} needs a task loss: {needed}, or pass output_{output}=True instead.")
        if isinstance(self.guidance_weight, Mapping) and model.head_settings.guidance:
            check_guided_names("guidance_weight", self.guidance_weight, model.head_settings.guided_names)
            check_each_weighted(self.guidance_weight, model.head_settings.names_with_loss)
        if self.guidance_kernel is not None:
            check_guidance_kernel(self.guidance_kernel)
            if not self.guided:
                raise ValueError(
                    f"guidance_kernel is given to {name}, but only the guidance loss reads it: pass "
                    "output_guidance_loss=True, or leave it out."
                )
        if self.gate_cost is not None and not self.penalised:
            raise ValueError(
                f"gate_cost is given to {name}, but only the gate penalty reads it: pass output_gate_penalty=True, or "
                "leave it out."
            )
        self._check_teacher(model)
        is_read = self.guided or self.output_guided_hits
        if self.guidance_rows is not None and not (is_read and getattr(model.config, "is_encoder_decoder", False)):
            raise ValueError(
                f"guidance_rows are given to {name}, but only the guidance loss of an encoder–decoder reads them: "
                "pass output_guidance_loss=True, or leave them out."
            )

    def _check_teacher(self, model: Any) -> None:
        """Raises ValueError unless the guidance loss reads `teacher_attention`, and it has all layers that learn."""
        is_read = self.guided and model.head_settings.is_taught
        if is_read and self.teacher_attention is None:
            raise ValueError(
                "the guidance loss reads the attention of a teacher: pass teacher_attention=Teacher(teacher, model)"
                "(batch).attention, train with HeadwiseTrainer(…, teacher=teacher), or remove guidance['teacher']."
            )
        if self.teacher_attention is not None and not is_read:
            way = "request the guidance loss" if model.head_settings.is_taught else "set guidance={'teacher': …}"
            raise ValueError(f"teacher_attention is given to {type(model).__name__}, which does not read it: {way}.")
        for site in model.head_settings.taught_indices if is_read else ():
            if site not in self.teacher_attention:
                raise ValueError(
                    f"teacher_attention has nothing for the {site}, which guidance['teacher'] names: compute it by a "
                    "Teacher of this model."
                )


OWN_ARGUMENTS = tuple(one.name for one in fields(HeadRequest))


# Of one kind of site; a function of the first query and key where only the model knows their lengths.
Targets = GuidanceTargets | Callable[[torch.Tensor, torch.Tensor], GuidanceTargets]


class HeadwiseCall:
    """Requested outputs of one forward pass, and the terms that its attention layers add.

    Args:
        guidance (`dict[str, GuidanceTargets]`, *optional*): Targets of the guidance loss by kind of site; or functions
            that return them for the first query and key, for images, whose number of patches only the model knows.
        gate_noise (`dict[HeadSite, torch.Tensor]`, *optional*): Uniform random numbers for the gates of each site.
        measured (`dict`, *optional*): As `guidance`, the targets whose hits are counted, see [`guided_hits`].
        taught (`dict[HeadSite, dict[int, int]]`, *optional*): For layers that learn from a teacher, the head of the
            teacher by head of the student, see [`taught_loss`].
        attention (`dict[HeadSite, AttentionInputs]`, *optional*): What they learn.
        unit_noise (`dict[HeadSite, torch.Tensor]`, *optional*): Uniform random numbers for the gates of the
            feed-forward block of each site.
        kernel (`str`): What computes the guidance loss, and that of a teacher, one of `GUIDANCE_KERNELS`.

    Attributes:
        guidance_terms (`dict[tuple[HeadSite, tuple[str, ...]], torch.Tensor]`): Terms of the guidance loss, by the
            site and the names that they belong to, see `add_terms`.
        reached, reached_units (`dict[HeadSite, bool]`): Attention modules, and feed-forward blocks, that the call
            reached, as keys, since compiled code does not keep additions to a set.
        finished (`bool`): Whether the forward pass has ended: later calls come from gradient checkpointing, and must
            not add their terms again.
        loss_gradients (`dict[str, torch.Tensor]`): During backward, the gradients with respect to the guidance losses
            of layers that are recomputed, by name.
    """

    def __init__(
        self,
        guidance: dict[str, Targets] | None = None,
        gate_noise: dict[HeadSite, torch.Tensor] | None = None,
        measured: dict[str, Targets] | None = None,
        taught: Mapping[HeadSite, dict[int, int]] | None = None,
        attention: Mapping[HeadSite, AttentionInputs] | None = None,
        unit_noise: dict[HeadSite, torch.Tensor] | None = None,
        kernel: str = "auto",
    ):
        self.kernel = kernel
        self.taught, self.attention = taught or {}, attention or {}
        self.measured = dict(measured or {})
        self.hits: dict[str, torch.Tensor] = {}
        self.guidance = dict(guidance or {})
        self.gate_noise, self.unit_noise = gate_noise or {}, unit_noise or {}
        self.guidance_terms: dict[tuple[HeadSite, tuple[str, ...]], torch.Tensor] = {}
        self.reached: dict[HeadSite, bool] = {}
        self.reached_units: dict[HeadSite, bool] = {}
        self.finished = False
        self.loss_gradients: dict[str, torch.Tensor] = {}

    def guide(
        self,
        site: HeadSite,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel_arguments: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the guidance loss of one layer; returns query and key, which replace the arguments.

        Args:
            site (`HeadSite`): Site of the layer.
            query, key, value (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Inputs of the kernel.
            kernel_arguments (`dict`): Keywords of the kernel, of which `scaling`, `sliding_window`, `softcap` and
                `s_aux` (sinks) change the attention weights.

        Raises:
            ValueError: if a `position_bias` is added to the scores, or a layer with attention sinks is taught.
        """
        self.reached[site] = True
        scaling = kernel_arguments.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        measured = self._targets_at(self.measured, site, query, key, kernel_arguments)
        if measured is not None and not self.finished:
            self._count_hits(measured.names, guided_hits(query, key, scaling, measured))
        targets = self._targets_at(self.guidance, site, query, key, kernel_arguments)
        if site in self.taught:
            query = self._learn(site, query, key, value, kernel_arguments)
        if targets is None:
            return query, key
        softcap = kernel_arguments.get("softcap") or 0.0
        replay = partial(self.gradient_of_terms, targets.names) if self.finished else None
        sinks = kernel_arguments.get("s_aux")
        query, key, terms = guide_heads(query, key, scaling, targets, replay, softcap, sinks, self.kernel)
        self.add_terms(site, targets.names, terms)
        return query, key

    def _learn(
        self,
        site: HeadSite,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel_arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """Adds the loss of a layer that learns from a teacher; returns the query, which replaces the argument."""
        targets = self.guidance[site.kind]
        student = AttentionInputs.of_kernel(query, key, value, kernel_arguments, str(site), targets.causal)
        term = taught_loss(
            targets.guidance.taught,
            self.taught[site],
            student,
            self.attention[site],
            targets.row_weights,
            targets.key_mask,
            self.kernel,
        )
        self.add_terms(site, (TEACHER,), term[None])
        return _AttachRecomputed.apply(query, term, self) if self.finished else query

    def add_terms(self, site: HeadSite, names: tuple[str, ...], terms: torch.Tensor) -> None:
        """Adds terms of the guidance loss, unless gradient checkpointing recomputes the layer.

        Args:
            site (`HeadSite`): Where they come from.
            names (`tuple[str, ...]`): Names that weights refer to, such as patterns and targets.
            terms (`torch.Tensor` of shape `(names,)`): One term of each name.
        """
        if not self.finished:
            # Layers that share their weights are one site.
            known = self.guidance_terms.get((site, names))
            self.guidance_terms[site, names] = terms if known is None else known + terms

    def gradient_of_terms(self, names: tuple[str, ...]) -> torch.Tensor | None:
        """During backward, the gradient with respect to terms of a layer that is recomputed; `None` without any."""
        if not self.loss_gradients:
            return None
        return torch.stack([self.loss_gradients[name] for name in names])

    @staticmethod
    def _targets_at(
        by_kind: dict[str, Targets],
        site: HeadSite,
        query: torch.Tensor,
        key: torch.Tensor,
        kernel_arguments: Mapping[str, Any],
    ) -> LayerTargets | None:
        """Targets of the guided heads of a layer, if there are any."""
        if site.kind not in by_kind:
            return None
        if callable(by_kind[site.kind]):
            by_kind[site.kind] = by_kind[site.kind](query, key)
        window = kernel_arguments.get("sliding_window")
        targets = by_kind[site.kind].layer(site.layer, query.dtype, query.device, window)
        if targets is not None and kernel_arguments.get("position_bias") is not None:
            raise ValueError(f"guidance does not support the position_bias of the {site}; guide other sites.")
        return targets

    def _count_hits(self, names: tuple[str, ...], hits: torch.Tensor) -> None:
        """Adds the hits of a layer, of shape `(batch, groups, 2)`."""
        for name, own in zip(names, hits.unbind(1)):
            self.hits[name] = self.hits[name] + own.to(self.hits[name].device) if name in self.hits else own

    def check_reached(self, sites: Iterable[HeadSite]) -> None:
        """Raises ValueError if the call did not reach one of these layers, or a block with gate noise."""
        for site in sites:
            if site not in self.reached:
                raise ValueError(
                    f"the attention of the {site} cannot be guided or given gate noise: the model does not pass its "
                    "keywords to it."
                )

        for site in self.unit_noise:
            if site not in self.reached_units:
                raise ValueError(
                    f"the feed-forward block of the {site} cannot be given gate noise: the model does not pass its "
                    "keywords to its layers."
                )

    def guidance_losses(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Ends the pass and returns the guidance losses summed over sites, by name.

        Args:
            anchor (`torch.Tensor`): An output that depends on all layers. With reentrant checkpointing the terms of
                layers are detached; they are tied to `anchor`, and layers add their gradient when backward
                recomputes them.

        Returns:
            `dict[str, torch.Tensor]`: float32 scalars (float64 in double); empty if all guided heads have been
            removed.
        """
        self.finished = True
        terms = {key: term.to(anchor.device) for key, term in self.guidance_terms.items()}
        losses = _summed_by_name({key: term for key, term in terms.items() if term.requires_grad})
        detached = _summed_by_name({key: term for key, term in terms.items() if not term.requires_grad})
        if detached and anchor.requires_grad:
            names = tuple(detached)
            tied = _TieToRecomputation.apply(torch.stack([*detached.values()]), anchor, self, names)
            detached = dict(zip(names, tied.unbind()))
        for name, loss in detached.items():
            losses[name] = losses[name] + loss if name in losses else loss
        return {name: losses[name] for name in sorted(losses)}


def _summed_by_name(terms: dict[tuple[HeadSite, tuple[str, ...]], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums of terms over sites, scalars by name."""
    by_name: dict[str, list[torch.Tensor]] = {}
    for (_, names), some in terms.items():
        for name, own in zip(names, some.unbind()):
            by_name[name] = [*by_name.get(name, ()), own]
    # In an order that does not depend on the configuration, whose keys are sorted when it is saved.
    return {name: torch.stack(by_name[name]).sum() for name in sorted(by_name)}


class _AttachRecomputed(torch.autograd.Function):
    """Returns the query of a layer that reentrant checkpointing recomputes; its backward differentiates the layer's
    loss from a teacher, which was collected detached."""

    @staticmethod
    def forward(ctx, query, term, call):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return query.view_as(query)

    @staticmethod
    def backward(ctx, grad):
        by_name = ctx.call.gradient_of_terms((TEACHER,))
        return grad, None if by_name is None else by_name[0], None


class _TieToRecomputation(torch.autograd.Function):
    """Stores the gradients of detached guidance losses for the layers that backward will recompute.

    Its backward returns zeros for `anchor`, so that it runs before the layers are recomputed, and they are recomputed
    even if only the guidance loss is differentiated.
    """

    @staticmethod
    def forward(ctx, losses, anchor, call, names):
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(anchor)
        return losses.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call.loss_gradients = dict(zip(ctx.names, grad.unbind()))
        # Reset afterwards: another backward over the same graph may not include the guidance loss.
        call_after_backward(partial(setattr, ctx.call, "loss_gradients", {}))
        return None, torch.zeros_like(ctx.saved_tensors[0]), None, None
