# Licensed under the Apache License, Version 2.0.
"""Texts and tokenizers to learn from."""

from .class_files import load_class_files
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
from .demo.copying import CopyingTask, KeywordTask
from .demo.embedded import embedded_corpus, embedded_splits
from .demo.images import embedded_images
from .demo.numerals import embedded_translation, english_numeral, german_numeral, numeral_pairs
from .demo.topics import pair_sentences, topic_pairs, topic_sentences, topic_words
from .glue import GLUE_TASKS, GlueTask, class_order, find_glue_file, glue_task, load_glue, write_submission
from .marian_tokenizer import train_marian_tokenizer
from .parallel import load_parallel
from .sentence_pairs import load_documents, sentence_pairs, split_sentences
from .text import load_texts, pack_blocks, pad_sentences, token_counts
from .token_classification import entity_labels, iob2, label_words, load_token_classification, word_tags
from .tokenizer import (
    character_tokenizer,
    delimiter_token_ids,
    period_token_ids,
    train_byte_level_bpe,
    unknown_rate,
    warn_of_unknown,
)
from .word_tokenizer import train_word_tokenizer
from .word_vectors import load_word_vectors
from .words import encode_words


__all__ = [
    "CopyingTask",
    "CoreferenceItem",
    "GLUE_TASKS",
    "GlueTask",
    "KeywordTask",
    "Mention",
    "Tree",
    "add_distractors",
    "align_labels",
    "character_tokenizer",
    "class_order",
    "delimiter_token_ids",
    "embedded_classification",
    "embedded_coreference",
    "embedded_corpus",
    "embedded_images",
    "embedded_splits",
    "embedded_translation",
    "embedded_trees",
    "encode_words",
    "english_numeral",
    "entity_labels",
    "find_glue_file",
    "german_numeral",
    "glue_task",
    "iob2",
    "label_words",
    "load_class_files",
    "load_classification",
    "load_conll2012",
    "load_conllu",
    "load_coreference",
    "load_documents",
    "load_glue",
    "load_open_sesame",
    "load_parallel",
    "load_texts",
    "load_token_classification",
    "load_word_vectors",
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
    "train_word_tokenizer",
    "unknown_rate",
    "warn_of_unknown",
    "word_tags",
    "write_submission",
]
