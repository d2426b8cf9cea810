# Licensed under the Apache License, Version 2.0.
"""Small models of every architecture of the catalogue, although configurations name sizes differently."""

import difflib
from dataclasses import fields
from typing import Any

import transformers
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedConfig, PreTrainedTokenizerBase

from ..data import pack_blocks
from ..data.text import AnyDataset
from ..models.architectures import ARCHITECTURES, Architecture
from ..models.headwise_classes import twin_class
from ..models.ignored_labels import IGNORED


# Names of sizes in configurations; a configuration takes those that it has.
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
TOKEN_NAMES = ("pad", "bos", "eos", "cls", "sep")
WRITTEN = {"bert": "BERT", "electra": "ELECTRA", "gpt2": "GPT-2", "roberta": "RoBERTa"}  # unlike the names of classes


class NextTokenCollator(DataCollatorWithPadding):
    """Pads examples; the labels are the input ids, which the model shifts."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__(features)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


def packed_blocks(texts: AnyDataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> AnyDataset:
    """[`pack_blocks`], with errors that name the flag --max_length."""
    try:
        return pack_blocks(texts, tokenizer, max_length)
    except ValueError as error:
        raise ValueError(str(error).replace("block_size", "max_length")) from error


def pad_by_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets the padding token of a tokenizer without one to its end token; the attention mask tells them apart."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token


def architecture_row(name: str) -> Architecture:
    """The row of an architecture in the catalogue.

    Raises:
        ValueError: naming the nearest `model_type`, if there is no such row.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"architecture {name!r} has no row in the catalogue; the nearest is {nearest!r}. All are "
        f"{', '.join(ARCHITECTURES)}. register_attention() adds others."
    )


def readable_name(row: Architecture) -> str:
    """The usual spelling of the name of an architecture."""
    return WRITTEN.get(row.stock_type, row.stock_config.removesuffix("Config").removesuffix("Text"))


def language_model(row: Architecture, auto_class: str, endings: tuple[str, ...]) -> str | None:
    """Name of the stock language model of an architecture, or `None`; encoder–decoders have none.

    Args:
        row (`Architecture`): The architecture.
        auto_class (`str`): Name of the Auto class.
        endings (`tuple[str, ...]`): Endings of class names; an Auto class has classes for other tasks as well.
    """
    name = row.stock_models().get(auto_class, "")
    has_two_stacks = getattr(transformers, row.stock_config).is_encoder_decoder
    return name if name.endswith(endings) and not has_two_stacks else None


def causal_settings(row: Architecture) -> dict[str, Any]:
    """Settings of the configuration of a causal language model: `is_decoder` for encoders."""
    return {} if row.is_decoder else {"is_decoder": True}


def masked_settings(row: Architecture) -> dict[str, Any]:
    """Settings of the configuration of a masked language model: for RoBERTa, those of its checkpoints."""
    return {"type_vocab_size": 1, "layer_norm_eps": 1e-5} if row.stock_type == "roberta" else {}


def sizes_of(args: Any) -> dict[str, Any]:
    """The sizes of a small model from the flags of a recipe, as [`small_config`] takes them."""
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
        tokenizer (`PreTrainedTokenizerBase`): Determines vocabulary size and special tokens.
        length (`int`): Maximum number of tokens.
        settings: Sizes and other settings, as for [`sized_config`].

    Raises:
        ValueError: if the sizes do not fit each other or the architecture.
    """
    of_text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": length,
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in TOKEN_NAMES},
    }
    config = sized_config(row, of_text, **settings)
    if (positions := config.max_positions()) is not None:
        # RoBERTa, for example, counts positions from the padding index.
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
        of_inputs (`dict`): Sizes of the inputs; those that the configuration does not have are ignored.
        num_hidden_layers, hidden_size, num_attention_heads (`int`): Sizes; feed-forward layers are 4 times as wide,
            and mixtures use 2 of 8 experts per token.
        num_key_value_heads (`int`, *optional*): Number of key/value heads; one per head by default.
        dropout, attention_dropout (`float`): Dropout of hidden states and of attention weights, if the architecture
            has any.
        more: Other settings by their names in the configuration.

    Raises:
        ValueError: if the sizes do not fit each other or the architecture.
    """
    config_class = twin_class(row.stock_config)
    known = {one.name for one in fields(getattr(transformers, row.stock_config))}
    groups = num_key_value_heads or num_attention_heads
    if hidden_size % num_attention_heads:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of {num_attention_heads} heads.")
    if num_key_value_heads is not None and "num_key_value_heads" not in known:
        raise ValueError(
            f"num_key_value_heads={num_key_value_heads} needs grouped attention, which {row.stock_type} does not have."
        )
    if num_attention_heads % groups:
        raise ValueError(
            f"num_attention_heads {num_attention_heads} is not a multiple of num_key_value_heads {groups}."
        )
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
