# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on headwise Marian; models without options of ours are those of `test_roberta.py`."""

import unittest

from .suite import EncoderDecoderTester, GenerationTests, PeerTests, headwise_classes_of


class TestGuidedAndGatedHeadwiseMarian(GenerationTests, PeerTests, unittest.TestCase):
    models = headwise_classes_of("marian")
    model_tester_class = EncoderDecoderTester
    is_encoder_decoder = True
    options = {
        "guidance": {"encoder": {"fraction": 0.5, "patterns": ["next", "prev"]}},
        "gates": {"encoder": {}, "decoder": {}, "cross": {}},
    }
