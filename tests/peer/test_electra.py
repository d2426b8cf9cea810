# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise ELECTRA; models without options of ours are those of `test_roberta.py`."""

import unittest

import torch
from transformers.models.electra import modeling_electra as stock

from hf_attn_dynamics.models import modeling_headwise_electra as headwise

from .suite import PeerTests


class TestGuidedAndGatedHeadwiseElectra(PeerTests, unittest.TestCase):
    models = {
        stock.ElectraModel: headwise.HeadwiseElectraModel,
        stock.ElectraForPreTraining: headwise.HeadwiseElectraForPreTraining,
        stock.ElectraForMaskedLM: headwise.HeadwiseElectraForMaskedLM,
        stock.ElectraForSequenceClassification: headwise.HeadwiseElectraForSequenceClassification,
        stock.ElectraForTokenClassification: headwise.HeadwiseElectraForTokenClassification,
        stock.ElectraForQuestionAnswering: headwise.HeadwiseElectraForQuestionAnswering,
    }
    options = {"guidance": {"fraction": 0.5, "patterns": ["next", "prev"]}, "gates": {}}

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and issubclass(model_class, stock.ElectraForPreTraining):
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
        return inputs


class TestJointHeadwiseElectra(PeerTests, unittest.TestCase):
    models = {headwise.ElectraForJointPreTraining: headwise.HeadwiseElectraForJointPreTraining}
    options = TestGuidedAndGatedHeadwiseElectra.options

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels:
            inputs["labels"] = inputs["input_ids"].where(inputs["input_ids"] % 2 == 0, -100)
        return inputs
