# Licensed under the Apache License, Version 2.0.
"""Texts and tokenizers to learn from."""

from .classification import align_labels, embedded_classification, load_classification
from .conllu import Tree, embedded_trees, load_conllu, parse_with_spacy
from .coreference import (
    CoreferenceItem,
    Mention,
    add_distractors,
    embedded_coreference,
    load_conll2012,
    load_coreference,
    load_open_sesame,
    load_winobias,
    load_winogender,
    single_token_items,
)
from .embedded import embedded_corpus, embedded_splits
from .marian_tokenizer import train_marian_tokenizer
from .numerals import embedded_translation, english_numeral, german_numeral, numeral_pairs
from .parallel import load_parallel
from .sentence_pairs import load_documents, sentence_pairs, split_sentences
from .text import load_texts, pack_blocks, pad_sentences, token_counts
from .token_classification import entity_labels, iob2, label_words, load_token_classification, word_tags
from .tokenizer import (
    delimiter_token_ids,
    period_token_ids,
    train_byte_level_bpe,
    unknown_rate,
    warn_of_unknown,
)
from .topics import pair_sentences, topic_pairs, topic_sentences, topic_words
from .words import encode_words


__all__ = [
    "CoreferenceItem",
    "Mention",
    "Tree",
    "add_distractors",
    "align_labels",
    "delimiter_token_ids",
    "embedded_classification",
    "embedded_coreference",
    "embedded_corpus",
    "embedded_splits",
    "embedded_translation",
    "embedded_trees",
    "encode_words",
    "english_numeral",
    "entity_labels",
    "german_numeral",
    "iob2",
    "label_words",
    "load_classification",
    "load_conll2012",
    "load_conllu",
    "load_coreference",
    "load_documents",
    "load_open_sesame",
    "load_parallel",
    "load_texts",
    "load_token_classification",
    "load_winobias",
    "load_winogender",
    "numeral_pairs",
    "pack_blocks",
    "pad_sentences",
    "pair_sentences",
    "parse_with_spacy",
    "period_token_ids",
    "sentence_pairs",
    "single_token_items",
    "split_sentences",
    "token_counts",
    "topic_pairs",
    "topic_sentences",
    "topic_words",
    "train_byte_level_bpe",
    "train_marian_tokenizer",
    "unknown_rate",
    "warn_of_unknown",
    "word_tags",
]
