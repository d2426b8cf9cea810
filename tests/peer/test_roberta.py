# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise RoBERTa."""

import unittest

from .suite import PeerTests, headwise_classes_of


class TestHeadwiseRoberta(PeerTests, unittest.TestCase):
    models = headwise_classes_of("roberta")


class TestGuidedHeadwiseRoberta(TestHeadwiseRoberta):
    models = dict(list(TestHeadwiseRoberta.models.items())[:2])
    options = {"guidance": {"fraction": 0.5, "patterns": ["next", "prev"]}}


class TestPrunedHeadwiseRoberta(TestHeadwiseRoberta):
    """Heads are missing unevenly; one layer has none."""

    models = dict(list(TestHeadwiseRoberta.models.items())[:2])
    options = {"pruned_heads": {0: [1], 1: [0, 1, 2, 3]}}
