# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise ELECTRA; models without options of ours are those of `test_roberta.py`."""

import unittest

import torch
from transformers.models.electra import modeling_electra as stock

from hf_attn_dynamics import HeadwiseElectraForJointPreTraining
from hf_attn_dynamics.models.modeling_headwise_electra import ElectraForJointPreTraining

from .suite import PeerTests, headwise_classes_of


class TestGuidedAndGatedHeadwiseElectra(PeerTests, unittest.TestCase):
    models = headwise_classes_of("electra")
    options = {"guidance": {"fraction": 0.5, "patterns": ["next", "prev"]}, "gates": {}}

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and issubclass(model_class, stock.ElectraForPreTraining):
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
        return inputs


class TestJointHeadwiseElectra(PeerTests, unittest.TestCase):
    models = {ElectraForJointPreTraining: HeadwiseElectraForJointPreTraining}
    options = TestGuidedAndGatedHeadwiseElectra.options

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels:
            inputs["labels"] = inputs["input_ids"].where(inputs["input_ids"] % 2 == 0, -100)
        return inputs
