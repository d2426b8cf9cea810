# Licensed under the Apache License, Version 2.0.
"""Feed-forward blocks of each architecture: their projections and their units.

A unit is one element of the intermediate dimension: a row of each input projection and a column of the output
projection, with the activation in between.
"""

from dataclasses import dataclass

from torch import nn

from .head_roles import POOLING, layer_name, locate_heads, stock_entry
from .head_sites import HeadSite
from .projections import inputs_of


@dataclass(frozen=True)
class UnitRoles:
    """Names of the projections of a feed-forward block, relative to the module that owns them.

    Args:
        inputs (`tuple[str, ...]`): Projections whose outputs are the units, or several consecutive blocks of them (a
            fused `up` and `gate` projection).
        output (`str`): The projection whose inputs are the units.
    """

    inputs: tuple[str, ...]
    output: str


# Roles that users registered, by class.
_REGISTERED: dict[type[nn.Module], UnitRoles] = {}

_BERT = UnitRoles(("intermediate.dense",), "output.dense")
_BART = UnitRoles(("fc1",), "fc2")
_GATED = UnitRoles(("gate_proj", "up_proj"), "down_proj")
_GPT2 = UnitRoles(("c_fc",), "c_proj")
_T5 = UnitRoles(("wi",), "wo")
_GATED_T5 = UnitRoles(("wi_0", "wi_1"), "wo")

# By class name; ambiguous names are prefixed with the name of their package.
FEED_FORWARD_ROLES: dict[str, UnitRoles] = {
    "AlbertLayer": UnitRoles(("ffn",), "ffn_output"),
    "BartDecoderLayer": _BART,
    "BartEncoderLayer": _BART,
    "BertLayer": _BERT,
    "CLIPMLP": _BART,
    "CamembertLayer": _BERT,
    "Data2VecTextLayer": _BERT,
    "DebertaLayer": _BERT,
    "DebertaV2Layer": _BERT,
    "DeiTMLP": _BART,
    "ElectraLayer": _BERT,
    "GPT2MLP": _GPT2,
    "GPTNeoXMLP": UnitRoles(("dense_h_to_4h",), "dense_4h_to_h"),
    "Gemma2MLP": _GATED,
    "Gemma3MLP": _GATED,
    "GemmaMLP": _GATED,
    "GraniteMLP": _GATED,
    "LlamaMLP": _GATED,
    "M2M100DecoderLayer": _BART,
    "M2M100EncoderLayer": _BART,
    "MBartDecoderLayer": _BART,
    "MBartEncoderLayer": _BART,
    "MPNetLayer": _BERT,
    "MT5DenseActDense": _T5,
    "MT5DenseGatedActDense": _GATED_T5,
    "MarianDecoderLayer": _BART,
    "MarianEncoderLayer": _BART,
    "MistralMLP": _GATED,
    "ModernBertMLP": UnitRoles(("Wi",), "Wo"),
    "OPTDecoderLayer": _BART,
    "PegasusDecoderLayer": _BART,
    "PegasusEncoderLayer": _BART,
    "PhiMLP": _BART,
    "Qwen2MLP": _GATED,
    "Qwen3MLP": _GATED,
    "RobertaLayer": _BERT,
    "SiglipMLP": _BART,
    "SmolLM3MLP": _GATED,
    "Starcoder2MLP": _GPT2,
    "T5DenseActDense": _T5,
    "T5DenseGatedActDense": _GATED_T5,
    "ViTMLP": _BART,
    "WhisperDecoderLayer": _BART,
    "WhisperEncoderLayer": _BART,
    "XLMRobertaLayer": _BERT,
    "distilbert.FFN": UnitRoles(("lin1",), "lin2"),
}

# Mixtures of experts, whose experts have the units.
MIXTURES = {"GptOssMLP", "MixtralSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"}


def register_feed_forward(block_class: type[nn.Module], roles: UnitRoles) -> None:
    """Registers the class of a feed-forward block, so that its units can be found, ranked and removed.

    Blocks must be in the layers of a model whose attention is known, see [`register_attention`], one in each layer,
    and infer the number of units from shapes.

    Args:
        block_class (`type[nn.Module]`): The class of the module that owns the projections; derived classes with the
            same forward pass are included.
        roles ([`UnitRoles`]): Names of the projections.

    Raises:
        ValueError: if `block_class` is not a module class, or is a supported class of Transformers; or `roles` is not
            a [`UnitRoles`].
    """
    if not (isinstance(block_class, type) and issubclass(block_class, nn.Module)):
        raise ValueError(f"block_class must be a class of modules, got {block_class!r}.")
    if not isinstance(roles, UnitRoles):
        raise ValueError(f"roles must be UnitRoles(…), got {roles!r}.")
    if stock_entry(FEED_FORWARD_ROLES, block_class):
        raise ValueError(
            f"block_class {block_class.__qualname__} is already supported; register a derived class with its own "
            "forward pass."
        )
    _REGISTERED[block_class] = roles


def unit_roles_of(module: nn.Module) -> UnitRoles | None:
    """Roles of a feed-forward block; `None` for modules of other or unknown classes."""
    for cls in type(module).__mro__:
        if roles := _REGISTERED.get(cls) or stock_entry(FEED_FORWARD_ROLES, cls):
            return roles if type(module).forward is cls.forward else None
    return None


@dataclass
class UnitLayer:
    """The units of one feed-forward block.

    Args:
        site (`HeadSite`): `encoder` or `decoder`, and the layer.
        name (`str`): Name of the module in the model.
        module (`nn.Module`): The module that owns the projections.
        inputs (`dict[str, nn.Module]`): Input projections, by their names in the model.
        output (`nn.Module`): The projection whose inputs are the activations of the remaining units.
        output_name (`str`): Its name in the model.
        num_units (`int`): Original number of units.
        units (`list[int]`): Remaining units, in the original numbering.
    """

    site: HeadSite
    name: str
    module: nn.Module
    inputs: dict[str, nn.Module]
    output: nn.Module
    output_name: str
    num_units: int
    units: list[int]


def locate_units(model: nn.Module) -> list[UnitLayer]:
    """Finds the feed-forward blocks of a Transformers model and their units.

    Layers are numbered as by [`locate_heads`]. If several layers share one block, as in ALBERT, its units are listed
    once.

    Args:
        model (`PreTrainedModel`): A model of an architecture in [`FEED_FORWARD_ROLES`]; units may have been removed.

    Returns:
        `list[UnitLayer]`: in the order of `model.modules()`.

    Raises:
        ValueError: if `model` is not a module, or a layer has a mixture of experts or a feed-forward block of an
            unknown class, which the message names.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> [(str(layer.site), len(layer.units)) for layer in locate_units(BertModel(config))]
        [('encoder layer 0', 32), ('encoder layer 1', 32)]
    """
    layers_of_heads = [layer for layer in locate_heads(model) if layer.site.kind != "cross"]
    modules = dict(model.named_modules())
    sites = {layer_name(layer.name, modules): layer.site for layer in layers_of_heads}
    poolers = tuple(f"{name}." for name, module in modules.items() if type(module).__name__ in POOLING)
    layers: dict[HeadSite, UnitLayer] = {}
    for name, module in modules.items():
        site = sites.get(layer_name(name, modules))
        if site is None or f"{name}.".startswith(poolers):
            continue
        if type(module).__name__ in MIXTURES:
            raise ValueError(
                f"{type(model).__name__} has a mixture of experts, {type(module).__name__} (at {name}), whose units "
                "cannot be pruned; its heads can."
            )
        if (roles := unit_roles_of(module)) is None:
            continue
        if site in layers:
            raise ValueError(
                f"{type(model).__name__}: {layers[site].name} and {name} are both feed-forward blocks of {site}, so "
                "their units are ambiguous."
            )
        layers[site] = _unit_layer(model, site, name, module, roles)
    for name, site in sites.items():
        if site not in layers:
            raise ValueError(
                f"{type(model).__name__}: {name}, a {type(modules[name]).__name__}, has no "
                "feed-forward block of a known class; register_feed_forward() adds others."
            )
    return list(layers.values())


def prunable_units(model: nn.Module) -> list[UnitLayer]:
    """The feed-forward blocks of a model; none if their units cannot be pruned, for a reason that [`locate_units`]
    raises, as in mixtures of experts."""
    try:
        return locate_units(model)
    except ValueError:
        return []


def _unit_layer(model: nn.Module, site: HeadSite, name: str, module: nn.Module, roles: UnitRoles) -> UnitLayer:
    prefix = f"{name}." if name else ""
    output = module.get_submodule(roles.output)
    present = inputs_of(output)
    return UnitLayer(
        site=site,
        name=name,
        module=module,
        inputs={f"{prefix}{own}": module.get_submodule(own) for own in roles.inputs},
        output=output,
        output_name=f"{prefix}{roles.output}",
        num_units=present + len(getattr(module, "pruned_units", ())),
        units=list(getattr(module, "kept_units", range(present))),
    )
