# Licensed under the Apache License, Version 2.0.
"""Heads and feed-forward units under one interface: what can be scored, removed and compensated, layer by layer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models.head_roles import HeadLayer, locate_heads
from ..models.head_sites import SITE_KINDS, HeadSite
from ..models.projections import input_columns, outputs_of
from ..models.unit_roles import UnitLayer, locate_units, prunable_units
from .head_scores import arranged
from .model_views import ModelView


PARTS = ("heads", "units")


class PartSite(NamedTuple):
    """`heads` or `units`, and the site of their block."""

    part: str
    site: HeadSite

    def __str__(self) -> str:
        return f"{self.part} of {self.site}"


@dataclass
class ModelPart:
    """The heads of an attention block, or the units of a feed-forward block.

    Args:
        part (`str`): `heads` or `units`.
        layer (`HeadLayer` or `UnitLayer`): The block.
    """

    part: str
    layer: HeadLayer | UnitLayer

    @cached_property
    def key(self) -> PartSite:
        """Part and site."""
        return PartSite(self.part, self.layer.site)

    @property
    def elements(self) -> list[int]:
        """Remaining heads or units, in the original numbering."""
        return self.layer.heads if self.part == "heads" else self.layer.units

    @property
    def count(self) -> int:
        """Original number of heads or units."""
        return self.layer.num_heads if self.part == "heads" else self.layer.num_units

    @property
    def width(self) -> int:
        """Number of inputs of the output projection for each head or unit."""
        return self.layer.head_dim if self.part == "heads" else 1

    @property
    def group_size(self) -> int:
        """Number of heads or units that can only be removed together."""
        return self.layer.group_size if self.part == "heads" else 1

    @property
    def output(self) -> nn.Module:
        """The output projection, whose inputs are the outputs of the heads or the activations of the units."""
        return self.layer.output

    def columns(self) -> torch.Tensor:
        """Weight of the output projection, `(outputs, inputs)`."""
        return input_columns(self.output)

    def features(self, elements: Iterable[int]) -> list[int]:
        """Indices of the inputs of the output projection that belong to some remaining heads or units."""
        place = {element: index for index, element in enumerate(self.elements)}
        return [place[element] * self.width + offset for element in elements for offset in range(self.width)]

    def weights_per_element(self) -> float:
        """Approximate number of weights of a head or unit, if input and output projections are equally wide.

        Not for blocks without heads or units.
        """
        if self.part == "heads":
            return (2 + 2 / self.group_size) * self.width * outputs_of(self.output)
        blocks = sum(outputs_of(projection) for projection in self.layer.inputs.values()) / len(self.elements)
        return (blocks + 1) * outputs_of(self.output)

    def edit(self, view: ModelView, function: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Registers a function that reads or replaces the inputs of the output projection.

        Args:
            view (`ModelView`): View of the model.
            function (callable): Takes a tensor of shape `(batch, length, heads, head_dim)` or `(batch, length, units)`
                each time the block runs; may return a replacement. Blocks without heads or units do not call it.
        """
        if self.part == "units":
            view.edit_units(self.layer, function)
            return

        def edit(context: torch.Tensor) -> torch.Tensor | None:
            if context.dim() != 4:
                raise ValueError(
                    f"the {self.layer.site.kind} attention in {self.layer.name} gives contexts of shape "
                    f"{tuple(context.shape)}, not (batch, length, heads, head_dim); choose attn_implementation='sdpa'."
                )
            return function(context)

        view.edit_outputs(self.layer, edit)


def parts_of_model(model: nn.Module, parts: Iterable[str] = PARTS) -> list[ModelPart]:
    """Heads and units of a model.

    Args:
        model (`PreTrainedModel`): A model of a known architecture.
        parts (`list[str]`): `heads` and `units`.

    Returns:
        `list[ModelPart]`: by part, kind of site and layer.

    Raises:
        ValueError: if the architecture is unknown; or a part has another name, or none is given.
    """
    parts = [parts] if isinstance(parts, str) else list(parts)
    if not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts must be one or both of {', '.join(PARTS)}, got {parts!r}.")
    located = {"heads": locate_heads, "units": locate_units}
    found = [ModelPart(part, layer) for part in PARTS if part in parts for layer in located[part](model)]
    return sorted(found, key=lambda own: (PARTS.index(own.part), SITE_KINDS.index(own.key.site.kind), own.key.site))


def prunable_parts(model: nn.Module) -> list[ModelPart]:
    """Heads of a model, and units if they can be pruned, see [`parts_of_model`]."""
    return parts_of_model(model, PARTS if prunable_units(model) else PARTS[:1])


def block_of(model: nn.Module, layer: HeadLayer) -> nn.Module:
    """The layer of a model that contains an attention module: the innermost item of a `ModuleList`."""
    path = layer.name.split(".")
    depth = max(
        depth
        for depth in range(1, len(path))
        if isinstance(model.get_submodule(".".join(path[: depth - 1])), nn.ModuleList)
    )
    return model.get_submodule(".".join(path[:depth]))


def tables_of_parts(parts: Iterable[ModelPart], values: Mapping[PartSite, Any]) -> dict[str, torch.Tensor]:
    """Arranges values of the remaining heads, or units, of each site as tables `(layers, elements, …)` by kind."""
    parts = list(parts)
    sites = {own.key.site: (own.count, own.elements) for own in parts}
    return arranged(sites, {own.key.site: values[own.key] for own in parts if own.key in values})
