# Licensed under the Apache License, Version 2.0.
"""Structured pruning: removes attention heads from any model of an architecture in `ATTENTION_ROLES`."""

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from .compat import is_compiled_in_place, is_compiled_model, mark_initialised
from .hard_coded_attention import Unprojected
from .head_roles import HeadLayer, HeadRoles, locate_heads, qualified_name, roles_of
from .head_sites import HeadSite, by_kind, config_value, heads_by_site, kinds_of
from .headwise_classes import twin_class
from .in_place import take_class
from .number_checks import is_integer
from .pruned_attention import OutputBias, PrunedAttention, specialise


logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=PreTrainedModel)  # functions that change a model in place return the same class

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
    _check_model(model)
    layers = locate_heads(model)
    chosen = heads_by_site(heads, _num_heads(layers), "heads")
    chosen = _present(chosen, layers)
    if not chosen:
        return model
    _check_layers(model, layers, chosen)
    separate_configuration(model)
    _remove(model, layers, chosen)
    _renumber_alignment_heads(model, layers)
    if not take_twin_configuration(model):
        logger.warning_once(
            f"Auto classes cannot load {type(model).__name__} with removed heads: save it by itself, not as part of "
            "another model, and load it with hf_attn_dynamics.load_pruned(path)."
        )
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
    _check_model(model)
    layers = locate_heads(model)
    kinds = kinds_of(_num_heads(layers))
    layers.sort(key=lambda layer: (kinds.index(layer.site.kind), layer.site.layer))
    budgets = by_kind(keep, kinds, "keep") if isinstance(keep, Mapping) else {None: keep}
    if not budgets:
        raise ValueError(f"keep must be a number of heads, or a non-empty dictionary by kind, got {keep!r}.")
    scored = kinds if None in budgets else list(budgets)
    scores = _scores_by_site(scores, layers, kinds, scored)
    chosen: dict[HeadSite, list[int]] = {}
    for kind, budget in budgets.items():
        candidates = [
            (-sum(float(scores[layer.site][head]) for head in group), layer, group)
            for layer in layers
            if kind in (None, layer.site.kind)
            for group in layer.groups()
        ]
        size = max(len(group) for _, _, group in candidates) if candidates else 1
        present = sum(len(group) for _, _, group in candidates)
        where = "" if kind is None else f" ({kind})"
        if not is_integer(budget) or not 1 <= budget <= present:
            raise ValueError(
                f"keep{where} must be an integer from 1 to the number of heads, {present}, got {budget!r}."
            )
        if budget % size:
            raise ValueError(
                f"keep{where} must be a multiple of {size}, the number of query heads per key/value head, got "
                f"{budget}."
            )
        # Sorting is stable: the first of equal candidates are kept.
        for _, layer, group in sorted(candidates, key=lambda candidate: candidate[0])[int(budget) // size :]:
            chosen.setdefault(layer.site, []).extend(group)
    return prune_heads(model, config_value(chosen, kinds) or {})


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


def separate_configuration(model: PreTrainedModel) -> None:
    """Copies the configuration of a model before it is changed, since other models may share it.

    A stock body, such as the `bert` of a `BertForMaskedLM`, keeps its configuration: it shares the object with the
    model around it, which is saved. See [`prune_heads`] for a headwise body inside another model.
    """
    is_headwise = hasattr(model, "head_gates")
    if model.base_model is model and not is_headwise:
        return
    copies: dict[int, Any] = {}
    for attributes in map(vars, model.modules()):
        for name, value in attributes.items():
            # Attention modules of headwise models have a view of the configuration.
            if isinstance(getattr(value, "_config", value), PreTrainedConfig):
                attributes[name] = copy.deepcopy(value, copies)


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


def _check_model(model: Any) -> None:
    """Raises ValueError for compiled, wrapped or partial models."""
    if is_compiled_model(model):
        raise ValueError("model is compiled: remove heads from model._orig_mod, then compile it again.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a PreTrainedModel, got {type(model).__name__}; unwrap it first "
            "(model.module of parallel training, model.merge_and_unload() of adapters)."
        )
    name = type(model).__name__
    is_seq2seq = getattr(model.config, "is_encoder_decoder", False)
    if name.endswith("Stack") or (is_seq2seq and name.endswith(("Encoder", "Decoder"))):
        raise ValueError(
            f"{name} is a part of an encoder–decoder model, whose configuration records removed heads: pass the "
            "whole model, and name the site, as in {'encoder': {0: [1, 2]}}."
        )
    for name, module in model.named_modules():
        where = name or type(model).__name__
        if is_compiled_in_place(module):
            raise ValueError(f"{where} is compiled: remove heads first, then call compile().")
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            raise ValueError(f"{where} is wrapped in {type(module).__name__}: remove heads first, then wrap it.")


def _check_layers(
    model: PreTrainedModel, layers: list[HeadLayer], chosen: dict[HeadSite, list[int]], meta: bool = False
) -> None:
    """Raises ValueError for heads and weights that cannot be removed, before any is."""
    name, owners = type(model).__name__, _owners(model)
    for layer in layers:
        if layer.site not in chosen:
            continue
        for group in layer.groups():
            if 0 < len(set(group) & set(chosen[layer.site])) < len(group):
                raise ValueError(
                    f"{name}, {layer.site}: query heads {group} share one key/value head, so all or none of them "
                    f"can be removed, got {chosen[layer.site]}."
                )
        if "forward" in vars(layer.module):
            raise ValueError(
                f"{name}: the forward pass of {layer.name} has been replaced (by accelerate's hooks, if device_map "
                "dispatched the model); load the model on one device."
            )
        inputs = list(_projections(layer))
        for projection_name, projection, heads in inputs:
            _check_projection(f"{name}: {layer.name}.{projection_name}", projection, owners, meta)
            features = _outputs(projection)
            if features % (heads * layer.head_dim):
                raise ValueError(
                    f"{name}: {layer.name}.{projection_name} has {features} outputs, not a multiple of {heads} heads "
                    f"of size {layer.head_dim}."
                )
        for vector in roles_of(layer.module).vectors:
            _check_parameter(f"{name}: {layer.name}.{vector}", getattr(layer.module, vector), owners, meta)
        _check_projection(f"{name}: the output projection of {layer.name}", layer.output, owners, meta)


def check_output_projections(model: PreTrainedModel, layers: Iterable[HeadLayer]) -> None:
    """Raises ValueError for output projections that are quantized, adapted, sharded, tied or not loaded."""
    owners = _owners(model)
    for layer in layers:
        _check_projection(
            f"{type(model).__name__}: the output projection of {layer.name}", layer.output, owners, meta=False
        )


def _owners(model: PreTrainedModel) -> Counter:
    """Number of modules that own each parameter, by its `id`."""
    return Counter(id(weight) for module in model.modules() for weight in _own_parameters(module).values())


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module by name, without submodules and parametrizations."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _check_projection(name: str, projection: nn.Module, owners: Counter, meta: bool) -> None:
    if isinstance(projection, Unprojected):
        return
    if type(projection) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"{name} is a {qualified_name(projection)}, not an nn.Linear or Conv1D: merge adapters with PEFT's "
            "merge_and_unload(), and load the model without quantization, before removing heads."
        )
    _check_parameter(name, _own_parameters(projection).get("weight"), owners, meta)
    if projection.bias is not None:
        _check_parameter(name, projection.bias, owners, meta)


def _check_parameter(name: str, weight: Any, owners: Counter, meta: bool) -> None:
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor or hasattr(weight, "ds_id"):
        raise ValueError(f"{name} is sharded, quantized or parametrized: undo that before removing heads.")
    if owners[id(weight)] > 1:
        raise ValueError(f"{name} shares its weights with another module; clone them before removing heads.")
    if weight.is_meta and not meta:
        raise ValueError(f"{name} is on the meta device: load the weights before removing heads.")


def _remove(model: PreTrainedModel, layers: list[HeadLayer], chosen: dict[HeadSite, list[int]]) -> None:
    """Removes checked heads from the modules, and records all removed heads in the configuration."""
    for layer in layers:
        if layer.site in chosen:
            _cut(model, layer, [index for index, head in enumerate(layer.heads) if head not in chosen[layer.site]])
    removed = {layer.site: getattr(layer.module, "pruned_heads", []) for layer in layers}
    model.config.pruned_heads = config_value(removed, kinds_of(removed))


def _renumber_alignment_heads(model: PreTrainedModel, layers: list[HeadLayer]) -> None:
    """Renumbers Whisper's `alignment_heads`, the indices of cross-attention heads that predict timestamps."""
    settings = getattr(model, "generation_config", None)
    named = getattr(settings, "alignment_heads", None)
    if named is None:
        return
    cross = {layer.site.layer: layer for layer in layers if layer.site.kind == "cross"}
    kept = {number: getattr(layer.module, "kept_heads", layer.heads) for number, layer in cross.items()}
    heads = [(number, cross[number].heads[index]) for number, index in named]
    # With None, Whisper raises an error about timestamps.
    settings.alignment_heads = [[n, kept[n].index(head)] for n, head in heads if head in kept[n]] or None


def _cut(model: PreTrainedModel, layer: HeadLayer, indices: list[int]) -> None:
    """Removes all heads of an attention module but those with these indices among the present ones."""
    module, roles = layer.module, roles_of(layer.module)
    shared = sorted({index // layer.group_size for index in indices})
    if indices:
        for _, projection, heads in list(_projections(layer)):
            kept = indices if heads == len(layer.heads) else shared
            # The outputs of an interleaved head are contiguous; others have one part in each block.
            width = layer.head_dim if roles.interleaved == 1 else _outputs(projection) // heads
            _slice(projection, kept, heads, width)
        for name in roles.vectors:
            vector = getattr(module, name)
            setattr(module, name, _selected(vector, 0, _features(indices, len(vector) // len(layer.heads))))
        _slice(layer.output, indices, len(layer.heads), layer.head_dim, inputs=True)
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


def _slice(projection: nn.Module, indices: list[int], heads: int, head_dim: int, inputs: bool = False) -> None:
    """Keeps the heads with these indices in each block of `heads` heads of a projection's outputs or inputs."""
    if isinstance(projection, Unprojected):
        projection.out_features = len(indices) * head_dim
        return
    transposed = isinstance(projection, Conv1D)
    axis = int(inputs != transposed)
    starts = range(0, projection.weight.shape[axis], heads * head_dim)
    index = [start + feature for start in starts for feature in _features(indices, head_dim)]
    projection.weight = _selected(projection.weight, axis, index)
    if projection.bias is not None and not inputs:
        projection.bias = _selected(projection.bias, 0, index)
    size = {(True, True): "nx", (True, False): "nf", (False, True): "in_features", (False, False): "out_features"}
    setattr(projection, size[transposed, inputs], len(index))


def _outputs(projection: nn.Module) -> int:
    return projection.nf if isinstance(projection, Conv1D) else projection.out_features


def _features(indices: list[int], width: int) -> list[int]:
    """Indices of the features of some heads of size `width`."""
    return [index * width + feature for index in indices for feature in range(width)]


def _selected(weight: nn.Parameter, axis: int, index: list[int]) -> nn.Parameter:
    chosen = weight.detach().index_select(axis, torch.tensor(index, device=weight.device))
    return nn.Parameter(chosen, requires_grad=weight.requires_grad)


def _scores_by_site(
    scores: Any, layers: list[HeadLayer], kinds: list[str], needed: list[str]
) -> dict[HeadSite, list[float]]:
    """Scores of the heads of the needed kinds, checked for present heads."""
    if not isinstance(scores, Mapping):
        if len(kinds) > 1:
            raise ValueError(
                f"scores must be a dictionary with the keys {', '.join(kinds)}, got {type(scores).__name__}."
            )
        scores = {kinds[0]: scores}
    given = by_kind(scores, kinds, "scores")
    found = {}
    for kind in needed:
        if kind not in given:
            raise ValueError(f"scores of the heads of {kind} are missing.")
        own = [layer for layer in layers if layer.site.kind == kind]
        shape = (len(own), own[0].num_heads)
        try:
            table = torch.as_tensor(given[kind], dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"scores of {kind} must be numbers of shape {shape}: {error}") from error
        if tuple(table.shape) != shape:
            raise ValueError(f"scores of {kind} must have shape (layers, heads) {shape}, got {tuple(table.shape)}.")
        for layer, row in zip(own, table.tolist()):
            for head in layer.heads:
                if math.isnan(row[head]):
                    raise ValueError(f"scores must not be NaN, but the score of {layer.site}, head {head} is.")
            found[layer.site] = row
    return found


def take_twin_configuration(model: PreTrainedModel) -> bool:
    """Converts the configuration of a stock model to its headwise counterpart, under whose `model_type` it is saved.

    Args:
        model (`PreTrainedModel`): A model with removed heads.

    Returns:
        `bool`: whether Auto classes can load the saved model: whether it has a headwise counterpart, or is headwise.
    """
    config = model.config
    if config.model_type.startswith("headwise-"):
        return True
    stock = all(type(one).__module__.startswith("transformers.models.") for one in (model, config))
    if not stock or twin_class(type(model).__name__) is None:
        return False
    take_class(config, twin_class(type(config).__name__))
    return True
