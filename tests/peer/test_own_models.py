# Licensed under the Apache License, Version 2.0.
"""Transformers' model tests on the models that extend no stock one."""

import unittest

import hf_attn_dynamics as had

from .suite import EncoderTester, PeerTests, common


class OwnTester(EncoderTester):
    """What the suite asks of a model with embeddings of a size of its own."""

    width = "embedding_size"

    def get_config(self):
        return self.config_class(vocab_size=self.vocab_size, **{"embedding_size": self.hidden_size, **self.options})

    def prepare_config_and_inputs_for_common(self) -> tuple:
        config, shape = self.get_config(), (self.batch_size, self.seq_length)
        inputs = {
            "input_ids": common.ids_tensor(shape, self.vocab_size).clamp(3),
            "attention_mask": common.random_attention_mask(shape),
        }
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = common.ids_tensor(shape, self.vocab_size).clamp(3)
        return config, inputs


class OwnTests(PeerTests):
    """There is no stock class to hold them against: a test passes, is skipped or stands in `DIFFERENCES`."""

    model_tester_class = OwnTester

    def __init_subclass__(cls, **kwargs):
        cls.models = {cls.model: cls.model}
        super().__init_subclass__(**kwargs)

    def _stock_outcome(self) -> list[str]:
        return self.skips


class TestLstmSeq2Seq(OwnTests, unittest.TestCase):
    model = had.LstmSeq2SeqForConditionalGeneration
    options = {"hidden_size": 24, "num_hidden_layers": 2, "bidirectional": True}
    is_encoder_decoder = True


class TestLstm(OwnTests, unittest.TestCase):
    model = had.LstmForSequenceClassification
    options = {"hidden_size": 24, "num_hidden_layers": 2}
    common_properties = ["hidden_size", "num_hidden_layers"]


class TestProxy(OwnTests, unittest.TestCase):
    model = had.ProxyForSequenceClassification
    common_properties = ["embedding_size"]


class BowAttentionTester(OwnTester):
    width = "hidden_size"

    def get_config(self):
        return self.config_class(vocab_size=self.vocab_size, hidden_size=self.hidden_size, key_size=8)


class TestBowAttention(OwnTests, unittest.TestCase):
    model = had.BowAttentionForSequenceClassification
    model_tester_class = BowAttentionTester
    common_properties = ["hidden_size"]
