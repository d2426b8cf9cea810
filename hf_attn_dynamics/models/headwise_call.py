# Licensed under the Apache License, Version 2.0.
"""What one forward pass requests of its attention layers, and what it collects from them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from .compat import call_after_backward
from .guidance_loss import guide_heads
from .guidance_targets import GuidanceTargets
from .head_sites import HeadSite


@dataclass
class HeadRequest:
    """The headwise arguments of a forward pass, see [`HeadwiseMixin`]."""

    # None has "label" in its name, which trainers would take for a column of the batch.
    output_guidance_loss: bool | None = None
    guidance_weight: float | torch.Tensor | None = None
    guidance_rows: torch.Tensor | None = None
    output_gate_penalty: bool | None = None
    gate_penalty_weight: float | torch.Tensor | None = None
    gate_noise: torch.Tensor | None = None
    num_items_in_batch: Any = None

    @property
    def guided(self) -> bool:
        """Whether the guidance loss is requested."""
        return bool(self.output_guidance_loss) or self.guidance_weight is not None

    @property
    def penalised(self) -> bool:
        """Whether the gate penalty is requested."""
        return bool(self.output_gate_penalty) or self.gate_penalty_weight is not None

    def check(self, model: Any, batch: Mapping[str, Any]) -> None:
        """Refuses what a model cannot give for a batch.

        Raises:
            ValueError: if a weight comes without labels, or `guidance_rows` without the guidance of an
                encoder–decoder.
        """
        name = type(model).__name__
        missing = [column for column in model.label_columns if batch.get(column) is None]
        for weight, output in (("guidance_weight", "guidance_loss"), ("gate_penalty_weight", "gate_penalty")):
            if getattr(self, weight) is not None and (missing or not model.loss_terms):
                needed = f"pass {missing[0]}" if missing else f"{name} has none"
                raise ValueError(f"{weight} adds to a task loss: {needed}, or ask for output_{output}=True.")
        if self.guidance_rows is not None and not (self.guided and getattr(model.config, "is_encoder_decoder", False)):
            raise ValueError(
                f"guidance_rows are given to {name}, but only the guidance loss of an encoder–decoder reads them: ask "
                "for output_guidance_loss=True, or leave them out."
            )


OWN_ARGUMENTS = tuple(one.name for one in fields(HeadRequest))


class HeadwiseCall:
    """What one forward pass requests of its attention layers, and what they return.

    Args:
        guidance (`dict[str, GuidanceTargets]`, *optional*): Requests the guidance loss of these kinds of sites. A
            function instead is called with the first queries and keys: those of images come without a mask, and only
            the model knows how many there are.
        gate_noise (`dict[HeadSite, torch.Tensor]`, *optional*): Uniform numbers, one for each gate of a site.

    Attributes:
        guidance_terms (`dict[HeadSite, torch.Tensor]`): Guidance loss of each layer.
        reached (`dict[HeadSite, bool]`): Layers that this call reached, as keys: compiled code loses what it adds to a
            set.
        finished (`bool`): True once the forward pass has ended: layers that call again are being recomputed by
            gradient checkpointing, and must not add their terms twice.
        loss_gradient (`torch.Tensor`, *optional*): Gradient of the total guidance loss, while backward runs.
    """

    def __init__(
        self,
        guidance: dict[str, GuidanceTargets | Callable[[torch.Tensor, torch.Tensor], GuidanceTargets]] | None = None,
        gate_noise: dict[HeadSite, torch.Tensor] | None = None,
    ):
        self.guidance = dict(guidance or {})
        self.gate_noise = gate_noise or {}
        self.guidance_terms: dict[HeadSite, torch.Tensor] = {}
        self.reached: dict[HeadSite, bool] = {}
        self.finished = False
        self.loss_gradient: torch.Tensor | None = None

    def guide(
        self, site: HeadSite, query: torch.Tensor, key: torch.Tensor, kernel_arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the guidance loss of one layer; returns query and key, to be used in place of the arguments.

        Args:
            site (`HeadSite`): Where the layer is.
            query, key (`torch.Tensor` of shape `(batch, heads, length, head_dim)`): As the kernel gets them.
            kernel_arguments (`dict`): What else it gets: `scaling`, `sliding_window`, `softcap` and the sinks `s_aux`
                change what a row attends to.

        Raises:
            ValueError: for what is added to scores.
        """
        self.reached[site] = True
        if site.kind not in self.guidance:
            return query, key
        window, softcap = kernel_arguments.get("sliding_window"), kernel_arguments.get("softcap") or 0.0
        if callable(self.guidance[site.kind]):
            self.guidance[site.kind] = self.guidance[site.kind](query, key)
        targets = self.guidance[site.kind].layer(site.layer, query.dtype, query.device, window)
        if targets is None:
            return query, key
        if kernel_arguments.get("position_bias") is not None:
            raise ValueError(f"guidance does not know what the {site} adds to its scores; guide other sites.")
        scaling = kernel_arguments.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        replay = self if self.finished else None
        query, key, term = guide_heads(query, key, scaling, targets, replay, softcap, kernel_arguments.get("s_aux"))
        if not self.finished:
            # Layers that share their weights are one site.
            self.guidance_terms[site] = self.guidance_terms[site] + term if site in self.guidance_terms else term
        return query, key

    def check_reached(self, sites: Iterable[HeadSite]) -> None:
        """Refuses a pass in which this call did not reach a layer.

        Raises:
            ValueError: naming the layer.
        """
        for site in sites:
            if site not in self.reached:
                raise ValueError(
                    f"the attention of the {site} cannot be guided, nor its gates be given noise: the model does not "
                    "hand its keywords down to it."
                )

    def guidance_loss(self, anchor: torch.Tensor) -> torch.Tensor:
        """Ends the pass and returns the guidance loss summed over sites, a float32 scalar (float64 in double).

        Args:
            anchor (`torch.Tensor`): An output that depends on all layers. Reentrant checkpointing runs layers without
                gradients, so that their terms come detached; these are then tied to `anchor`, and the layers add
                their gradient when backward recomputes them.
        """
        self.finished = True
        if not self.guidance_terms:
            # All guided heads are removed.
            return anchor.new_zeros((), dtype=torch.promote_types(anchor.dtype, torch.float32))
        terms = [term.to(anchor.device) for term in self.guidance_terms.values()]
        attached = [term for term in terms if term.requires_grad]
        detached = [term for term in terms if not term.requires_grad]
        if detached and anchor.requires_grad:
            attached.append(_TieToRecomputation.apply(torch.stack(detached).sum(), anchor, self))
            detached = []
        return torch.stack(attached + detached).sum()


class _TieToRecomputation(torch.autograd.Function):
    """Keeps the gradient of a detached guidance loss for the layers that backward will recompute.

    Its own backward sends zeros to `anchor`. So it always runs before the layers are recomputed, and they are
    recomputed even if nothing but the guidance loss is differentiated.
    """

    @staticmethod
    def forward(ctx, loss, anchor, call):
        ctx.call = call
        ctx.save_for_backward(anchor)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call.loss_gradient = grad
        # For this backward alone: another one over the same graph may leave the guidance loss out.
        call_after_backward(partial(setattr, ctx.call, "loss_gradient", None))
        return None, torch.zeros_like(ctx.saved_tensors[0]), None
