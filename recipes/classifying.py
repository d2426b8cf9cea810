# Licensed under the Apache License, Version 2.0.
"""What recipes that classify have in common: encoded texts, names of classes, and the model that learns them."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_attn_dynamics import HeadwiseBertConfig


def encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """Tokens of texts, or of pairs of texts, with their labels; cut to a length."""
    columns = [name for name in ("text", "text_pair") if name in texts.column_names]
    encoded = texts.map(
        lambda batch: tokenizer(*(batch[name] for name in columns), truncation=True, max_length=max_length),
        batched=True,
        remove_columns=columns,
        desc="Tokenizing",
    )
    return encoded.rename_column("label", "labels")


def class_names(names: list[str]) -> dict[str, Any]:
    """What a configuration is told of its classes."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {label: number for number, label in enumerate(names)},
    }


def small_bert(args: Any, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> HeadwiseBertConfig:
    """A BERT of the sizes among the arguments."""
    return HeadwiseBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_length,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )


def from_checkpoint(flag: str, load: Callable[..., Any], name: str, *arguments: Any, **settings: Any) -> Any:
    """What is loaded from the checkpoint that a flag names, or one line on why it can not be."""
    try:
        return load(name, *arguments, **settings)
    except OSError as error:
        raise ValueError(f"{flag} {name!r} can not be loaded: {' '.join(str(error).split())}") from error
