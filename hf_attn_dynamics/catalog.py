# Licensed under the Apache License, Version 2.0.
"""Headwise models of the architectures in the catalogue: built and loaded by the kind of the stock one.

The catalogue itself is `models/architectures.py`, since it is saved together with checkpoints.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .models.architectures import ARCHITECTURES, headwise_name
from .models.compat import attention_kernel
from .models.headwise_classes import twin_class
from .models.pruned_checkpoints import hub_arguments
from .models.pruned_checkpoints import load_pruned as load_pruned
from .models.size_limits import check_folder


def headwise_model(
    source: str | Path | PreTrainedConfig, auto_class: str = "AutoModel", **kwargs: Any
) -> PreTrainedModel:
    """Builds or loads the headwise model that belongs to a stock or headwise configuration or checkpoint.

    Args:
        source (`str`, `Path` or `PreTrainedConfig`): A folder or name on the Hub to load from; or a configuration, for
            random weights.
        auto_class (`str`): Which head, by the Auto class that would give it.
        kwargs: For `from_pretrained`; such as `guidance`, `gates` and `num_labels`. A configuration takes none.

    Returns:
        `PreTrainedModel`: in evaluation mode if it was loaded.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if there is no headwise class for the architecture or the head; the message lists those there are.

    Example:
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=4)
        >>> type(headwise_model(config, "AutoModelForMaskedLM")).__name__
        'HeadwiseBertForMaskedLM'
    """
    is_config = isinstance(source, PreTrainedConfig)
    if is_config and kwargs:
        raise ValueError(f"a configuration says all of a model; set {', '.join(kwargs)} in it, or name a checkpoint.")
    if not is_config:
        check_folder(source)
    config = source if is_config else AutoConfig.from_pretrained(source, **hub_arguments(kwargs))
    row = ARCHITECTURES.get(config.model_type.removeprefix("headwise-"))
    if row is None:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"there is no headwise class for the architecture {config.model_type!r}, only for {known}.")
    heads = row.stock_models()
    if auto_class not in heads:
        prefix = headwise_name(row.stock_config).removesuffix("Config")
        raise ValueError(f"{prefix} has no head for {auto_class!r}, only for {', '.join(heads)}.")
    cls = twin_class(heads[auto_class])
    if not is_config:
        return cls.from_pretrained(source, **kwargs)
    if config.model_type == row.stock_type:
        # The kernel is the one thing that a configuration does not write down.
        kernel = attention_kernel(config)
        config = cls.config_class.from_dict(
            {**config.to_dict(), "model_type": row.model_type}, attn_implementation=kernel
        )
    return cls(config)
