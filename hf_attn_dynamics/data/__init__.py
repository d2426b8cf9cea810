# Licensed under the Apache License, Version 2.0.
"""Texts and tokenizers to learn from."""

from .classification import align_labels, embedded_classification, load_classification
from .embedded import embedded_corpus, embedded_splits
from .marian_tokenizer import train_marian_tokenizer
from .numerals import embedded_translation, english_numeral, german_numeral, numeral_pairs
from .parallel import load_parallel
from .text import load_texts, pack_blocks, pad_sentences
from .tokenizer import delimiter_token_ids, period_token_ids, train_byte_level_bpe


__all__ = [
    "align_labels",
    "delimiter_token_ids",
    "embedded_classification",
    "embedded_corpus",
    "embedded_splits",
    "embedded_translation",
    "english_numeral",
    "german_numeral",
    "load_classification",
    "load_parallel",
    "load_texts",
    "numeral_pairs",
    "pack_blocks",
    "pad_sentences",
    "period_token_ids",
    "train_byte_level_bpe",
    "train_marian_tokenizer",
]
