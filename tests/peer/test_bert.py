# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise BERT; models without options of ours are those of `test_roberta.py`."""

import unittest

import torch
from transformers.models.bert import modeling_bert as stock

from hf_attn_dynamics.models import modeling_headwise_bert as headwise

from .suite import PeerTests


class TestGuidedHeadwiseBert(PeerTests, unittest.TestCase):
    models = {
        stock.BertModel: headwise.HeadwiseBertModel,
        stock.BertForPreTraining: headwise.HeadwiseBertForPreTraining,
        stock.BertForMaskedLM: headwise.HeadwiseBertForMaskedLM,
        stock.BertForSequenceClassification: headwise.HeadwiseBertForSequenceClassification,
        stock.BertForTokenClassification: headwise.HeadwiseBertForTokenClassification,
        stock.BertForQuestionAnswering: headwise.HeadwiseBertForQuestionAnswering,
    }
    options = {"guidance": {"fraction": 0.5, "patterns": ["next", "prev"]}}

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and issubclass(model_class, stock.BertForPreTraining):
            # Two losses, two kinds of labels.
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
            inputs["next_sentence_label"] = inputs["labels"][:, 0]
        return inputs
