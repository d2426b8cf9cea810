# Licensed under the Apache License, Version 2.0.
"""A small BERT with its tokenizer and its reading of parsed sentences, for tests of readings and of their pages."""

import pytest
from tiny_models import vivid_bert

from hf_attn_dynamics import read_heads
from hf_attn_dynamics.data import embedded_trees, train_byte_level_bpe


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level_bpe([tree.text for tree in embedded_trees()], 400, kind="bert")


@pytest.fixture(scope="module")
def model(tokenizer):
    return vivid_bert(tokenizer)


@pytest.fixture(scope="module")
def reading(model, tokenizer):
    return read_heads(model, embedded_trees(), tokenizer, frequent=20)
