# Licensed under the Apache License, Version 2.0.
"""Small models of any architecture of the catalogue, whatever its configuration calls a size."""

import difflib
from dataclasses import fields
from typing import Any

import transformers
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedTokenizerBase

from ..models.architectures import ARCHITECTURES, Architecture
from ..models.headwise_classes import twin_class
from ..models.ignored_labels import IGNORED


# What configurations call a size; those that one does not have are left out.
FEED_FORWARD = (
    "intermediate_size", "ffn_dim", "hidden_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"
)  # fmt: skip
DROPOUT = (
    "hidden_dropout_prob", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "embedding_dropout", "mlp_dropout"
)  # fmt: skip
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
CAUSAL_CLASS, CAUSAL_ENDINGS = "AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")
MASKED_CLASS, MASKED_ENDINGS = "AutoModelForMaskedLM", ("ForMaskedLM",)
SIZE_FLAGS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "dropout", "attention_dropout"
)  # fmt: skip
NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 2
SPECIAL_TOKENS = ("pad", "bos", "eos", "cls", "sep")
WRITTEN = {"bert": "BERT", "electra": "ELECTRA", "gpt2": "GPT-2", "roberta": "RoBERTa"}  # where it is not the class's


class NextTokenCollator(DataCollatorWithPadding):
    """Pads examples; the labels are the tokens themselves, which the model compares with what it predicts of each."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__(features)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


def pad_by_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer without a token for padding the one that ends a text: the mask tells them apart."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def architecture_row(name: str) -> Architecture:
    """The row of an architecture, by its `model_type`.

    Raises:
        ValueError: if there is none; the message names the nearest one.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"architecture {name!r} has no row in the catalogue; the nearest is {nearest!r}. All are "
        f"{', '.join(ARCHITECTURES)}. Attention classes of others become known by register_attention()."
    )


def readable_name(row: Architecture) -> str:
    """What people call an architecture."""
    return WRITTEN.get(row.stock_type, row.stock_config.removesuffix("Config").removesuffix("Text"))


def language_model(row: Architecture, auto_class: str, endings: tuple[str, ...]) -> str | None:
    """Name of the stock class of an architecture under an Auto class, if it is a language model of one stack.

    Args:
        row (`Architecture`): The architecture.
        auto_class (`str`): Name of the Auto class.
        endings (`tuple[str, ...]`): Ends of the names that are meant, since Auto classes open others, too.

    Returns:
        `str`, *optional*: the name; `None` if there is none.
    """
    name = row.stock_models().get(auto_class, "")
    has_two_stacks = getattr(transformers, row.stock_config).is_encoder_decoder
    return name if name.endswith(endings) and not has_two_stacks else None


def causal_settings(row: Architecture) -> dict[str, Any]:
    """What the configuration of a causal language model is told: encoders are to be decoders."""
    return {} if row.is_decoder else {"is_decoder": True}


def masked_settings(row: Architecture) -> dict[str, Any]:
    """What the configuration of a masked language model is told: the values of RoBERTa's checkpoints."""
    return {"type_vocab_size": 1, "layer_norm_eps": 1e-5} if row.stock_type == "roberta" else {}


def sizes_of(args: Any) -> dict[str, Any]:
    """The sizes of a small model among the arguments of a recipe, as [`small_config`] takes them."""
    return {name: getattr(args, name) for name in SIZE_FLAGS}


def small_config(
    row: Architecture,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    **settings: Any,
) -> PreTrainedConfig:
    """The headwise configuration of a small language model.

    Args:
        row (`Architecture`): The architecture.
        tokenizer (`PreTrainedTokenizerBase`): Gives the vocabulary and the special tokens.
        length (`int`): Most tokens of a sequence.
        settings: Sizes, and more of the configuration, as [`sized_config`] takes them.

    Raises:
        ValueError: if the sizes do not fit each other or the architecture.
    """
    of_text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": length,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_TOKENS},
    }
    config = sized_config(row, of_text, **settings)
    if (positions := config.max_positions()) is not None:
        # Some count positions from the padding index on.
        config.max_position_embeddings += length - positions
    return config


def sized_config(
    row: Architecture,
    of_inputs: dict[str, Any],
    *,
    num_hidden_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    num_key_value_heads: int | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    **more: Any,
) -> PreTrainedConfig:
    """The headwise configuration of a small model.

    Args:
        row (`Architecture`): The architecture.
        of_inputs (`dict`): Sizes of what it reads; left out where the architecture has none of the name.
        num_hidden_layers, hidden_size, num_attention_heads (`int`): Sizes; feed-forward layers are 4 times as wide,
            and where there are experts, a token passes 2 of 8.
        num_key_value_heads (`int`, *optional*): Groups of heads that share keys and values; none share by default.
        dropout, attention_dropout (`float`): Dropout of hidden states and of attention weights, where there is any.
        more: Of the configuration, as it calls them.

    Raises:
        ValueError: if the sizes do not fit each other or the architecture.
    """
    config_class = twin_class(row.stock_config)
    known = {one.name for one in fields(getattr(transformers, row.stock_config))}
    groups = num_key_value_heads or num_attention_heads
    if hidden_size % num_attention_heads:
        raise ValueError(f"hidden_size {hidden_size} is no multiple of {num_attention_heads} heads.")
    if num_key_value_heads is not None and "num_key_value_heads" not in known:
        raise ValueError(
            f"num_key_value_heads={num_key_value_heads} is for grouped queries, which {row.stock_type} does not have."
        )
    if num_attention_heads % groups:
        raise ValueError(f"num_attention_heads {num_attention_heads} is no multiple of num_key_value_heads {groups}.")
    head_dim = hidden_size // num_attention_heads
    sizes = {
        **of_inputs,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "embedding_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        **dict.fromkeys(FEED_FORWARD, 4 * hidden_size),
        **dict.fromkeys(DROPOUT, dropout),
        **dict.fromkeys(ATTENTION_DROPOUT, attention_dropout),
    }
    own_names = {config_class.attribute_map.get(name, name): value for name, value in sizes.items()}
    return config_class(**{**{name: value for name, value in own_names.items() if name in known}, **more})
