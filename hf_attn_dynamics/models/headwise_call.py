# Licensed under the Apache License, Version 2.0.
"""Requested outputs of one forward pass, and the terms that its attention layers add."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from .compat import call_after_backward
from .guidance_loss import guide_heads, guided_hits
from .guidance_targets import GuidanceTargets, LayerTargets
from .head_sites import HeadSite


@dataclass
class HeadRequest:
    """The headwise arguments of a forward pass, see [`HeadwiseMixin`]."""

    # Names without "label": trainers would treat such an argument as a label column.
    output_guidance_loss: bool | None = None
    guidance_weight: float | torch.Tensor | None = None
    guidance_rows: torch.Tensor | None = None
    output_gate_penalty: bool | None = None
    gate_penalty_weight: float | torch.Tensor | None = None
    gate_noise: torch.Tensor | None = None
    num_items_in_batch: Any = None
    guidance_counts: Any = None
    output_guided_hits: bool | None = None

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
            ValueError: if a weight is given without labels, or `guidance_rows` without the guidance loss of an
                encoder–decoder.
        """
        name = type(model).__name__
        missing = [column for column in model.label_columns if batch.get(column) is None]
        for weight, output in (("guidance_weight", "guidance_loss"), ("gate_penalty_weight", "gate_penalty")):
            if getattr(self, weight) is not None and (missing or not model.loss_terms):
                needed = f"pass {missing[0]}" if missing else f"{name} has none"
                raise ValueError(f"{weight} needs a task loss: {needed}, or pass output_{output}=True instead.")
        is_read = self.guided or self.output_guided_hits
        if self.guidance_rows is not None and not (is_read and getattr(model.config, "is_encoder_decoder", False)):
            raise ValueError(
                f"guidance_rows are given to {name}, but only the guidance loss of an encoder–decoder reads them: "
                "pass output_guidance_loss=True, or leave them out."
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

    Attributes:
        guidance_terms (`dict[HeadSite, torch.Tensor]`): Guidance loss of each layer.
        reached (`dict[HeadSite, bool]`): Layers that the call reached, as keys, since compiled code does not keep
            additions to a set.
        finished (`bool`): Whether the forward pass has ended: later calls come from gradient checkpointing, and must
            not add their terms again.
        loss_gradient (`torch.Tensor`, *optional*): Gradient with respect to the total guidance loss, during backward.
    """

    def __init__(
        self,
        guidance: dict[str, Targets] | None = None,
        gate_noise: dict[HeadSite, torch.Tensor] | None = None,
        measured: dict[str, Targets] | None = None,
    ):
        self.measured = dict(measured or {})
        self.hits: dict[str, torch.Tensor] = {}
        self.guidance = dict(guidance or {})
        self.gate_noise = gate_noise or {}
        self.guidance_terms: dict[HeadSite, torch.Tensor] = {}
        self.reached: dict[HeadSite, bool] = {}
        self.finished = False
        self.loss_gradient: torch.Tensor | None = None

    def guide(
        self, site: HeadSite, query: torch.Tensor, key: torch.Tensor, kernel_arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the guidance loss of one layer; returns query and key, which replace the arguments.

        Args:
            site (`HeadSite`): Site of the layer.
            query, key (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): Inputs of the kernel.
            kernel_arguments (`dict`): Keywords of the kernel, of which `scaling`, `sliding_window`, `softcap` and
                `s_aux` (sinks) change the attention weights.

        Raises:
            ValueError: if a `position_bias` is added to the scores.
        """
        self.reached[site] = True
        scaling = kernel_arguments.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        measured = self._targets_at(self.measured, site, query, key, kernel_arguments)
        if measured is not None and not self.finished:
            self._count_hits(site, guided_hits(query, key, scaling, measured))
        targets = self._targets_at(self.guidance, site, query, key, kernel_arguments)
        if targets is None:
            return query, key
        softcap = kernel_arguments.get("softcap") or 0.0
        replay = self if self.finished else None
        query, key, term = guide_heads(query, key, scaling, targets, replay, softcap, kernel_arguments.get("s_aux"))
        if not self.finished:
            # Layers that share their weights are one site.
            self.guidance_terms[site] = self.guidance_terms[site] + term if site in self.guidance_terms else term
        return query, key

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

    def _count_hits(self, site: HeadSite, hits: torch.Tensor) -> None:
        """Adds the hits of a layer, of shape `(batch, groups, 2)`."""
        for number, name in enumerate(self.measured[site.kind].guided_heads[site.layer]):
            own = hits[:, number]
            self.hits[name] = self.hits[name] + own.to(self.hits[name].device) if name in self.hits else own

    def check_reached(self, sites: Iterable[HeadSite]) -> None:
        """Raises ValueError if the call did not reach one of these layers."""
        for site in sites:
            if site not in self.reached:
                raise ValueError(
                    f"the attention of the {site} cannot be guided or given gate noise: the model does not pass its "
                    "keywords to it."
                )

    def guidance_loss(self, anchor: torch.Tensor) -> torch.Tensor:
        """Ends the pass and returns the guidance loss summed over sites, a float32 scalar (float64 in double).

        Args:
            anchor (`torch.Tensor`): An output that depends on all layers. With reentrant checkpointing the terms of
                layers are detached; they are tied to `anchor`, and layers add their gradient when backward
                recomputes them.
        """
        self.finished = True
        if not self.guidance_terms:
            # All guided heads have been removed.
            return anchor.new_zeros((), dtype=torch.promote_types(anchor.dtype, torch.float32))
        terms = [term.to(anchor.device) for term in self.guidance_terms.values()]
        attached = [term for term in terms if term.requires_grad]
        detached = [term for term in terms if not term.requires_grad]
        if detached and anchor.requires_grad:
            attached.append(_TieToRecomputation.apply(torch.stack(detached).sum(), anchor, self))
            detached = []
        return torch.stack(attached + detached).sum()


class _TieToRecomputation(torch.autograd.Function):
    """Stores the gradient of a detached guidance loss for the layers that backward will recompute.

    Its backward returns zeros for `anchor`, so that it runs before the layers are recomputed, and they are recomputed
    even if only the guidance loss is differentiated.
    """

    @staticmethod
    def forward(ctx, loss, anchor, call):
        ctx.call = call
        ctx.save_for_backward(anchor)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call.loss_gradient = grad
        # Reset afterwards: another backward over the same graph may not include the guidance loss.
        call_after_backward(partial(setattr, ctx.call, "loss_gradient", None))
        return None, torch.zeros_like(ctx.saved_tensors[0]), None
