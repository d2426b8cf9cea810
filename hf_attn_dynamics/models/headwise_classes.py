# Licensed under the Apache License, Version 2.0.
"""Headwise classes, each derived from its stock class on first import.

`from hf_attn_dynamics import HeadwiseBertForMaskedLM` combines [`HeadwiseMixin`] and `transformers.BertForMaskedLM`;
`HeadwiseBertConfig` is its configuration. Each class is created once. `ARCHITECTURES` lists the supported stock
classes. The classes belong to this module: pickles refer to it, and checkpoints are saved with this file and its
imports. Configuration classes are created without importing the code of models.

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
_CUSTOM: dict[type, type] = {}  # headwise classes of users' classes


def headwise_names() -> dict[str, Architecture]:
    """Names of all headwise classes, with their rows of `ARCHITECTURES`; imports Transformers' tables of models."""
    return {
        headwise_name(name): row
        for row in ARCHITECTURES.values()
        for name in (row.stock_config, *row.stock_models().values(), *row.more)
    }


def twin_class(stock_name: str) -> type | None:
    """The headwise counterpart of a stock model or configuration class.

    Args:
        stock_name (`str`): Name of the stock class, such as `BertForMaskedLM`.

    Returns:
        `type`, *optional*: the class; `None` if there is none.
    """
    name = headwise_name(stock_name)
    if name not in _MADE:
        row = next((row for row in ARCHITECTURES.values() if row.stock_config == stock_name), None)
        make = _make_configuration
        if row is None:
            row, make = headwise_names().get(name), _make_model
        if row is None:
            return None
        # Keep the class that another thread may have created meanwhile.
        _MADE.setdefault(name, make(row, stock_name))
    return _MADE[name]


def headwise_class(model_class: type[Any]) -> type[Any]:
    """Returns the headwise class of a model class, of Transformers or custom; repeated calls return the same class.

    Attention of a custom class must be registered by [`register_attention`], call the function in
    `ALL_ATTENTION_FUNCTIONS` that its configuration names, and pass its keywords to it. Register the returned class
    with Auto classes to load it through them.

    Args:
        model_class (`type[PreTrainedModel]`): The class.

    Returns:
        `type[PreTrainedModel]`: [`HeadwiseMixin`] combined with `model_class`; its `config_class` is derived likewise.

    Raises:
        ValueError: if Transformers' class has no headwise counterpart, or a custom class does not call the function.

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
                f"{model_class.__name__} has no headwise class; headwise_architectures() lists the supported classes."
            )
        return made
    if not passes_attention_interface(model_class):
        raise ValueError(
            f"attention of {model_class.__name__} does not call the function in ALL_ATTENTION_FUNCTIONS for its "
            "attn_implementation: its heads can be removed, but neither guided nor gated."
        )
    if model_class not in _CUSTOM:
        _CUSTOM.setdefault(model_class, _make_custom(model_class))
    return _CUSTOM[model_class]


def code_map(architecture: Architecture) -> dict[str, str]:
    """The `auto_map` of an architecture; classes without an Auto class are listed under their own names."""
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
    """Registers the checkpoint conversion of a stock class or `model_type`, if any, for the headwise one."""
    # Imported here, so that configuration classes are created without the code of models.
    from .compat import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

    conversions = get_checkpoint_conversion_mapping(stock)
    if conversions is not None:
        # A copy of this code in a checkpoint registers the same conversions.
        register_checkpoint_conversion_mapping(ours, conversions, overwrite=True)


def _make_model(architecture: Architecture, stock_name: str) -> type:
    import transformers

    from .modeling_headwise import HeadwiseMixin

    # Weights in older checkpoints may have other names.
    _convert_weights_as(stock_name, headwise_name(stock_name))
    _convert_weights_as(architecture.stock_type, architecture.model_type)
    bases = architecture.bases().get(stock_name) or (HeadwiseMixin, getattr(transformers, stock_name))
    # A base class, since Transformers adds it to the bases when it loads the code of a checkpoint.
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


def _make_custom(model_class: type[Any]) -> type[Any]:
    """Creates the headwise class of a class that is not of Transformers, with its configuration."""
    from huggingface_hub.dataclasses import strict

    from .configuration_headwise import HeadwiseConfigMixin
    from .modeling_headwise import HeadwiseMixin

    stock = model_class.config_class
    made = [cls.config_class for cls in _CUSTOM.values()]
    configuration = next((one for one in made if stock in one.__mro__), None)
    if configuration is None:
        row = Architecture(stock.model_type)
        names = {
            "__module__": stock.__module__,
            "__doc__": _documentation(stock.__name__, HeadwiseConfigMixin),
            "model_type": row.model_type,
            "architecture": row,
            # Users register custom code for saving themselves.
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
