# Licensed under the Apache License, Version 2.0.
"""Attention modules of each architecture: their projections and their heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from .head_sites import HeadSite
from .pruned_attention import (
    HeadlessAttention,
    HeadlessT5Attention,
    PrunedAttention,
    SharedBiasMPNetAttention,
    SharedBiasT5Attention,
)


@dataclass(frozen=True)
class HeadRoles:
    """Names of the attributes of an attention module, by their role.

    Args:
        queries (`tuple[str, ...]`): Projections whose outputs are the concatenated query heads, or several such blocks
            (a fused query, key and value projection). Missing ones are skipped.
        keys (`tuple[str, ...]`): Projections whose outputs are the concatenated key or value heads.
        output (`str`): The projection whose inputs are the concatenated outputs of the heads.
        output_of_parent (`bool`): Whether `output` is an attribute of the parent module.
        head_dim (`str`): The attribute with the size of a head.
        interleaved (`int`): Number of consecutive vectors of each head in the outputs of `queries[0]`: 3 if query, key
            and value of a head precede those of the next head.
        vectors (`tuple[str, ...]`): Parameters of the module that concatenate vectors of the query heads, such as
            separate biases or scores of sinks.
        dropout, norm (`str`): Dropout after the output projection (a module or its probability), and layer norm after
            the residual connection, if the attention module applies them.
        with_heads (`type[PrunedAttention]`, *optional*): Class of a module from which some heads were removed.
        without_heads (`type[HeadlessAttention]`): Class of a module from which all heads were removed.
        biased (`bool`): Whether something is added to the products of queries and keys, such as relative positions,
            which guidance does not support.
        by_interface (`bool`): Whether the module calls the function in `ALL_ATTENTION_FUNCTIONS` that its
            configuration names. Otherwise gates act on the inputs of the output projection.
    """

    queries: tuple[str, ...] = ("q_proj",)
    keys: tuple[str, ...] = ("k_proj", "v_proj")
    output: str = "o_proj"
    output_of_parent: bool = False
    head_dim: str = "head_dim"
    interleaved: int = 1
    vectors: tuple[str, ...] = ()
    dropout: str = ""
    norm: str = ""
    with_heads: type[PrunedAttention] | None = None
    without_heads: type[HeadlessAttention] = HeadlessAttention
    biased: bool = False
    by_interface: bool = True

    @property
    def score_projections(self) -> tuple[str, ...]:
        """Names of the projections to queries and keys."""
        return (*self.queries, *self.keys[:1])


Roles = TypeVar("Roles")

# Roles that users registered, by class.
_REGISTERED: dict[type[nn.Module], HeadRoles] = {}

_LLAMA = HeadRoles()
_BART = HeadRoles(output="out_proj")
_BERT = HeadRoles(("query",), ("key", "value"), "output.dense", output_of_parent=True, head_dim="attention_head_size")
_T5 = HeadRoles(
    ("q",),
    ("k", "v"),
    "o",
    head_dim="key_value_proj_dim",
    with_heads=SharedBiasT5Attention,
    without_heads=HeadlessT5Attention,
    biased=True,
)

# By class name; ambiguous names are prefixed with the name of their package.
ATTENTION_ROLES: dict[str, HeadRoles] = {
    "AlbertAttention": HeadRoles(
        ("query",),
        ("key", "value"),
        "dense",
        head_dim="attention_head_size",
        dropout="output_dropout",
        norm="LayerNorm",
    ),
    "BartAttention": _BART,
    "BertCrossAttention": _BERT,
    "BertSelfAttention": _BERT,
    "CLIPAttention": _BART,
    "CamembertCrossAttention": _BERT,
    "CamembertSelfAttention": _BERT,
    "Data2VecTextCrossAttention": _BERT,
    "Data2VecTextSelfAttention": _BERT,
    "DeiTAttention": _LLAMA,
    "deberta.DisentangledSelfAttention": HeadRoles(
        ("in_proj", "pos_proj", "pos_q_proj"),
        (),
        "output.dense",
        output_of_parent=True,
        head_dim="attention_head_size",
        interleaved=3,
        vectors=("q_bias", "v_bias"),
        biased=True,
        by_interface=False,
    ),
    "deberta_v2.DisentangledSelfAttention": HeadRoles(
        ("query_proj", "pos_query_proj", "pos_key_proj"),
        ("key_proj", "value_proj"),
        "output.dense",
        output_of_parent=True,
        head_dim="attention_head_size",
        biased=True,
        by_interface=False,
    ),
    "DistilBertSelfAttention": HeadRoles(("q_lin",), ("k_lin", "v_lin"), "out_lin", head_dim="attention_head_size"),
    "ElectraCrossAttention": _BERT,
    "ElectraSelfAttention": _BERT,
    "GPT2Attention": HeadRoles(("c_attn", "q_attn"), (), "c_proj", dropout="resid_dropout"),
    "GPTNeoXAttention": HeadRoles(("query_key_value",), (), "dense", head_dim="head_size", interleaved=3),
    "Gemma2Attention": _LLAMA,
    "Gemma3Attention": _LLAMA,
    "GemmaAttention": _LLAMA,
    "GptOssAttention": HeadRoles(vectors=("sinks",)),
    "GraniteAttention": _LLAMA,
    "LlamaAttention": _LLAMA,
    "M2M100Attention": _BART,
    "MBartAttention": _BART,
    "MPNetSelfAttention": HeadRoles(
        ("q",),
        ("k", "v"),
        "o",
        head_dim="attention_head_size",
        with_heads=SharedBiasMPNetAttention,
        biased=True,
        by_interface=False,
    ),
    "MT5Attention": _T5,
    "MarianAttention": _BART,
    "MistralAttention": _LLAMA,
    "MixtralAttention": _LLAMA,
    "ModernBertAttention": HeadRoles(("Wqkv",), (), "Wo", dropout="out_drop"),
    "OPTAttention": _BART,
    "PegasusAttention": _BART,
    "PhiAttention": HeadRoles(output="dense"),
    "Qwen2Attention": _LLAMA,
    "Qwen2MoeAttention": _LLAMA,
    "Qwen3Attention": _LLAMA,
    "Qwen3MoeAttention": _LLAMA,
    "RobertaCrossAttention": _BERT,
    "RobertaSelfAttention": _BERT,
    "SiglipAttention": _BART,
    "SmolLM3Attention": _LLAMA,
    "Starcoder2Attention": HeadRoles(dropout="residual_dropout"),
    "T5Attention": _T5,
    "ViTAttention": _LLAMA,
    "WhisperAttention": _BART,
    "XLMRobertaCrossAttention": _BERT,
    "XLMRobertaSelfAttention": _BERT,
}

# Names of cross-attention modules in their layers.
_CROSS_ATTENTIONS = {"crossattention", "encoder_attn", "EncDecAttention"}
# Attention pooling after the last layer, whose heads are not pruned.
POOLING = {"SiglipMultiheadAttentionPoolingHead"}


def register_attention(attention_class: type[nn.Module], roles: HeadRoles) -> None:
    """Registers an attention class, so that its heads can be found, ranked and removed.

    Models must have its modules in a list of layers. Its forward pass must take `hidden_states` first, return a tuple
    whose first element is the output of `output` (with `output_of_parent`, its input), and infer the number of heads
    from shapes, or from an attribute `num_heads`, `num_attention_heads` or `n_heads`. Modules without heads get the
    class `HeadRoles.without_heads`.

    Args:
        attention_class (`type[nn.Module]`): The class; derived classes with the same forward pass are included.
        roles ([`HeadRoles`]): Names of its projections.

    Raises:
        ValueError: if `attention_class` is not a module class, or is a supported class of Transformers; or `roles` is
            not a [`HeadRoles`].

    Example:
        >>> from torch import nn
        >>> class FusedAttention(nn.Module):
        ...     def __init__(self, width=8, head_dim=2):
        ...         super().__init__()
        ...         self.head_dim, self.qkv, self.out = head_dim, nn.Linear(width, 3 * width), nn.Linear(width, width)
        >>> register_attention(FusedAttention, HeadRoles(queries=("qkv",), keys=(), output="out"))
        >>> [layer.heads for layer in locate_heads(nn.ModuleDict({"layers": nn.ModuleList([FusedAttention()])}))]
        [[0, 1, 2, 3]]
    """
    if not (isinstance(attention_class, type) and issubclass(attention_class, nn.Module)):
        raise ValueError(f"attention_class must be a class of modules, got {attention_class!r}.")
    if not isinstance(roles, HeadRoles):
        raise ValueError(f"roles must be HeadRoles(…), got {roles!r}.")
    if built_in_roles(attention_class):
        raise ValueError(
            f"attention_class {attention_class.__qualname__} is already supported; register a derived class with its "
            "own forward pass."
        )
    _REGISTERED[attention_class] = roles


def built_in_roles(cls: type) -> HeadRoles | None:
    """Roles of an attention class of Transformers; `None` for other classes."""
    return stock_entry(ATTENTION_ROLES, cls)


def stock_entry(table: Mapping[str, Roles], cls: type) -> Roles | None:
    """Entry of a class of Transformers in a table by class name or `package.class`; `None` for other classes."""
    library, _, path = cls.__module__.partition(".models.")
    if library != "transformers":
        return None
    return table.get(cls.__name__) or table.get(f"{path.partition('.')[0]}.{cls.__name__}")


def qualified_name(module: nn.Module) -> str:
    """Qualified class name of a module: adapter classes have the same names as the classes that they replace."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def roles_of(module: nn.Module) -> HeadRoles | None:
    """Roles of an attention module; `None` for modules of other or unknown classes."""
    for cls in type(module).__mro__:
        if roles := _REGISTERED.get(cls) or built_in_roles(cls):
            # Derived classes with another forward pass are unknown, except for those of this package.
            known = hasattr(module, "stock_attention") or type(module).forward is cls.forward
            return roles if known else None
    return None


@dataclass
class HeadLayer:
    """The heads of one attention module.

    Args:
        site (`HeadSite`): Kind and layer.
        name (`str`): Name of the module in the model.
        module (`nn.Module`): The module with the query, key and value projections.
        output (`nn.Module`): The projection whose input, of shape `(batch, length, heads * head_dim)`, is the
            concatenation of the outputs of the remaining heads.
        num_heads (`int`): Original number of heads.
        heads (`list[int]`): Remaining heads, in the original numbering.
        head_dim (`int`): Size of a head.
        group_size (`int`): Number of query heads per key/value head.
        output_name (`str`): Name of `output` in the model.
    """

    site: HeadSite
    name: str
    module: nn.Module
    output: nn.Module
    num_heads: int
    heads: list[int]
    head_dim: int
    group_size: int
    output_name: str = ""

    def groups(self) -> list[list[int]]:
        """Remaining heads, grouped by the key/value head that they share."""
        return [self.heads[start : start + self.group_size] for start in range(0, len(self.heads), self.group_size)]


def locate_heads(model: nn.Module) -> list[HeadLayer]:
    """Finds the attention modules of a Transformers model and their heads.

    Layers are numbered from 0 within the encoder and the decoder. If several layers share one module, as in ALBERT,
    its heads are listed once, and layers count distinct modules: most ALBERT models have layer 0 only. Submodules
    named in `model.untouched_parts` are skipped.

    Args:
        model (`PreTrainedModel`): A model of an architecture in [`ATTENTION_ROLES`]; heads may have been removed.

    Returns:
        `list[HeadLayer]`: in the order of `model.modules()`.

    Raises:
        ValueError: if `model` is not a module, or contains an unknown attention class, which the message names.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        ... )
        >>> [(str(layer.site), layer.heads, layer.head_dim) for layer in locate_heads(BertModel(config))]
        [('encoder layer 0', [0, 1, 2, 3], 4), ('encoder layer 1', [0, 1, 2, 3], 4)]
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else repr(model)
        raise ValueError(f"model must be a PreTrainedModel, got {given}.")
    untouched = tuple(f"{part}." for part in getattr(model, "untouched_parts", ()))
    modules = {name: module for name, module in model.named_modules() if not f"{name}.".startswith(untouched)}
    known = {name: roles for name, module in modules.items() if (roles := roles_of(module))}
    if problem := _unknown_attention(modules, known):
        raise ValueError(
            f"{type(model).__name__} {problem}; supported attention classes are {', '.join(ATTENTION_ROLES)}; "
            "register_attention() adds others."
        )
    layers: dict[HeadSite, HeadLayer] = {}
    for name, roles in known.items():
        module = modules[name]
        site = site_of(name, modules)
        if site in layers:
            raise ValueError(
                f"{type(model).__name__}: {layers[site].name} and {name} are both {site}, so their heads are "
                "ambiguous; pass a part of the model with a single encoder and decoder."
            )
        owner = name.rpartition(".")[0] if roles.output_of_parent else name
        output_name = f"{owner}.{roles.output}" if owner else roles.output
        output = model.get_submodule(output_name)
        head_dim = getattr(module, roles.head_dim)
        present = (output.nx if hasattr(output, "nx") else output.in_features) // head_dim
        pruned = getattr(module, "pruned_heads", [])
        layers[site] = HeadLayer(
            site=site,
            name=name,
            module=module,
            output=output,
            output_name=output_name,
            num_heads=present + len(pruned),
            heads=list(getattr(module, "kept_heads", range(present))),
            head_dim=head_dim,
            group_size=getattr(module, "num_key_value_groups", 1),
        )
    return list(layers.values())


def _unknown_attention(modules: dict[str, nn.Module], known: dict[str, HeadRoles]) -> str | None:
    """Description of attention in an unknown class, neither inside nor around a known attention module, if any."""
    around = {name[:end] for name in known for end in range(len(name)) if end == 0 or name[end] == "."}
    passed = [*known, *(name for name, module in modules.items() if type(module).__name__ in POOLING)]
    strangers = [
        name
        for name, module in modules.items()
        if "Attention" in type(module).__name__
        and name not in around
        and not any(name == outer or name.startswith(f"{outer}.") for outer in passed)
    ]
    if strangers:
        # The innermost of nested modules has the projections.
        name = next(one for one in strangers if not any(other.startswith(f"{one}.") for other in strangers))
        return f"has attention of an unknown class, {type(modules[name]).__name__} (at {name})"
    return None if known else "has no attention modules"


def site_of(name: str, modules: dict[str, nn.Module]) -> HeadSite:
    """Kind and layer of an attention module, inferred from its name.

    Args:
        name (`str`): Name of the module in the model.
        modules (`dict[str, nn.Module]`): All modules of the model by name.

    Raises:
        ValueError: if the module is not in a list of layers.
    """
    return HeadSite(_kind(name, modules[name]), _layer(name, modules))


def _kind(name: str, module: nn.Module) -> str:
    if _CROSS_ATTENTIONS.intersection(name.split(".")):
        return "cross"
    return "decoder" if getattr(module, "is_causal", False) else "encoder"


def _layer(name: str, modules: dict[str, nn.Module]) -> int:
    """Layer index of an attention module, inferred from the module lists that contain it."""
    if (layer := layer_name(name, modules)) is None:
        raise ValueError(f"the attention module {name} is not in a list of layers.")
    path = layer.split(".")
    if path[-2:-1] == ["albert_layers"]:
        return int(path[-3]) * len(modules[layer.rpartition(".")[0]]) + int(path[-1])
    return int(path[-1])


def layer_name(name: str, modules: dict[str, nn.Module]) -> str | None:
    """Name of the layer that contains a module, or is it; `None` outside of lists of layers."""
    path = name.split(".")
    ends = [end for end in range(1, len(path)) if isinstance(modules[".".join(path[:end])], nn.ModuleList)]
    if not ends:
        return None
    # ALBERT has a list of groups of layers.
    inner = next((end for end in ends if path[end - 1] == "albert_layers"), ends[0])
    return ".".join(path[: inner + 1])
