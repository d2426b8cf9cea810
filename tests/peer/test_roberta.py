# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise RoBERTa."""

import unittest

from transformers.models.roberta import modeling_roberta as stock

from hf_attn_dynamics.models import modeling_headwise_roberta as headwise

from .suite import PeerTests


class TestHeadwiseRoberta(PeerTests, unittest.TestCase):
    models = {
        stock.RobertaModel: headwise.HeadwiseRobertaModel,
        stock.RobertaForMaskedLM: headwise.HeadwiseRobertaForMaskedLM,
        stock.RobertaForSequenceClassification: headwise.HeadwiseRobertaForSequenceClassification,
        stock.RobertaForTokenClassification: headwise.HeadwiseRobertaForTokenClassification,
        stock.RobertaForQuestionAnswering: headwise.HeadwiseRobertaForQuestionAnswering,
    }


class TestGuidedHeadwiseRoberta(TestHeadwiseRoberta):
    models = dict(list(TestHeadwiseRoberta.models.items())[:2])
    options = {"guidance": {"fraction": 0.5, "patterns": ["next", "prev"]}}


class TestPrunedHeadwiseRoberta(TestHeadwiseRoberta):
    """Heads are missing unevenly; one layer has none."""

    models = dict(list(TestHeadwiseRoberta.models.items())[:2])
    options = {"pruned_heads": {0: [1], 1: [0, 1, 2, 3]}}
