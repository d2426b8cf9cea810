# Licensed under the Apache License, Version 2.0.
"""Queries, keys and values of a running model, from which its attention follows."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.attention_distillation import AttentionInputs
from ..models.compat import attention_kernel, passes_attention_interface
from ..models.head_losses import loss_terms_of
from ..models.head_roles import HeadLayer, locate_heads, roles_of
from ..models.head_sites import HeadSite
from ..models.headwise_attention import headwise_over
from .model_views import ModelView, parts_of
from .running import arguments_of


class AttentionReader:
    """Runs a model, and returns the inputs of some of its attention layers. The model itself is not changed.

    Args:
        model (`PreTrainedModel`): Any model that uses the attention interface of Transformers.
        sites (collection of `HeadSite`): The layers to read.
        evaluates (`bool`): Whether the model runs in evaluation mode; otherwise in its own mode.
        values (`bool`): Whether to keep the values, too, which attention weights do not depend on.

    Raises:
        ValueError: if the model has no such layer, does not use the attention interface, or adds something to the
            products of queries and keys, such as relative positions.
    """

    def __init__(
        self, model: PreTrainedModel, sites: Collection[HeadSite], evaluates: bool = True, values: bool = True
    ):
        name = type(model).__name__
        for part in parts_of(model):
            if not passes_attention_interface(type(part)):
                raise ValueError(
                    f"{type(part).__name__} computes attention by itself, not through the attention interface of "
                    "Transformers, so it cannot be read."
                )
        self.layers = {layer.site: layer for layer in locate_heads(model)}
        self._repeats = any(is_shared(layer) for layer in self.layers.values())
        for site in sites:
            if site not in self.layers and not (self._repeats and site.layer < model.config.num_hidden_layers):
                known = [one.layer for one in self.layers if one.kind == site.kind]
                if not known:
                    raise ValueError(f"{name} has no {site.kind} attention; its sites are {', '.join(self.kinds)}.")
                raise ValueError(f"{name} has no {site}; its layers are {min(known)} to {max(known)}.")
        for layer in self.layers.values():
            if layer.site in sites and roles_of(layer.module).biased:
                raise ValueError(
                    f"{name} adds relative positions to the scores of its {layer.site}, so its attention does not "
                    "follow from queries and keys alone; choose another model."
                )
        self.model, self.sites, self.evaluates, self.values = model, set(sites), evaluates, values
        self._by_module = {id(layer.module): layer for layer in self.layers.values()}
        self._view: ModelView | None = None
        self._found: dict[HeadSite, AttentionInputs] = {}
        self._calls: Counter[str] = Counter()

    @property
    def kinds(self) -> list[str]:
        """Kinds of sites of the model."""
        return list(dict.fromkeys(site.kind for site in self.layers))

    def layer_at(self, site: HeadSite) -> HeadLayer:
        """The module of a layer; one serves all layers of a model that shares it."""
        return self.layers[site if site in self.layers else HeadSite(site.kind, 0)]

    def __call__(self, batch: Mapping[str, Any], **options: Any) -> tuple[Any, dict[HeadSite, AttentionInputs]]:
        """Runs the model.

        Args:
            batch (`dict`): Arguments of its forward pass; labels, and arguments that it does not have, are left out.
            options: Further arguments, such as `output_hidden_states`.

        Returns:
            `tuple`: the output of the model, and the inputs of each layer. Queries, keys and values are those of the
            graph of the output, if gradients are enabled.
        """
        if self._view is None or not self._view.is_current():
            self._view = self._new_view()
        self._found, self._calls = {}, Counter()
        try:
            arguments = {**unlabelled_arguments(self.model, batch), **options}
            return self._view.root(**arguments, return_dict=True), self._found
        finally:
            self._found = {}

    def _new_view(self) -> ModelView:
        view = ModelView(self.model)
        if self.evaluates:
            view.evaluate(self.model)
        view.observers.append(self._read)
        view.name_attention(self.model, lambda part, kernel: headwise_over(kernel or attention_kernel(part.config)))
        return view

    def _read(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: Any,
        *,
        value: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        layer = self._by_module.get(id(module.viewed))
        if layer is None:
            return
        site = site_of_call(layer, self._calls[layer.site.kind])
        self._calls[layer.site.kind] += 1
        if site in self.sites:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", False) if causal is None else causal
            self._found[site] = AttentionInputs.of_kernel(
                query,
                key,
                value if self.values else None,
                kwargs,
                f"{site} of {type(self.model).__name__}",
                causal,
                layer.heads,
            )


def is_shared(layer: HeadLayer) -> bool:
    """Whether one module serves several layers."""
    return "albert_layers" in layer.name.split(".")


def site_of_call(layer: HeadLayer, call: int) -> HeadSite:
    """Site of a call of an attention module; `call` is the number of calls of this kind before it in a pass."""
    return HeadSite(layer.site.kind, call) if is_shared(layer) else layer.site


def unlabelled_arguments(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass that a model accepts, without labels, on its device."""
    labels = {term.labels for term in loss_terms_of(type(model))}
    return {name: value for name, value in arguments_of(model, batch).items() if name not in labels}
