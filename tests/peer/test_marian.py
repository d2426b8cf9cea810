# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise Marian; models without options of ours are those of `test_roberta.py`."""

import unittest

from transformers.models.marian import modeling_marian as stock

from hf_attn_dynamics.models import modeling_headwise_marian as headwise

from .suite import EncoderDecoderTester, PeerTests


class TestGuidedAndGatedHeadwiseMarian(PeerTests, unittest.TestCase):
    models = {
        stock.MarianModel: headwise.HeadwiseMarianModel,
        stock.MarianMTModel: headwise.HeadwiseMarianMTModel,
    }
    model_tester_class = EncoderDecoderTester
    is_encoder_decoder = True
    options = {
        "guidance": {"encoder": {"fraction": 0.5, "patterns": ["next", "prev"]}},
        "gates": {"encoder": {}, "decoder": {}, "cross": {}},
    }
