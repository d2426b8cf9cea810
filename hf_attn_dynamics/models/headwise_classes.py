# Licensed under the Apache License, Version 2.0.
"""Headwise classes, each made of the stock class when it is first asked for, by name.

`from hf_attn_dynamics import HeadwiseBertForMaskedLM` makes [`HeadwiseMixin`] over `transformers.BertForMaskedLM`, and
`HeadwiseBertConfig` its configuration; the same object each time. What there is follows from the catalogue in
`architectures`. The classes live in this file: pickles name it, and checkpoints are saved with it and all that it
imports. A configuration is made without importing the code of models.

Example:
    >>> from hf_attn_dynamics import HeadwiseRobertaConfig
    >>> HeadwiseRobertaConfig.__bases__[-1].__name__
    'RobertaConfig'
    >>> config = HeadwiseRobertaConfig(guidance={"heads": {"next": [0], "first": [1, 2]}})
    >>> config.guided_heads()[11]
    {'next': [0], 'first': [1, 2]}

    >>> import torch
    >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertForMaskedLM
    >>> config = HeadwiseBertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    ...     guidance={"fraction": 0.5},
    ... )
    >>> model = HeadwiseBertForMaskedLM(config)
    >>> ids = torch.tensor([[5, 7, 8, 9, 6]])
    >>> outputs = model(ids, labels=ids, guidance_weight=1.0)
    >>> bool(outputs.loss > outputs.guidance_loss > 0)
    True
"""

from typing import Any

from .architectures import ARCHITECTURES, Architecture, headwise_name
from .compat import passes_attention_interface


_MADE: dict[str, type] = {}
_OF_USERS: dict[type, type] = {}  # by the class that they were made of


def headwise_names() -> dict[str, Architecture]:
    """Names of all headwise classes, each with its row of the catalogue; imports Transformers' tables of models."""
    return {
        headwise_name(name): row
        for row in ARCHITECTURES.values()
        for name in (row.stock_config, *row.stock_models().values(), *row.more)
    }


def twin_class(stock_name: str) -> type | None:
    """The headwise twin of a stock model or configuration class.

    Args:
        stock_name (`str`): Name of the stock class, such as `BertForMaskedLM`.

    Returns:
        `type`, *optional*: the class; `None` if it has no twin.
    """
    name = headwise_name(stock_name)
    if name not in _MADE:
        row = next((row for row in ARCHITECTURES.values() if row.stock_config == stock_name), None)
        make = _make_configuration
        if row is None:
            row, make = headwise_names().get(name), _make_model
        if row is None:
            return None
        # Another thread may have made it meanwhile: the first one counts.
        _MADE.setdefault(name, make(row, stock_name))
    return _MADE[name]


def headwise_class(model_class: type[Any]) -> type[Any]:
    """The headwise class of a class of models, of Transformers or of one's own: the same object each time.

    A class of one's own needs attention that [`register_attention`] made known, that calls the function which
    `ALL_ATTENTION_FUNCTIONS` has for the name in its configuration, and that hands keywords down to it. The class
    that is made is saved and loaded by itself; to have Auto classes open it, register it with them.

    Args:
        model_class (`type[PreTrainedModel]`): The class.

    Returns:
        `type[PreTrainedModel]`: the class, [`HeadwiseMixin`] over `model_class`; its `config_class` is made likewise.

    Raises:
        ValueError: if there is none, or attention that calls no such function.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> headwise_class(LlamaForCausalLM).__name__
        'HeadwiseLlamaForCausalLM'
    """
    import transformers

    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ValueError(f"model_class must be a class of models, such as LlamaForCausalLM, got {model_class!r}.")
    if model_class.__module__.startswith("transformers.models."):
        if (made := twin_class(model_class.__name__)) is None:
            raise ValueError(
                f"there is no headwise class of {model_class.__name__}; headwise_architectures() lists those there "
                "are."
            )
        return made
    if not passes_attention_interface(model_class):
        raise ValueError(
            f"attention of {model_class.__name__} does not call the function that ALL_ATTENTION_FUNCTIONS has for its "
            "attn_implementation, so that its heads can be removed, but neither guided nor gated."
        )
    if model_class not in _OF_USERS:
        _OF_USERS.setdefault(model_class, _make_own(model_class))
    return _OF_USERS[model_class]


def code_map(architecture: Architecture) -> dict[str, str]:
    """For each Auto class this file and a class; classes that no Auto class opens go by their own names."""
    names = {"AutoConfig": architecture.stock_config, **architecture.stock_models()}
    names |= {headwise_name(name): name for name in architecture.more}
    return {auto: f"{__name__.rpartition('.')[2]}.{headwise_name(name)}" for auto, name in names.items()}


def _make_configuration(architecture: Architecture, stock_name: str) -> type:
    import transformers
    from huggingface_hub.dataclasses import strict

    mixin = architecture.configuration()
    stock = getattr(transformers, stock_name)
    return strict(
        type(
            headwise_name(stock_name),
            (mixin, stock),
            {
                "__module__": __name__,
                "__doc__": _documentation(stock_name, mixin),
                "model_type": architecture.model_type,
                "architecture": architecture,
            },
        )
    )


def _convert_weights_as(stock: str, ours: str) -> None:
    """Has checkpoints of one class or `model_type` renamed and merged as those of a stock one, if these are."""
    # Not above: a configuration is made without the code of models.
    from .compat import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

    conversions = get_checkpoint_conversion_mapping(stock)
    if conversions is not None:
        # A copy of this code that came with a checkpoint says the same.
        register_checkpoint_conversion_mapping(ours, conversions, overwrite=True)


def _make_model(architecture: Architecture, stock_name: str) -> type:
    import transformers

    from .modeling_headwise import HeadwiseMixin

    # Checkpoints have names of weights that classes and types have renamed or merged since.
    _convert_weights_as(stock_name, headwise_name(stock_name))
    _convert_weights_as(architecture.stock_type, architecture.model_type)
    bases = architecture.bases().get(stock_name) or (HeadwiseMixin, getattr(transformers, stock_name))
    # Named among the bases, since Transformers puts it there itself, in a copy of a class that came with a checkpoint.
    generation = (transformers.GenerationMixin,) if issubclass(bases[-1], transformers.GenerationMixin) else ()
    return type(
        headwise_name(stock_name),
        bases + generation,
        {
            "__module__": __name__,
            "__doc__": _documentation(stock_name, bases[0]),
            "config_class": twin_class(architecture.stock_config),
        },
    )


def _documentation(stock_name: str, mixin: type) -> str:
    return f"`{stock_name}` with guided, gated, removed and hard-coded heads.\n\n    {mixin.__doc__}"


def _make_own(model_class: type[Any]) -> type[Any]:
    """The headwise class of one that is not of Transformers, with its configuration."""
    from huggingface_hub.dataclasses import strict

    from .configuration_headwise import HeadwiseConfigMixin
    from .modeling_headwise import HeadwiseMixin

    stock = model_class.config_class
    made = [cls.config_class for cls in _OF_USERS.values()]
    configuration = next((one for one in made if stock in one.__mro__), None)
    if configuration is None:
        row = Architecture(stock.model_type)
        names = {
            "__module__": stock.__module__,
            "__doc__": _documentation(stock.__name__, HeadwiseConfigMixin),
            "model_type": row.model_type,
            "architecture": row,
            # Code of others is saved as they have registered it.
            "code_map": lambda self: {},
            "saved_code": lambda self: None,
        }
        configuration = strict(type(headwise_name(stock.__name__), (HeadwiseConfigMixin, stock), names))
    names = {
        "__module__": model_class.__module__,
        "__doc__": _documentation(model_class.__name__, HeadwiseMixin),
        "config_class": configuration,
    }
    return type(headwise_name(model_class.__name__), (HeadwiseMixin, model_class), names)


def __getattr__(name: str) -> Any:
    stock_name = name.removeprefix("Headwise")
    made = twin_class(stock_name) if stock_name != name else None
    if made is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made


def __dir__() -> list[str]:
    return sorted({*globals(), *headwise_names()})
