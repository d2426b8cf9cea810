# Licensed under the Apache License, Version 2.0.
"""Removing attention heads for good, from any model of an architecture in `ATTENTION_ROLES`."""

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

Model = TypeVar("Model", bound=PreTrainedModel)  # what is changed in place keeps its class

# Attributes of attention modules that hold a number of heads, or of their features.
_COUNTS = ("num_attention_heads", "num_heads", "n_heads")
_WIDTHS = ("all_head_size", "inner_dim", "split_size")
# Modules that headwise models add to attention, with a value for each head.
_OF_HEADS = ("gate", "hard_coded")


def prune_heads(model: Model, heads: Mapping | Iterable[tuple]) -> Model:
    """Removes attention heads for good, in place: the model then computes what it would with their outputs at zero.

    Rows of the query, key and value projections and columns of the output projection are cut out, with all else that
    belongs to a head. A layer may lose all its heads: its attention then adds the bias of the output projection. What
    is cut becomes a new parameter, with the precision, device and `requires_grad` of the old one, and the output
    projection of a layer without heads a new module: build the optimizer, and register hooks, afterwards.
    `model.config.pruned_heads` records all heads that are gone; the other entries keep their values, since they
    describe the model as it was built. `model.config` becomes a copy, since other models may have been built from it;
    but that of a stock body (`BertModel`, `model.bert`) is also that of the model around it, which has to know, and
    stays the same object. A headwise body that is part of another model does get a copy, so hand it on:
    `model.config.encoder = model.encoder.config` in an `EncoderDecoderModel`.

    A saved model of a class with a headwise twin, `BertForMaskedLM` for instance, comes back as that twin through
    `AutoModelForMaskedLM.from_pretrained` wherever this package is imported: its `model.config` becomes a headwise
    configuration. All others come back through [`load_pruned`].

    Args:
        model (`PreTrainedModel`): The model, of an architecture in `ATTENTION_ROLES` or of attention that
            [`register_attention`] made known. The whole one of an encoder–decoder, and where it has parts with
            configurations of their own, such as an image encoder (`encoder`) and a language model (`decoder`): it is
            the one that records what is gone.
        heads (`dict` or `list`): Heads to remove, `{layer: [heads]}`; by kind, `{"encoder": {layer: [heads]}, …}`,
            where a model has several of `encoder`, `decoder` and `cross`; or one by one, `(kind, layer, head, …)`, as
            the last of `HeadScores.ranked`. Always in the original numbering: calling this several times adds up,
            and heads that are gone already are passed over. [`locate_heads`] lists what there is.

    Returns:
        `PreTrainedModel`: `model`.

    Raises:
        ValueError: if a head does not exist, or shares its key and value with one that stays; if the
            architecture is not known; or if the weights cannot be cut, being quantized, adapted, sharded, tied, not
            loaded or part of a compiled graph. The message says which, and nothing has been changed.

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
            f"Auto classes do not know of heads removed from {type(model).__name__}: once it is saved, by itself and "
            "not as part of another model, bring it back with hf_attn_dynamics.load_pruned(path)."
        )
    return model


def retain_heads(model: Model, keep: int | Mapping[str, int], scores: Any) -> Model:
    """Removes all heads but those with the largest scores, in place; see [`prune_heads`].

    Where query heads share a key/value head, whole groups stay or go, by the sum of their scores. Of heads with equal
    scores those of the lower layer, then of the lower number, stay first; encoder, decoder, cross in this order.

    Args:
        model (`PreTrainedModel`): The model, of an architecture in `ATTENTION_ROLES`.
        keep (`int` or `dict[str, int]`): How many heads to keep, over all layers and kinds; or of each kind that is
            named, other kinds keeping all.
        scores (array of shape `(layers, heads)`, or `dict` of them by kind): A tensor, array or nested list, in the
            original numbering; by kind where the model has several. Scores of heads that are gone do not matter.

    Returns:
        `PreTrainedModel`: `model`, with exactly `keep` heads.

    Raises:
        ValueError: if `keep` is not an integer from 1 to the number of heads, or no multiple of the group size; if
            scores are missing, of another shape, or NaN for a head; or for any reason that [`prune_heads`] has.

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
        raise ValueError(f"keep must say how many heads to keep, got {keep!r}.")
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
                f"keep{where} must be an integer from 1 to the {present} heads there are, got {budget!r}."
            )
        if budget % size:
            raise ValueError(
                f"keep{where} must be a multiple of {size}, since so many query heads share a key/value head, got "
                f"{budget}."
            )
        # Sorting is stable: the first of equals stay.
        for _, layer, group in sorted(candidates, key=lambda candidate: candidate[0])[int(budget) // size :]:
            chosen.setdefault(layer.site, []).extend(group)
    return prune_heads(model, config_value(chosen, kinds) or {})


def apply_pruned_heads(model: PreTrainedModel) -> None:
    """Removes the heads that `model.config.pruned_heads` names and the modules still have.

    For classes that call it while they are built, before weights are loaded, be it on the meta device: checkpoints
    with heads removed then fit. Layers may be strings, as JSON has them. Called again, it does nothing.

    Args:
        model (`PreTrainedModel`): The model, of an architecture in `ATTENTION_ROLES`.

    Raises:
        ValueError: for the reasons that [`prune_heads`] has.
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
    """Gives a model a configuration of its own, before it changes: others may have been built from the same one.

    A stock body, such as the `bert` of a `BertForMaskedLM`, does not know what is around it. It keeps the object that
    it has in common with that model, which is what is saved. A headwise body is rarely part of another model; what to
    do then, [`prune_heads`] says.
    """
    is_headwise = hasattr(model, "head_gates")
    if model.base_model is model and not is_headwise:
        return
    copies: dict[int, Any] = {}
    for attributes in map(vars, model.modules()):
        for name, value in attributes.items():
            # Attention modules of headwise models see a view of the configuration.
            if isinstance(getattr(value, "_config", value), PreTrainedConfig):
                attributes[name] = copy.deepcopy(value, copies)


def _num_heads(layers: list[HeadLayer]) -> dict[HeadSite, int]:
    return {layer.site: layer.num_heads for layer in layers}


def _present(chosen: Mapping[HeadSite, list[int]], layers: list[HeadLayer]) -> dict[HeadSite, list[int]]:
    """Those of the chosen heads that have not been removed before, of each site that has any."""
    present = {layer.site: [head for head in chosen.get(layer.site, []) if head in layer.heads] for layer in layers}
    return {site: heads for site, heads in present.items() if heads}


def _projections(layer: HeadLayer) -> Iterator[tuple[str, nn.Module, int]]:
    """Projections to queries, keys and values that a module has, by name, with the heads of each block of outputs."""
    roles = roles_of(layer.module)
    for names, heads in ((roles.queries, len(layer.heads)), (roles.keys, len(layer.heads) // layer.group_size)):
        for name in names:
            if hasattr(layer.module, name):
                yield name, getattr(layer.module, name), heads


def _check_model(model: Any) -> None:
    """Refuses what is not a plain model, before anything else is looked at."""
    if is_compiled_model(model):
        raise ValueError("model is compiled: remove heads from model._orig_mod, then compile it again.")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a PreTrainedModel, got {type(model).__name__}; of a wrapper pass the model in it "
            "(model.module of parallel training, model.merge_and_unload() of adapters)."
        )
    name = type(model).__name__
    is_seq2seq = getattr(model.config, "is_encoder_decoder", False)
    if name.endswith("Stack") or (is_seq2seq and name.endswith(("Encoder", "Decoder"))):
        raise ValueError(
            f"{name} is a part of an encoder–decoder model, which is what records the heads that are gone: pass the "
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
    """Refuses heads and weights that cannot be cut, before the first is."""
    name, owners = type(model).__name__, _owners(model)
    for layer in layers:
        if layer.site not in chosen:
            continue
        for group in layer.groups():
            if 0 < len(set(group) & set(chosen[layer.site])) < len(group):
                raise ValueError(
                    f"{name}, {layer.site}: query heads {group} share one key/value head, so all or none of them "
                    f"can be removed; named are {chosen[layer.site]}."
                )
        if "forward" in vars(layer.module):
            raise ValueError(
                f"{name}: the forward pass of {layer.name} has been replaced (by accelerate's hooks, if the model is "
                "spread over devices); load the model on one device."
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
    """Refuses output projections whose weights cannot be changed in place.

    Raises:
        ValueError: if one is quantized, adapted, sharded, tied or not loaded; the message names it and the way out.
    """
    owners = _owners(model)
    for layer in layers:
        _check_projection(
            f"{type(model).__name__}: the output projection of {layer.name}", layer.output, owners, meta=False
        )


def _owners(model: PreTrainedModel) -> Counter:
    """In how many modules each parameter is, by its `id`."""
    return Counter(id(weight) for module in model.modules() for weight in _own_parameters(module).values())


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module by name, without those of modules in it and those that are computed from others."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _check_projection(name: str, projection: nn.Module, owners: Counter, meta: bool) -> None:
    if isinstance(projection, Unprojected):
        return
    if type(projection) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"{name} is a {qualified_name(projection)}, not an nn.Linear or Conv1D: merge adapters into the model, by "
            "merge_and_unload() of PEFT, and load it without quantization, before removing heads."
        )
    _check_parameter(name, _own_parameters(projection).get("weight"), owners, meta)
    if projection.bias is not None:
        _check_parameter(name, projection.bias, owners, meta)


def _check_parameter(name: str, weight: Any, owners: Counter, meta: bool) -> None:
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor or hasattr(weight, "ds_id"):
        raise ValueError(
            f"{name} is not made of plain parameters, being sharded, quantized or computed from others: undo that "
            "before removing heads."
        )
    if owners[id(weight)] > 1:
        raise ValueError(f"{name} shares its weights with another module; clone them before removing heads.")
    if weight.is_meta and not meta:
        raise ValueError(f"{name} is on the meta device: load the weights before removing heads.")


def _remove(model: PreTrainedModel, layers: list[HeadLayer], chosen: dict[HeadSite, list[int]]) -> None:
    """Cuts heads that have been checked out of the modules, and writes all that are gone into the configuration."""
    for layer in layers:
        if layer.site in chosen:
            _cut(model, layer, [place for place, head in enumerate(layer.heads) if head not in chosen[layer.site]])
    gone = {layer.site: getattr(layer.module, "pruned_heads", []) for layer in layers}
    model.config.pruned_heads = config_value(gone, kinds_of(gone))


def _renumber_alignment_heads(model: PreTrainedModel, layers: list[HeadLayer]) -> None:
    """Whisper reads time stamps off heads of cross-attention that its generation settings name by place."""
    settings = getattr(model, "generation_config", None)
    named = getattr(settings, "alignment_heads", None)
    if named is None:
        return
    cross = {layer.site.layer: layer for layer in layers if layer.site.kind == "cross"}
    kept = {number: getattr(layer.module, "kept_heads", layer.heads) for number, layer in cross.items()}
    heads = [(number, cross[number].heads[place]) for number, place in named]
    # Without any left, Whisper says that it cannot give time stamps.
    settings.alignment_heads = [[n, kept[n].index(head)] for n, head in heads if head in kept[n]] or None


def _cut(model: PreTrainedModel, layer: HeadLayer, places: list[int]) -> None:
    """Cuts an attention module down to the heads at `places` among those it has."""
    module, roles = layer.module, roles_of(layer.module)
    shared = sorted({place // layer.group_size for place in places})
    if places:
        for _, projection, heads in list(_projections(layer)):
            kept = places if heads == len(layer.heads) else shared
            # Of interleaved heads, each has its part of the outputs; others have one in each block.
            width = layer.head_dim if roles.interleaved == 1 else _outputs(projection) // heads
            _slice(projection, kept, heads, width)
        for name in roles.vectors:
            vector = getattr(module, name)
            setattr(module, name, _selected(vector, 0, _features(places, len(vector) // len(layer.heads))))
        _slice(layer.output, places, len(layer.heads), layer.head_dim, inputs=True)
        # Encoders have no cache.
        behaviour = roles.with_heads or (None if layer.site.kind == "encoder" else PrunedAttention)
        if behaviour is not None:
            specialise(module, behaviour)
    else:
        _empty(model, layer, roles)
    for name in _COUNTS:
        if hasattr(module, name):
            setattr(module, name, len(places))
    for name in _WIDTHS:
        if hasattr(module, name):
            setattr(module, name, len(places) * layer.head_dim)
    for name in _OF_HEADS:
        if getattr(module, name, None) is not None:
            getattr(module, name).keep(places)
    module.kept_heads = [layer.heads[place] for place in places]
    module.pruned_heads = [head for head in range(layer.num_heads) if head not in module.kept_heads]


def _empty(model: PreTrainedModel, layer: HeadLayer, roles: HeadRoles) -> None:
    """Leaves of an attention module what it does without heads."""
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
    # Initialisation by class would look for the projections.
    mark_initialised(module)


def _slice(projection: nn.Module, places: list[int], heads: int, head_dim: int, inputs: bool = False) -> None:
    """Keeps the heads at `places` in each block of `heads` of the outputs, or inputs, of a projection."""
    if isinstance(projection, Unprojected):
        projection.out_features = len(places) * head_dim
        return
    transposed = isinstance(projection, Conv1D)
    axis = int(inputs != transposed)
    starts = range(0, projection.weight.shape[axis], heads * head_dim)
    index = [start + feature for start in starts for feature in _features(places, head_dim)]
    projection.weight = _selected(projection.weight, axis, index)
    if projection.bias is not None and not inputs:
        projection.bias = _selected(projection.bias, 0, index)
    size = {(True, True): "nx", (True, False): "nf", (False, True): "in_features", (False, False): "out_features"}
    setattr(projection, size[transposed, inputs], len(index))


def _outputs(projection: nn.Module) -> int:
    return projection.nf if isinstance(projection, Conv1D) else projection.out_features


def _features(places: list[int], width: int) -> list[int]:
    """Positions of the heads at `places`, each of which has so many numbers."""
    return [place * width + feature for place in places for feature in range(width)]


def _selected(weight: nn.Parameter, axis: int, index: list[int]) -> nn.Parameter:
    chosen = weight.detach().index_select(axis, torch.tensor(index, device=weight.device))
    return nn.Parameter(chosen, requires_grad=weight.requires_grad)


def _scores_by_site(
    scores: Any, layers: list[HeadLayer], kinds: list[str], needed: list[str]
) -> dict[HeadSite, list[float]]:
    """Scores of every head of the kinds that are needed, checked for those that are present."""
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
                    raise ValueError(f"scores must not be NaN, but that of {layer.site}, head {head} is.")
            found[layer.site] = row
    return found


def take_twin_configuration(model: PreTrainedModel) -> bool:
    """Turns the configuration of a stock model into that of its headwise twin, under whose name it is then saved.

    Args:
        model (`PreTrainedModel`): A model some of whose heads were removed.

    Returns:
        `bool`: whether Auto classes will find the saved model: whether it has a twin, or is one.
    """
    config = model.config
    if config.model_type.startswith("headwise-"):
        return True
    stock = all(type(one).__module__.startswith("transformers.models.") for one in (model, config))
    if not stock or twin_class(type(model).__name__) is None:
        return False
    take_class(config, twin_class(type(config).__name__))
    return True
