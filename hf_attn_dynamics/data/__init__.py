# Licensed under the Apache License, Version 2.0.
"""Texts and tokenizers to learn from."""

from .embedded import embedded_corpus, embedded_splits
from .text import load_texts, pack_blocks, pad_sentences
from .tokenizer import delimiter_token_ids, period_token_ids, train_byte_level_bpe


__all__ = [
    "delimiter_token_ids",
    "embedded_corpus",
    "embedded_splits",
    "load_texts",
    "pack_blocks",
    "pad_sentences",
    "period_token_ids",
    "train_byte_level_bpe",
]
