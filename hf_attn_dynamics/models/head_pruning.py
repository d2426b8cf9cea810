# Licensed under the Apache License, Version 2.0.
"""Structured pruning: removes attention heads from any model of an architecture in `ATTENTION_ROLES`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .compat import mark_initialised
from .head_roles import HeadLayer, HeadRoles, locate_heads, roles_of
from .head_sites import HeadSite, config_value, heads_by_site, kinds_of
from .projections import (
    OutputBias,
    check_parameter,
    check_projection,
    check_undispatched,
    features_of,
    outputs_of,
    parameter_owners,
    selected,
    slice_projection,
)
from .prunable_models import Model, check_prunable, make_loadable, separate_configuration
from .pruned_attention import PrunedAttention, specialise
from .retained import lowest_scored


# Attributes of attention modules that hold the number of heads, or their total size.
_COUNTS = ("num_attention_heads", "num_heads", "n_heads")
_WIDTHS = ("all_head_size", "inner_dim", "split_size")
# Modules that headwise models add to attention, with one value per head.
_HEAD_MODULES = ("gate", "hard_coded")


def prune_heads(model: Model, heads: Mapping | Iterable[tuple]) -> Model:
    """Removes attention heads in place; the outputs equal those with the outputs of these heads set to zero.

    Removes rows of the query, key and value projections, columns of the output projection, and all other parameters of
    the heads. A layer may lose all its heads: its attention then adds the bias of the output projection. Each pruned
    weight becomes a new parameter with the dtype, device and `requires_grad` of the old one, and the output projection
    of a layer without heads becomes a new module: create the optimizer and register hooks afterwards.
    `model.config.pruned_heads` records all removed heads; the other entries keep the original sizes. `model.config`
    is replaced by a copy, since other models may share it, except in a stock body (`BertModel`, `model.bert`), which
    shares it with the model around it. A headwise body inside another model gets a copy, too; assign it there:
    `model.config.encoder = model.encoder.config` in an `EncoderDecoderModel`.

    If the class has a headwise counterpart, as `BertForMaskedLM` has, `model.config` becomes a headwise configuration,
    and `AutoModelForMaskedLM.from_pretrained` loads the saved model as that class wherever this package is imported.
    Load all others with [`load_pruned`].

    Args:
        model (`PreTrainedModel`): The model, of an architecture in `ATTENTION_ROLES` or with attention registered by
            [`register_attention`]. Pass the whole model, whose configuration records removed heads: of an
            encoder–decoder, or of an image encoder (`encoder`) and language model (`decoder`).
        heads (`dict` or `list`): Heads to remove, `{layer: [heads]}`; by kind, `{"encoder": {layer: [heads]}, …}`,
            if the model has several of `encoder`, `decoder` and `cross`; or a list of `(kind, layer, head, …)`, such
            as the tail of `HeadScores.ranked`. Always in the original numbering; heads that have already been removed
            are ignored. [`locate_heads`] lists the heads of a model.

    Returns:
        `PreTrainedModel`: `model`.

    Raises:
        ValueError: if a head does not exist, or shares its key/value head with a remaining one; if the architecture is
            unknown; or if weights are quantized, adapted, sharded, tied, not loaded or compiled. The model is then
            unchanged.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = prune_heads(BertModel(config), {0: [0, 2], 1: [0, 1, 2, 3]})
        >>> model.encoder.layer[0].attention.self.query.weight.shape
        torch.Size([8, 16])
        >>> model.config.pruned_heads
        {0: [0, 2], 1: [0, 1, 2, 3]}
    """
    check_prunable(model)
    layers = locate_heads(model)
    chosen = heads_by_site(heads, _num_heads(layers), "heads")
    chosen = _present(chosen, layers)
    if not chosen:
        return model
    _check_layers(model, layers, chosen)
    separate_configuration(model)
    aligned = _alignment_heads(model, layers)
    _remove(model, layers, chosen)
    _renumber_alignment_heads(model, layers, aligned)
    make_loadable(model)
    return model


def retain_heads(model: Model, keep: int | Mapping[str, int], scores: Any) -> Model:
    """Removes all heads but those with the largest scores, in place; see [`prune_heads`].

    Groups of query heads that share a key/value head are kept or removed together, by the sum of their scores. Ties
    are broken by kind (encoder, decoder, cross), then by the lower layer, then by the lower head index.

    Args:
        model (`PreTrainedModel`): The model, of an architecture in `ATTENTION_ROLES`.
        keep (`int` or `dict[str, int]`): Number of heads to keep, over all layers and kinds; or by kind, where other
            kinds keep all heads.
        scores (array of shape `(layers, heads)`, or `dict` of them by kind): A tensor, array or nested list, in the
            original numbering; by kind if the model has several. Scores of removed heads are ignored.

    Returns:
        `PreTrainedModel`: `model`, with exactly `keep` heads.

    Raises:
        ValueError: if `keep` is not an integer from 1 to the number of heads, or not a multiple of the group size; if
            scores are missing, have the wrong shape or are NaN; or for the reasons given in [`prune_heads`].

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = retain_heads(BertModel(config), 3, [[0.1, 0.9, 0.3, 0.2], [0.5, 0.4, 0.1, 0.0]])
        >>> [layer.heads for layer in locate_heads(model)]
        [[1], [0, 1]]
    """
    check_prunable(model)
    layers = locate_heads(model)
    counts = _num_heads(layers)
    chosen = lowest_scored(keep, scores, {layer.site: layer.groups() for layer in layers}, counts, "head")
    return prune_heads(model, config_value(chosen, kinds_of(counts)) or {})


def apply_pruned_heads(model: PreTrainedModel) -> None:
    """Removes the heads in `model.config.pruned_heads` that the modules still have.

    Model classes call it in `__init__`, on any device, so that checkpoints with removed heads can be loaded. Layers
    may be strings, as in JSON. Further calls have no effect.

    Args:
        model (`PreTrainedModel`): The model, of an architecture in `ATTENTION_ROLES`.

    Raises:
        ValueError: for the reasons given in [`prune_heads`].
    """
    recorded = getattr(model.config, "pruned_heads", None)
    if not recorded:
        return
    layers = locate_heads(model)
    named = heads_by_site(recorded, _num_heads(layers), "config.pruned_heads", from_json=True)
    chosen = _present(named, layers)
    _check_layers(model, layers, chosen, meta=True)
    _remove(model, layers, chosen)


def _num_heads(layers: list[HeadLayer]) -> dict[HeadSite, int]:
    return {layer.site: layer.num_heads for layer in layers}


def _present(chosen: Mapping[HeadSite, list[int]], layers: list[HeadLayer]) -> dict[HeadSite, list[int]]:
    """Chosen heads that have not been removed yet, by site, without empty sites."""
    present = {layer.site: [head for head in chosen.get(layer.site, []) if head in layer.heads] for layer in layers}
    return {site: heads for site, heads in present.items() if heads}


def _projections(layer: HeadLayer) -> Iterator[tuple[str, nn.Module, int]]:
    """Names and modules of the query, key and value projections, with the number of heads of each block of outputs."""
    roles = roles_of(layer.module)
    for names, heads in ((roles.queries, len(layer.heads)), (roles.keys, len(layer.heads) // layer.group_size)):
        for name in names:
            if hasattr(layer.module, name):
                yield name, getattr(layer.module, name), heads


def _check_layers(
    model: PreTrainedModel, layers: list[HeadLayer], chosen: dict[HeadSite, list[int]], meta: bool = False
) -> None:
    """Raises ValueError for heads and weights that cannot be removed, before any is."""
    name, owners = type(model).__name__, parameter_owners(model)
    for layer in layers:
        if layer.site not in chosen:
            continue
        for group in layer.groups():
            if 0 < len(set(group) & set(chosen[layer.site])) < len(group):
                raise ValueError(
                    f"{name}, {layer.site}: query heads {group} share one key/value head, so all or none of them "
                    f"can be removed, got {chosen[layer.site]}."
                )
        check_undispatched(model, layer)
        inputs = list(_projections(layer))
        for projection_name, projection, heads in inputs:
            check_projection(f"{name}: {layer.name}.{projection_name}", projection, owners, meta)
            features = outputs_of(projection)
            if features % (heads * layer.head_dim):
                raise ValueError(
                    f"{name}: {layer.name}.{projection_name} has {features} outputs, not a multiple of {heads} heads "
                    f"of size {layer.head_dim}."
                )
        for vector in roles_of(layer.module).vectors:
            check_parameter(f"{name}: {layer.name}.{vector}", getattr(layer.module, vector), owners, meta)
        check_projection(f"{name}: the output projection of {layer.name}", layer.output, owners, meta)


def _remove(model: PreTrainedModel, layers: list[HeadLayer], chosen: dict[HeadSite, list[int]]) -> None:
    """Removes checked heads from the modules, and records all removed heads in the configuration."""
    for layer in layers:
        if layer.site in chosen:
            _cut(model, layer, [index for index, head in enumerate(layer.heads) if head not in chosen[layer.site]])
    removed = {layer.site: getattr(layer.module, "pruned_heads", []) for layer in layers}
    model.config.pruned_heads = config_value(removed, kinds_of(removed))


def _alignment_heads(model: PreTrainedModel, layers: list[HeadLayer]) -> list[tuple[int, int]]:
    """Layers and heads, in the original numbering, that Whisper's `alignment_heads` names by indices."""
    heads = {layer.site.layer: layer.heads for layer in layers if layer.site.kind == "cross"}
    named = getattr(getattr(model, "generation_config", None), "alignment_heads", None) or []
    # Those of another size of Whisper may name layers that the model does not have.
    return [(number, heads[number][index]) for number, index in named if index < len(heads.get(number, ()))]


def _renumber_alignment_heads(model: PreTrainedModel, layers: list[HeadLayer], aligned: list[tuple[int, int]]) -> None:
    """Renumbers Whisper's `alignment_heads`, the indices of cross-attention heads that predict timestamps."""
    if not aligned:
        return
    kept = {
        layer.site.layer: getattr(layer.module, "kept_heads", layer.heads)
        for layer in layers
        if layer.site.kind == "cross"
    }
    # With None, Whisper raises an error about timestamps.
    heads = [[number, kept[number].index(head)] for number, head in aligned if head in kept[number]]
    model.generation_config.alignment_heads = heads or None


def _cut(model: PreTrainedModel, layer: HeadLayer, indices: list[int]) -> None:
    """Removes all heads of an attention module but those with these indices among the present ones."""
    module, roles = layer.module, roles_of(layer.module)
    shared = sorted({index // layer.group_size for index in indices})
    if indices:
        for _, projection, heads in list(_projections(layer)):
            kept = indices if heads == len(layer.heads) else shared
            # The outputs of an interleaved head are contiguous; others have one part in each block.
            width = layer.head_dim if roles.interleaved == 1 else outputs_of(projection) // heads
            slice_projection(projection, kept, heads, width)
        for name in roles.vectors:
            vector = getattr(module, name)
            setattr(module, name, selected(vector, 0, features_of(indices, len(vector) // len(layer.heads))))
        slice_projection(layer.output, indices, len(layer.heads), layer.head_dim, inputs=True)
        # Encoders have no cache.
        behaviour = roles.with_heads or (None if layer.site.kind == "encoder" else PrunedAttention)
        if behaviour is not None:
            specialise(module, behaviour)
    else:
        _empty(model, layer, roles)
    for name in _COUNTS:
        if hasattr(module, name):
            setattr(module, name, len(indices))
    for name in _WIDTHS:
        if hasattr(module, name):
            setattr(module, name, len(indices) * layer.head_dim)
    for name in _HEAD_MODULES:
        if getattr(module, name, None) is not None:
            getattr(module, name).keep(indices)
    module.kept_heads = [layer.heads[index] for index in indices]
    module.pruned_heads = [head for head in range(layer.num_heads) if head not in module.kept_heads]


def _empty(model: PreTrainedModel, layer: HeadLayer, roles: HeadRoles) -> None:
    """Removes all heads of an attention module, with their parameters."""
    module = layer.module
    for name, child in list(module.named_children()):
        stays = child is layer.output or name in (roles.norm, "relative_attention_bias", "gate")
        if not stays and next(child.parameters(), None) is not None:
            delattr(module, name)
    for name in roles.vectors:
        delattr(module, name)
    model.set_submodule(layer.output_name, OutputBias(layer.output))
    specialise(module, roles.without_heads)
    module.empty_output = None if roles.output_of_parent else roles.output
    module.after_output = (roles.dropout, roles.norm)
    module.cached_dim = layer.head_dim
    # Stock initialisation would access the projections.
    mark_initialised(module)
