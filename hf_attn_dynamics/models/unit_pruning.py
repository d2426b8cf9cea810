# Licensed under the Apache License, Version 2.0.
"""Structured pruning beyond heads: removes feed-forward units, blocks and layers."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from .added_biases import add_output_biases
from .compat import mark_initialised
from .head_pruning import apply_pruned_heads, prune_heads
from .head_roles import locate_heads
from .head_sites import HeadSite, by_kind, config_value, kinds_of
from .number_checks import is_integer
from .projections import (
    NoUnits,
    OutputBias,
    check_projection,
    check_undispatched,
    outputs_of,
    parameter_owners,
    slice_projection,
)
from .prunable_models import Model, check_prunable, make_loadable, separate_configuration
from .retained import lowest_scored
from .unit_ranges import units_by_site, units_value
from .unit_roles import UnitLayer, locate_units


BLOCKS = ("attention", "feed_forward")
RECORDS = ("pruned_heads", "pruned_units", "added_biases")  # of pruning, in a configuration


def prune_units(model: Model, units: Mapping | Iterable[tuple]) -> Model:
    """Removes feed-forward units in place; the outputs equal those with the activations of these units set to zero.

    Removes rows of the input projections (`up` and, if there is one, `gate`) and columns of the output projection
    (`down`). A block may lose all its units: it then adds the bias of the output projection. Parameters, configuration
    and checkpoints change as by [`prune_heads`]; `model.config.pruned_units` records all removed units as ranges, and
    `intermediate_size` keeps the original number.

    Args:
        model (`PreTrainedModel`): The whole model, of an architecture in `FEED_FORWARD_ROLES` or with feed-forward
            blocks registered by [`register_feed_forward`].
        units (`dict` or `list`): Units to remove, `{layer: [units]}`, where `"0-3,17"` stands for a list; by kind,
            `{"encoder": {layer: [units]}, "decoder": …}`, if the model has both; or a list of `(kind, layer, unit)`.
            Always in the original numbering; units that have already been removed are ignored. [`locate_units`] lists
            the units of a model.

    Returns:
        `PreTrainedModel`: `model`.

    Raises:
        ValueError: if a unit does not exist; if the architecture is unknown or a mixture of experts; or if weights are
            quantized, adapted, sharded, tied, not loaded or compiled. The model is then unchanged.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = prune_units(BertModel(config), {0: range(8), 1: "0-31"})
        >>> model.encoder.layer[0].output.dense.weight.shape
        torch.Size([16, 24])
        >>> model.config.pruned_units
        {0: '0-7', 1: '0-31'}
    """
    check_prunable(model)
    layers = locate_units(model)
    chosen = _present(units_by_site(units, _num_units(layers), "units"), layers)
    if not chosen:
        return model
    check_units(model, layers, chosen)
    separate_configuration(model)
    _remove(model, layers, chosen)
    make_loadable(model)
    return model


def retain_units(model: Model, keep: int | Mapping[str, int], scores: Any) -> Model:
    """Removes all feed-forward units but those with the largest scores, in place; see [`prune_units`].

    Ties are broken by kind (encoder, decoder), then by the lower layer, then by the lower unit.

    Args:
        model (`PreTrainedModel`): The model.
        keep (`int` or `dict[str, int]`): Number of units to keep, over all layers and kinds; or by kind, where other
            kinds keep all units.
        scores (array of shape `(layers, units)`, or `dict` of them by kind): A tensor, array or nested list, in the
            original numbering, such as `UnitScores.units`. Scores of removed units are ignored.

    Returns:
        `PreTrainedModel`: `model`, with exactly `keep` units.

    Raises:
        ValueError: if `keep` is not an integer from 1 to the number of units; if scores are missing, have the wrong
            shape or are NaN; or for the reasons given in [`prune_units`].
    """
    check_prunable(model)
    layers = locate_units(model)
    counts = _num_units(layers)
    single = {layer.site: [[unit] for unit in layer.units] for layer in layers}
    chosen = lowest_scored(keep, scores, single, counts, "unit")
    return prune_units(model, config_value(chosen, kinds_of(counts)) or {})


def prune_layers(
    model: Model, layers: Iterable[int] | Mapping[str, Iterable[int]], blocks: Iterable[str] = BLOCKS
) -> Model:
    """Removes the attention blocks, the feed-forward blocks, or both, of whole layers, in place.

    A removed block adds the bias of its output projection, so that outputs equal those with all its heads or units set
    to zero. Layer norms stay. Cross-attention of a decoder's layer is an attention block of this layer.

    Args:
        model (`PreTrainedModel`): The model, see [`prune_heads`] and [`prune_units`].
        layers (`list[int]` or `dict[str, list[int]]`): Layers; by kind, `{"encoder": [5], "decoder": [4, 5]}`, if the
            model has encoder and decoder.
        blocks (`list[str]`): `attention`, `feed_forward`, or both.

    Returns:
        `PreTrainedModel`: `model`.

    Raises:
        ValueError: if a layer does not exist, `blocks` is empty or has another name, or for the reasons given in
            [`prune_heads`] and [`prune_units`]. The model is then unchanged.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> model = prune_layers(BertModel(config), [1])
        >>> model.config.pruned_heads, model.config.pruned_units
        ({1: [0, 1, 2, 3]}, {1: '0-31'})
    """
    check_prunable(model)
    blocks = [blocks] if isinstance(blocks, str) else list(blocks)
    if not blocks or not set(blocks) <= set(BLOCKS):
        raise ValueError(f"blocks must be one or both of {', '.join(BLOCKS)}, got {blocks!r}.")
    heads = locate_heads(model)
    kinds = [kind for kind in kinds_of({layer.site: None for layer in heads}) if kind != "cross"]
    chosen = _layers_by_kind(layers, {layer.site for layer in heads}, kinds)
    gone_heads, gone_units = {}, {}
    if "feed_forward" in blocks:
        units = {layer.site: layer.units for layer in locate_units(model)}
        gone_units = config_value({site: own for site, own in units.items() if site in chosen}, kinds_of(units)) or {}
    if "attention" in blocks:
        gone = {layer.site: layer.heads for layer in heads if _of_layer(layer.site) in chosen}
        gone_heads = config_value(gone, kinds_of({layer.site: None for layer in heads})) or {}
    return prune_heads_and_units(model, gone_heads, gone_units)


def prune_heads_and_units(model: Model, heads: Mapping, units: Mapping) -> Model:
    """[`prune_heads`] and [`prune_units`] in one step: an error leaves the model unchanged.

    Args:
        model (`PreTrainedModel`): The model.
        heads, units (`dict`): See [`prune_heads`] and [`prune_units`]; without units, feed-forward blocks may be of
            any class.
    """
    check_prunable(model)
    if units:
        layers = locate_units(model)
        check_units(model, layers, _present(units_by_site(units, _num_units(layers), "units"), layers))
    # Heads are checked before any is removed.
    prune_heads(model, heads)
    return prune_units(model, units) if units else model


def _of_layer(site: HeadSite) -> HeadSite:
    """The site of the layer's self-attention: cross-attention is in a layer of the decoder."""
    return HeadSite("decoder", site.layer) if site.kind == "cross" else site


def _layers_by_kind(layers: Any, sites: set[HeadSite], kinds: list[str]) -> set[HeadSite]:
    if not isinstance(layers, Mapping):
        if len(kinds) > 1:
            raise ValueError(f"layers of a model with {' and '.join(kinds)} must name them, got {layers!r}.")
        layers = {kinds[0]: layers}
    chosen = set()
    for kind, numbers in by_kind(layers, kinds, "layers", "layer").items():
        if isinstance(numbers, (str, Mapping)) or not hasattr(numbers, "__iter__"):
            raise ValueError(f"layers must be a list of layers, got {numbers!r}.")
        last = max(site.layer for site in sites if site.kind == kind)
        for number in numbers:
            if not is_integer(number) or HeadSite(kind, int(number)) not in sites:
                raise ValueError(f"layers names {kind} layer {number!r}, but the layers are 0 to {last}.")
            chosen.add(HeadSite(kind, int(number)))
    return chosen


def apply_pruning(model: PreTrainedModel) -> None:
    """Removes the heads and units in `model.config` that the modules still have, and adds recorded biases.

    Model classes call it in `__init__`, on any device, so that pruned checkpoints can be loaded. Further calls have no
    effect.

    Raises:
        ValueError: for the reasons given in [`prune_heads`] and [`prune_units`].
    """
    apply_pruned_heads(model)
    if recorded := getattr(model.config, "pruned_units", None):
        layers = locate_units(model)
        named = units_by_site(recorded, _num_units(layers), "config.pruned_units", from_json=True)
        chosen = _present(named, layers)
        check_units(model, layers, chosen, meta=True)
        _remove(model, layers, chosen)
    if getattr(model.config, "added_biases", False):
        add_output_biases(model)


def is_pruned(config: Any) -> bool:
    """Whether a configuration records removed heads or units, or added biases."""
    return any(getattr(config, name, None) for name in RECORDS)


def _num_units(layers: list[UnitLayer]) -> dict[HeadSite, int]:
    return {layer.site: layer.num_units for layer in layers}


def _present(chosen: Mapping[HeadSite, list[int]], layers: list[UnitLayer]) -> dict[HeadSite, list[int]]:
    """Chosen units that have not been removed yet, by site, without empty sites."""
    present = {layer.site: sorted(set(layer.units).intersection(chosen.get(layer.site, ()))) for layer in layers}
    return {site: units for site, units in present.items() if units}


def check_units(
    model: PreTrainedModel, layers: list[UnitLayer], chosen: Container[HeadSite], meta: bool = False
) -> None:
    """Raises ValueError for weights of the chosen blocks whose units cannot be removed, before any is."""
    name, owners = type(model).__name__, parameter_owners(model)
    for layer in layers:
        if layer.site not in chosen:
            continue
        check_undispatched(model, layer)
        for own, projection in layer.inputs.items():
            check_projection(f"{name}: {own}", projection, owners, meta)
            if outputs_of(projection) % len(layer.units):
                raise ValueError(
                    f"{name}: {own} has {outputs_of(projection)} outputs, not a multiple of {len(layer.units)} units."
                )
        check_projection(f"{name}: {layer.output_name}", layer.output, owners, meta)


def _remove(model: PreTrainedModel, layers: list[UnitLayer], chosen: Mapping[HeadSite, list[int]]) -> None:
    """Removes checked units from the modules, and records all removed units in the configuration."""
    for layer in layers:
        if layer.site in chosen:
            gone = set(chosen[layer.site])
            _cut(model, layer, [index for index, unit in enumerate(layer.units) if unit not in gone])
    removed = {layer.site: getattr(layer.module, "pruned_units", []) for layer in layers}
    model.config.pruned_units = units_value(removed, kinds_of(removed))


def _cut(model: PreTrainedModel, layer: UnitLayer, indices: list[int]) -> None:
    """Removes all units of a block but those with these indices among the present ones."""
    module = layer.module
    if indices:
        for projection in layer.inputs.values():
            slice_projection(projection, indices, len(layer.units), 1)
        slice_projection(layer.output, indices, len(layer.units), 1, inputs=True)
    else:
        for name, projection in layer.inputs.items():
            model.set_submodule(name, NoUnits(projection))
        model.set_submodule(layer.output_name, OutputBias(layer.output))
        # Stock initialisation would access the projections.
        mark_initialised(module)
    if hasattr(module, "intermediate_size"):
        module.intermediate_size = len(indices)
    if getattr(module, "unit_gate", None) is not None:
        module.unit_gate.keep(indices)
    module.kept_units = [layer.units[index] for index in indices]
    gone = set(range(layer.num_units)).difference(module.kept_units)
    module.pruned_units = sorted(gone)
