# Licensed under the Apache License, Version 2.0.
"""Outputs of single heads: reading, averaging, masking and replacing them.

    with masked_heads(model, {0: [1, 2]}):
        model(**batch)                      # the outputs of heads 1 and 2 of layer 0 are zero

The output of a head is its part of the input of the output projection, `z_h = Σ_j α_hj v_j` of size `head_dim`, which
exists under every attention kernel.
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
from .chosen_queries import ChosenQueries, Positions


HeadNumbers = Mapping[str, Any] | Mapping[int, Any] | torch.Tensor


@contextmanager
def masked_heads(
    model: PreTrainedModel,
    mask: HeadNumbers | Iterable[tuple],
    replacement: HeadNumbers | None = None,
    *,
    positions: Positions | Mapping[str, Positions] | None = None,
    steps: Iterable[int] | None = None,
) -> Iterator[None]:
    """Context in which the output z of each head is replaced by `m · z + (1 − m) · r`, in the current thread.

    Use it for zero ablation, for mean ablation with [`mean_head_outputs`], or for activation patching with
    [`head_outputs`] of another batch. It works under any attention kernel, in training, in `generate()`, and for
    single query heads of grouped-query attention; contexts can be nested. Gradients reach the mask, the replacement
    and the weights. The model itself is not changed: other threads and copies of it are not affected. Compiled models
    run uncompiled.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` supports, including pruned models.
        mask (`dict`, `list` or `torch.Tensor`): The heads to mask, as for [`prune_heads`]: `{layer: [heads]}`, or a
            list such as `HeadScores.ranked()`. Or the factor m of each head (1 keeps a head, 0 masks it), of shape
            `(layers, heads)`, or `(batch, layers, heads)` with factors for each example; in `generate()`, these apply
            to all beams and returned sequences of the example. Models with several kinds of sites need a dictionary,
            `{"encoder": …}`; the heads of other kinds are kept.
        replacement (`dict` or `torch.Tensor`, *optional*): r; 0 by default. Of shape `(layers, heads, head_dim)`, or
            `(layers, batch, length, heads, head_dim)`, where a batch or length of 1 broadcasts; by kind of site like
            the mask.
        positions (`list[int]`, `torch.BoolTensor` or `dict`, *optional*): The tokens whose outputs are replaced, all
            by default: their indices in the sequence, padding included, or a mask of shape `(length,)` or `(batch,
            length)`; by kind of site like the mask. In `generate()`, indices count from the beginning of the prompt,
            and tokens beyond a mask are left as they are.
        steps (`list[int]`, *optional*): The steps of `generate()` in which outputs are replaced, all by default. Step
            0 reads the prompt and predicts the first new token, step 1 reads this token, and so on. Not for encoders,
            which run once.

    Raises:
        ValueError: if the mask or the replacement names heads that the model does not have, or has another shape;
            `positions` or `steps` are no indices, or of sites that the mask does not name; and in the forward pass, if
            the batch size or the length differs, or the step of `generate()` is not known.

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
    chosen = _chosen_queries(positions, steps, layers, factors)

    def prepare(view: ModelView) -> None:
        if chosen is not None:
            chosen.follow(view, model)
        for layer in layers:
            if layer.site in factors:
                of_layer = layer, factors[layer.site], replacements.get(layer.site), chosen
                view.edit_outputs(layer, partial(_mix, *of_layer))

    with prepared_views(model, prepare):
        yield


@torch.no_grad()
def head_outputs(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Outputs of all heads for one batch, before the output projection, in evaluation mode.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` supports, including pruned models.
        batch (`dict`): Arguments of the forward pass.

    Returns:
        `dict[str, torch.Tensor]`: a tensor of shape `(layers, batch, length, heads, head_dim)` for each kind of site
        (`encoder`, `decoder`, `cross`); NaN for removed heads. If a module runs several times (ALBERT), the outputs of
        its last call.

    Raises:
        ValueError: if no attention head runs.

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
    """Mean outputs of all heads over the tokens of a corpus, for mean ablation with [`masked_heads`].

    The model runs in evaluation mode. The means depend neither on padding nor on batching.

    Args:
        model (`PreTrainedModel`): Any model that `locate_heads` supports, including pruned models.
        data (iterable of `dict`): Batches, or a single batch: arguments of the forward pass.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        `dict[str, torch.Tensor]`: a tensor of shape `(layers, heads, head_dim)` for each kind of site; NaN for removed
        heads.

    Raises:
        ValueError: if there is no batch, or a padding mask has another shape.
    """
    layers = _by_layer(model)
    sums: dict[HeadSite, torch.Tensor] = {}
    counts: dict[HeadSite, int] = {}
    batch: Mapping[str, Any] = {}

    def add(layer: HeadLayer, outputs: torch.Tensor) -> None:
        real = real_tokens(model, layer.site.kind, batch, outputs.shape[:2], outputs.device)
        # Sums of many tokens in double precision, so that their order does not matter.
        sums[layer.site] = sums.get(layer.site, 0) + outputs[real].double().sum(0)
        counts[layer.site] = counts.get(layer.site, 0) + int(real.sum())

    view = evaluation_view(model)
    for layer in layers:
        view.edit_outputs(layer, partial(add, layer))
    for _, batch in batches_of(data, model, "mean of head outputs", progress):
        view.root(**batch)
    means = {site: (total / max(counts[site], 1)).to(model.dtype) for site, total in sums.items()}
    return _stacked(model, layers, means)


def _chosen_queries(
    positions: Positions | Mapping[str, Positions] | None,
    steps: Iterable[int] | None,
    layers: list[HeadLayer],
    factors: Mapping[HeadSite, torch.Tensor],
) -> ChosenQueries | None:
    if positions is None and steps is None:
        return None
    kinds = kinds_of(factors)
    if steps is not None and "encoder" in kinds:
        raise ValueError("steps are those of a decoder in generate(), but the mask names the encoder; mask it apart.")
    if positions is not None and not isinstance(positions, Mapping):
        every = kinds_of({layer.site: layer for layer in layers})
        if len(every) > 1:
            raise ValueError(f"positions must name the sites, {{{', '.join(map(repr, every))}: …}}.")
        positions = dict.fromkeys(every, positions)
    for kind in positions or ():
        if kind not in kinds:
            raise ValueError(f"positions name the {kind}, but mask does not.")
    return ChosenQueries(positions, steps)


def _mix(
    layer: HeadLayer,
    factor: torch.Tensor,
    replacement: torch.Tensor | None,
    chosen: ChosenQueries | None,
    z: torch.Tensor,
) -> torch.Tensor:
    factor = factor.to(z)
    if factor.dim() == 2:
        factor = _for_each_sequence(layer, "mask", factor, z)[:, None]
    if chosen is not None and (queries := chosen.mask(layer, z, _for_each_sequence)) is not None:
        factor = torch.where(queries[..., None], factor, 1)
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
    """Repeats values of examples for their sequences: beams and returned sequences in `generate()`."""
    times, rest = divmod(len(z), len(values)) if len(values) else (0, 1)
    if z.dim() != 4 or rest or (times != 1 and not generates()):
        raise ValueError(f"{name} is for {len(values)} examples, but the outputs of {layer.site} are of {len(z)}.")
    return values.repeat_interleave(times, 0) if times > 1 else values


def _keep(found: dict[HeadSite, torch.Tensor], site: HeadSite, z: torch.Tensor) -> None:
    found[site] = z


def _by_layer(model: PreTrainedModel) -> list[HeadLayer]:
    layers = locate_heads(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention heads.")
    return sorted(layers, key=lambda layer: layer.site.layer)


def _factors(mask: HeadNumbers | Iterable[tuple], layers: list[HeadLayer]) -> dict[HeadSite, torch.Tensor]:
    """m of the remaining heads, `(heads,)` or `(batch, heads)`, of each layer that the mask names."""
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
            factors |= {layer.site: table[..., index, layer.heads] for index, layer in enumerate(own)}
    return factors


def _left_out(heads: Mapping[HeadSite, list[int]], layers: list[HeadLayer]) -> dict[HeadSite, torch.Tensor]:
    """m of layers some of whose heads are masked."""
    return {
        layer.site: torch.tensor([float(head not in heads[layer.site]) for head in layer.heads])
        for layer in layers
        if layer.site in heads
    }


def _replacements(replacement: HeadNumbers, layers: list[HeadLayer]) -> dict[HeadSite, torch.Tensor]:
    """r of the remaining heads, `(heads, head_dim)` or `(batch, length, heads, head_dim)`, of each layer."""
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
        found |= {layer.site: table[index][..., layer.heads, :] for index, layer in enumerate(own)}
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
    """Arranges values of the remaining heads as tensors `(layers, …, heads, head_dim)` by kind of site."""
    if not found:
        raise ValueError(f"{type(model).__name__} has run no attention head.")
    tables = {}
    for kind in kinds_of(found):
        own = [layer for layer in layers if layer.site.kind == kind]
        some = next(outputs for site, outputs in found.items() if site.kind == kind)
        table = some.new_full((len(own), *some.shape[:-2], own[0].num_heads, own[0].head_dim), torch.nan)
        for index, layer in enumerate(own):
            if layer.site in found:
                table[index][..., layer.heads, :] = found[layer.site].to(table.device)
        tables[kind] = table
    return tables
