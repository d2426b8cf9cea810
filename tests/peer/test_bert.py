# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise BERT; models without options of ours are those of `test_roberta.py`."""

import unittest

import torch
from transformers.models.bert import modeling_bert as stock

from .suite import PeerTests, headwise_classes_of


class TestGuidedHeadwiseBert(PeerTests, unittest.TestCase):
    models = headwise_classes_of("bert")
    options = {"guidance": {"fraction": 0.5, "patterns": ["next", "prev"]}}

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and issubclass(model_class, stock.BertForPreTraining):
            # Two losses, two kinds of labels.
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
            inputs["next_sentence_label"] = inputs["labels"][:, 0]
        return inputs
