# Licensed under the Apache License, Version 2.0.
"""What single heads give: read, averaged, and for a while multiplied or replaced.

    with masked_heads(model, {0: [1, 2]}):
        model(**batch)                      # as if heads 1 and 2 of layer 0 gave nothing

The output of a head is its part of the input of the output projection, `z_h = Σ_j α_hj v_j` of size `head_dim`. All
that a head does it does by it, under every kernel.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import HeadSite, by_kind, heads_by_site, kinds_of
from ..model_views import ModelView, evaluation_view, generates, prepared_views
from ..running import batches_of, on_device, real_tokens


HeadNumbers = Mapping[str, Any] | Mapping[int, Any] | torch.Tensor


@contextmanager
def masked_heads(
    model: PreTrainedModel, mask: HeadNumbers | Iterable[tuple], replacement: HeadNumbers | None = None
) -> Iterator[None]:
    """Replaces the output z of each head by `m · z + (1 − m) · r` within the context, in the thread that entered it.

    For ablation by zero, by the mean of [`mean_head_outputs`] or, with [`head_outputs`] of another batch, by patching.
    Works under any kernel, in training, in `generate()`, and for single heads of grouped queries; contexts may be
    nested. Gradients reach the mask, the replacement and the weights. The model itself is not changed: other threads
    may use it as if there were no context, copies of it are ordinary models, and compiled models run uncompiled.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows, also one that is pruned.
        mask (`dict`, `list` or `torch.Tensor`): Heads to leave out, as [`prune_heads`] takes them: `{layer: [heads]}`,
            or a list as `HeadScores.ranked()` gives it. Or m for each head, of shape `(layers, heads)`, or
            `(batch, layers, heads)` for each example by itself, which in `generate()` holds for all beams and
            returned sequences of the example: 1 keeps a head, 0 leaves it out. Models with heads at several kinds of
            sites name them, `{"encoder": …}`; those that are not named stay as they are.
        replacement (`dict` or `torch.Tensor`, *optional*): r; 0 by default. Of shape `(layers, heads, head_dim)`, or
            `(layers, batch, length, heads, head_dim)` for passes over that many examples and tokens, where a batch or
            length of 1 holds for all; by kind of site as the mask.

    Raises:
        ValueError: if mask or replacement name what the model does not have, or are of another shape; and by the
            model, if they are for other examples or another length than a pass has.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model, ids = BertModel(config).eval(), torch.tensor([[5, 7, 8]])
        >>> mask = torch.ones(2, 4, requires_grad=True)
        >>> with masked_heads(model, mask):
        ...     model(ids).last_hidden_state.square().sum().backward()
        >>> mask.grad.shape
        torch.Size([2, 4])
    """
    layers = _by_layer(model)
    factors = _factors(mask, layers)
    replacements = {} if replacement is None else _replacements(replacement, layers)
    missing = [site for site in factors if replacement is not None and site not in replacements]
    if missing:
        raise ValueError(f"mask names the {missing[0].kind}, but replacement does not.")

    def prepare(view: ModelView) -> None:
        for layer in layers:
            if layer.site in factors:
                view.edit_outputs(layer, partial(_mix, layer, factors[layer.site], replacements.get(layer.site)))

    with prepared_views(model, prepare):
        yield


@torch.no_grad()
def head_outputs(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Outputs of all heads within one batch, before the output projection.

    The model runs in evaluation mode.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows, also one that is pruned.
        batch (`dict`): Arguments of its forward pass.

    Returns:
        `dict[str, torch.Tensor]`: for each kind of site (`encoder`, `decoder`, `cross`) a tensor of shape
        `(layers, batch, length, heads, head_dim)`: NaN for heads that are removed. Of a layer that is run several
        times (ALBERT), those of the last time.

    Raises:
        ValueError: if the model gives no outputs for this batch.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
        >>> head_outputs(model, {"input_ids": torch.tensor([[5, 7, 8]])})["decoder"].shape
        torch.Size([2, 1, 3, 4, 4])
    """
    layers, found = _by_layer(model), {}
    view = evaluation_view(model)
    for layer in layers:
        view.edit_outputs(layer, partial(_keep, found, layer.site))
    view.root(**on_device(batch, model))
    return _stacked(model, layers, found)


@torch.no_grad()
def mean_head_outputs(
    model: PreTrainedModel, data: Iterable[Mapping[str, Any]] | Mapping[str, Any], progress: bool = False
) -> dict[str, torch.Tensor]:
    """Outputs of all heads, averaged over the tokens of a corpus: what [`masked_heads`] replaces by in mean ablation.

    The model runs in evaluation mode. Neither padding nor how sentences are batched matter.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` knows, also one that is pruned.
        data (iterable of `dict`): Batches, as the model takes them; or a single one.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        `dict[str, torch.Tensor]`: for each kind of site a tensor of shape `(layers, heads, head_dim)`; NaN for heads
        that are removed.

    Raises:
        ValueError: if there is no batch, or a mask does not fit.
    """
    layers = _by_layer(model)
    sums: dict[HeadSite, torch.Tensor] = {}
    counts: dict[HeadSite, int] = {}
    batch: Mapping[str, Any] = {}

    def add(layer: HeadLayer, outputs: torch.Tensor) -> None:
        real = real_tokens(model, layer.site.kind, batch, outputs.shape[:2], outputs.device)
        # Of many tokens: in double precision, so that their order does not matter.
        sums[layer.site] = sums.get(layer.site, 0) + outputs[real].double().sum(0)
        counts[layer.site] = counts.get(layer.site, 0) + int(real.sum())

    view = evaluation_view(model)
    for layer in layers:
        view.edit_outputs(layer, partial(add, layer))
    for _, batch in batches_of(data, model, "mean of head outputs", progress):
        view.root(**batch)
    means = {site: (total / max(counts[site], 1)).to(model.dtype) for site, total in sums.items()}
    return _stacked(model, layers, means)


def _mix(layer: HeadLayer, factor: torch.Tensor, replacement: torch.Tensor | None, z: torch.Tensor) -> torch.Tensor:
    factor = factor.to(z)
    if factor.dim() == 2:
        factor = _for_each_sequence(layer, "mask", factor, z)[:, None]
    masked = z * factor[..., None]
    if replacement is None:
        return masked
    if replacement.dim() == 4:
        if replacement.shape[1] not in (1, z.shape[1]):
            way_out = "; in generate(), where most steps have one token, give (layers, heads, head_dim)"
            raise ValueError(
                f"replacement is for {replacement.shape[1]} tokens, but the outputs of {layer.site} are of "
                f"{z.shape[1]}{way_out if generates() else ''}."
            )
        if len(replacement) > 1:
            replacement = _for_each_sequence(layer, "replacement", replacement, z)
    return masked + (1 - factor[..., None]) * replacement.to(z)


def _for_each_sequence(layer: HeadLayer, name: str, values: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What is given for each example, for each sequence: `generate()` has several of an example side by side."""
    times, rest = divmod(len(z), len(values)) if len(values) else (0, 1)
    if z.dim() != 4 or rest or (times != 1 and not generates()):
        raise ValueError(f"{name} is of {len(values)} examples, but the outputs of {layer.site} are of {len(z)}.")
    return values.repeat_interleave(times, 0) if times > 1 else values


def _keep(found: dict[HeadSite, torch.Tensor], site: HeadSite, z: torch.Tensor) -> None:
    found[site] = z


def _by_layer(model: PreTrainedModel) -> list[HeadLayer]:
    layers = locate_heads(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention heads.")
    return sorted(layers, key=lambda layer: layer.site.layer)


def _factors(mask: HeadNumbers | Iterable[tuple], layers: list[HeadLayer]) -> dict[HeadSite, torch.Tensor]:
    """m of the heads that are left, `(heads,)` or `(batch, heads)`, of each layer that has any."""
    sites = {layer.site: layer.num_heads for layer in layers}
    if not (torch.is_tensor(mask) or isinstance(mask, Mapping)):
        return _left_out(heads_by_site(mask, sites, "mask"), layers)
    factors = {}
    for kind, value in _by_kind(mask, layers, "mask").items():
        if isinstance(value, Mapping):
            factors |= _left_out(heads_by_site({kind: value}, sites, "mask"), layers)
        else:
            table = torch.as_tensor(value)
            own = [layer for layer in layers if layer.site.kind == kind]
            shape = (len(own), own[0].num_heads)
            if table.dim() not in (2, 3) or table.shape[-2:] != shape:
                raise ValueError(
                    f"mask of the {kind} must have the shape (layers, heads) = {shape}, or (batch, layers, heads), "
                    f"got {tuple(table.shape)}."
                )
            factors |= {layer.site: table[..., place, layer.heads] for place, layer in enumerate(own)}
    return factors


def _left_out(heads: Mapping[HeadSite, list[int]], layers: list[HeadLayer]) -> dict[HeadSite, torch.Tensor]:
    """m of layers of which some heads are left out."""
    return {
        layer.site: torch.tensor([float(head not in heads[layer.site]) for head in layer.heads])
        for layer in layers
        if layer.site in heads
    }


def _replacements(replacement: HeadNumbers, layers: list[HeadLayer]) -> dict[HeadSite, torch.Tensor]:
    """r of the heads that are left, `(heads, head_dim)` or `(batch, length, heads, head_dim)`, of each layer."""
    found = {}
    for kind, table in _by_kind(replacement, layers, "replacement").items():
        own = [layer for layer in layers if layer.site.kind == kind]
        shape = (len(own), own[0].num_heads, own[0].head_dim)
        if not torch.is_tensor(table) or table.dim() not in (3, 5) or (len(table), *table.shape[-2:]) != shape:
            got = tuple(table.shape) if torch.is_tensor(table) else repr(table)
            raise ValueError(
                f"replacement of the {kind} must have the shape (layers, heads, head_dim) = {shape}, or (layers, "
                f"batch, length, heads, head_dim), got {got}."
            )
        found |= {layer.site: table[place][..., layer.heads, :] for place, layer in enumerate(own)}
    return found


def _by_kind(value: HeadNumbers, layers: list[HeadLayer], name: str) -> dict[str, Any]:
    kinds = kinds_of({layer.site: layer for layer in layers})
    if torch.is_tensor(value):
        if len(kinds) > 1:
            raise ValueError(f"{name} must name the sites, {{{', '.join(map(repr, kinds))}: …}}, got a tensor.")
        return {kinds[0]: value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary or a tensor, got {value!r}.")
    return by_kind(value, kinds, name)


def _stacked(
    model: PreTrainedModel, layers: list[HeadLayer], found: dict[HeadSite, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`(layers, …, heads, head_dim)` of each kind, of the heads that are left."""
    if not found:
        raise ValueError(f"{type(model).__name__} has run no attention head.")
    tables = {}
    for kind in kinds_of(found):
        own = [layer for layer in layers if layer.site.kind == kind]
        some = next(outputs for site, outputs in found.items() if site.kind == kind)
        table = some.new_full((len(own), *some.shape[:-2], own[0].num_heads, own[0].head_dim), torch.nan)
        for place, layer in enumerate(own):
            if layer.site in found:
                table[place][..., layer.heads, :] = found[layer.site].to(table.device)
        tables[kind] = table
    return tables
