# Licensed under the Apache License, Version 2.0.
"""Where each architecture keeps its attention heads."""

from dataclasses import dataclass

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
    """Which attributes of an attention module play which role.

    Args:
        queries (`tuple[str, ...]`): Projections whose outputs are the concatenated heads, or several such blocks side
            by side (query, key and value in one). Those that a module does not have are passed over.
        keys (`tuple[str, ...]`): Projections with one block per key/value head; fewer than query heads where several
            query heads share one.
        output (`str`): The projection whose inputs are the concatenated outputs of the heads.
        output_of_parent (`bool`): Whether `output` is an attribute of the parent module.
        head_dim (`str`): The attribute with the size of a head.
        interleaved (`int`): How many vectors each head has side by side in the outputs of the first of `queries`: 3
            where they are its query, key and value, one head after the other.
        vectors (`tuple[str, ...]`): Parameters of the module itself that hold as many numbers for each query head, one
            head after the other: biases that no projection has, scores of sinks.
        dropout, norm (`str`): Dropout after the output projection, a module or its probability, and layer norm of the
            residual connection, where the attention module applies them itself.
        with_heads (`type[PrunedAttention]`, *optional*): Behaviour of a module that has lost some heads.
        without_heads (`type[HeadlessAttention]`): Behaviour of a module that has lost all.
        biased (`bool`): Whether scores are more than products of queries and keys, such as with relative positions;
            guidance does not know of that.
        by_interface (`bool`): Whether attention is computed by the function that `ALL_ATTENTION_FUNCTIONS` has for the
            name in the configuration. Otherwise gates act on the inputs of the output projection.
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


# Those of users, by class.
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

# By the name of the class, after that of its package where several have the same.
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

# Names under which layers hold the attention to the encoder.
_CROSS_ATTENTIONS = {"crossattention", "encoder_attn", "EncDecAttention"}
# Attention by one learnt query after all layers: it has the heads of no layer, and keeps them.
_POOLING = {"SiglipMultiheadAttentionPoolingHead"}


def register_attention(attention_class: type[nn.Module], roles: HeadRoles) -> None:
    """Makes the heads of an attention class known, so that they can be found, ranked and removed.

    Models need the class in lists of layers. Its forward pass takes `hidden_states` first, returns a tuple whose first
    element is what `output` gives (with `output_of_parent`, what it is given), and reads the number of heads off
    shapes, or off its attribute `num_heads`, `num_attention_heads` or `n_heads`; one without heads is replaced, see
    `HeadRoles.without_heads`.

    Args:
        attention_class (`type[nn.Module]`): The class, and those derived from it that keep its forward pass.
        roles ([`HeadRoles`]): Where its projections are.

    Raises:
        ValueError: if `attention_class` is no module, or is known already from Transformers; or `roles` are none.

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
            f"attention_class {attention_class.__qualname__} is known already; register a class derived from it, with "
            "a forward pass of its own."
        )
    _REGISTERED[attention_class] = roles


def built_in_roles(cls: type) -> HeadRoles | None:
    """Roles of an attention class of Transformers; `None` if it is none, or not one that is known."""
    library, _, path = cls.__module__.partition(".models.")
    if library != "transformers":
        return None
    return ATTENTION_ROLES.get(cls.__name__) or ATTENTION_ROLES.get(f"{path.partition('.')[0]}.{cls.__name__}")


def qualified_name(module: nn.Module) -> str:
    """Name of the class of a module, with where it comes from: adapters call theirs as those that they replace."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def roles_of(module: nn.Module) -> HeadRoles | None:
    """Roles of an attention module; `None` if it is none, or not one that is known."""
    for cls in type(module).__mro__:
        if roles := _REGISTERED.get(cls) or built_in_roles(cls):
            # A class with a forward pass of its own may do anything, but for those that stand in for stock ones.
            known = hasattr(module, "stock_attention") or type(module).forward is cls.forward
            return roles if known else None
    return None


@dataclass
class HeadLayer:
    """The heads of one attention module.

    Args:
        site (`HeadSite`): Kind and layer.
        name (`str`): Name of the module in the model.
        module (`nn.Module`): The module that holds the projections to queries, keys and values.
        output (`nn.Module`): The projection whose input, of shape `(batch, length, heads * head_dim)`, is the
            concatenation of the outputs of the heads that are left.
        num_heads (`int`): Number of heads that the model was built with.
        heads (`list[int]`): Heads that are left, in the original numbering.
        head_dim (`int`): Size of a head.
        group_size (`int`): Number of query heads that share one key/value head; 1 if none do.
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
        """Heads that are left, query heads that share a key and a value together."""
        return [self.heads[start : start + self.group_size] for start in range(0, len(self.heads), self.group_size)]


def locate_heads(model: nn.Module) -> list[HeadLayer]:
    """Attention modules of a Transformers model, with the heads that each has.

    Layers count from 0 within the encoder and the decoder. Where one module serves several layers, as in ALBERT, its
    heads are listed once: layers then count the distinct modules, and most ALBERT models have layer 0 only. Parts that
    a model names in `untouched_parts` are passed over.

    Args:
        model (`PreTrainedModel`): A model of an architecture in [`ATTENTION_ROLES`]; heads may have been removed.

    Returns:
        `list[HeadLayer]`: in the order in which the model holds them.

    Raises:
        ValueError: if the model is none, or has attention of a class that is not known; the message names both.

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
            f"{type(model).__name__} {problem}; the attention classes whose heads can be found are "
            f"{', '.join(ATTENTION_ROLES)}; register_attention() adds others."
        )
    layers: dict[HeadSite, HeadLayer] = {}
    for name, roles in known.items():
        module = modules[name]
        site = site_of(name, modules)
        if site in layers:
            raise ValueError(
                f"{type(model).__name__}: {layers[site].name} and {name} are both {site}, so that heads cannot be "
                "told apart; pass one of its parts that has a single encoder and decoder."
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
    """What is wrong with a model: attention that is neither known, nor within nor around one that is."""
    around = {name[:end] for name in known for end in range(len(name)) if end == 0 or name[end] == "."}
    passed = [*known, *(name for name, module in modules.items() if type(module).__name__ in _POOLING)]
    strangers = [
        name
        for name, module in modules.items()
        if "Attention" in type(module).__name__
        and name not in around
        and not any(name == outer or name.startswith(f"{outer}.") for outer in passed)
    ]
    if strangers:
        # The innermost of those around each other has the projections.
        name = next(one for one in strangers if not any(other.startswith(f"{one}.") for other in strangers))
        return f"has attention of an unknown class, {type(modules[name]).__name__} (at {name})"
    return None if known else "has no attention modules"


def site_of(name: str, modules: dict[str, nn.Module]) -> HeadSite:
    """Where an attention module sits, read off its name.

    Args:
        name (`str`): Name of the module in the model.
        modules (`dict[str, nn.Module]`): All modules of the model by name.

    Raises:
        ValueError: if the module is in no list of layers.
    """
    return HeadSite(_kind(name, modules[name]), _layer(name, modules))


def _kind(name: str, module: nn.Module) -> str:
    if _CROSS_ATTENTIONS.intersection(name.split(".")):
        return "cross"
    return "decoder" if getattr(module, "is_causal", False) else "encoder"


def _layer(name: str, modules: dict[str, nn.Module]) -> int:
    """Position of an attention module among the layers, read off the lists of modules that it is in."""
    path = name.split(".")
    positions = [
        (int(path[depth]), modules[".".join(path[:depth])])
        for depth in range(1, len(path))
        if isinstance(modules[".".join(path[:depth])], nn.ModuleList)
    ]
    if not positions:
        raise ValueError(f"the attention module {name} is in no list of layers.")
    layer, _ = positions[0]
    if path[-3:-2] == ["albert_layers"]:
        # Groups of layers, each a list.
        inner, layers = positions[1]
        return layer * len(layers) + inner
    return layer
