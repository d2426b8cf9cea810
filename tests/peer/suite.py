# Licensed under the Apache License, Version 2.0.
"""Transformers' own model tests, run on the classes of this package and held against their stock parents."""

import functools
import json
import unittest
from contextlib import contextmanager

import pytest
import torch
import transformers
from parameterized import parameterized
from torch.utils._pytree import tree_leaves
from transformers import set_seed
from transformers.models.auto import get_values

from hf_attn_dynamics.models.architectures import ARCHITECTURES
from hf_attn_dynamics.models.headwise_classes import twin_class

from .sdist import import_suite


suite = import_suite()
common = suite.test_modeling_common

# Tests that a stock class passes and one of ours does not, each with the reason: "test" for every test case, or
# "TestCase.test" for one. A test that is listed and passes fails, so that the table never says too much.
DIFFERENCES: dict[str, str] = {
    **{
        f"{case}.{test}": reason
        for case in ("TestBowAttention", "TestLstm", "TestProxy")
        for test, reason in {
            "test_attention_outputs": "asks for attention, of which each output has the one there is, or none",
            "test_hidden_states_output": "asks for states of each layer, of which an LSTM gives the last one's",
            "test_load_with_mismatched_shapes": "expects a base model for AutoModel",
            "test_model_outputs_equivalence": "asks for states of each layer",
            "test_problem_types": "expects classes that do not exclude each other, and regression",
            "test_retain_grad_hidden_states_attentions": "asks for states of each layer",
        }.items()
    },
    "TestBowAttention.test_config": "configures regression, which is refused",
    "TestLstm.test_config": "configures a single class, which is refused",
    "TestLstmSeq2Seq.test_attention_outputs": "expects attention within source and target",
    "TestLstmSeq2Seq.test_generation_tester_mixin_inheritance": "expects test cases that are not distributed",
    "TestLstmSeq2Seq.test_hidden_states_output": "expects states of each layer",
    "TestLstmSeq2Seq.test_inputs_embeds": "gives embeddings to the decoder, which takes words",
    "TestLstmSeq2Seq.test_model_base_model_prefix": "expects a base model for AutoModel",
    "TestLstmSeq2Seq.test_retain_grad_hidden_states_attentions": "expects attention within the source",
    "TestLstmSeq2Seq.test_tied_weights_keys": "ties the last layer to the embeddings, which is refused",
    "TestPrunedHeadwiseRoberta.test_attention_outputs": "expects as many attention maps as there once were heads",
    "TestPrunedHeadwiseRoberta.test_can_init_all_missing_weights": (
        "expects new heads to be the same random ones, drawn alone or together with those that are then removed"
    ),
    "TestPrunedHeadwiseRoberta.test_model_outputs_equivalence": "takes the maximum over the maps of no heads",
    "TestPrunedHeadwiseRoberta.test_model_weights_reload_no_missing_tied_weights": (
        "loads a checkpoint without weights, which is refused where heads are removed"
    ),
    "TestPrunedHeadwiseRoberta.test_torch_save_load": "takes the maximum over the weights of no heads",
}

# How `generate` is called: names of tests, and settings.
STRATEGIES = {
    "greedily": {},
    "from_embeddings": {},
    "without_cache": {"use_cache": False},
    "with_static_cache": {"cache_implementation": "static"},
    "at_random": {"do_sample": True, "top_k": 20},
    "by_beams": {"num_beams": 3, "num_return_sequences": 2},
    "by_lookup": {"prompt_lookup_num_tokens": 2},
}
GENERATED = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 1, "do_sample": False}
GENERATED |= {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True}
GENERATED_PARTS = {"scores", "sequences_scores", "attentions", "encoder_attentions", "decoder_attentions"}
GENERATED_PARTS |= {"cross_attentions"}

# Tests of what all classes have from the base model, and that take long: they run on the base model alone.
OF_THE_BODY = ("test_bc_torch_dtype", "test_eager_matches_sdpa_inference")


def headwise_classes_of(stock_type: str) -> dict[type, type]:
    """Headwise classes of an architecture by the stock ones, the body first."""
    names = dict.fromkeys(ARCHITECTURES[stock_type].stock_models().values())
    return {getattr(transformers, name): twin_class(name) for name in names}


# Name of each stock class that one of ours extends, and the name of ours.
OURS: dict[str, str] = {}


def class_names(mapping: dict) -> list[str]:
    """Class names in a stock Auto mapping, and ours: the suite decides by name which labels a model takes."""
    names = get_values(mapping)
    return names + [OURS[name] for name in names if name in OURS]


common.get_values = class_names


class EncoderTester:
    """What the suite asks of an encoder: a small configuration, and a batch for it."""

    is_training = True
    batch_size = 13
    seq_length = 7
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    num_choices = 4
    vocab_size = 99
    # What the configuration calls its width.
    width = "hidden_size"

    @property
    def config_settings(self) -> dict:
        """Settings that the test of the configuration gives."""
        return {self.width: 37}

    def __init__(self, config_class: type, options: dict):
        self.config_class = config_class
        self.options = options

    def get_config(self):
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            **self.options,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple:
        config = self.get_config()
        shape = (self.batch_size, self.seq_length)
        input_ids = common.ids_tensor(shape, self.vocab_size)
        # RoBERTa counts positions by the padding it sees among ids, and cannot when it is given embeddings.
        input_ids[input_ids == config.pad_token_id] = self.vocab_size - 1
        inputs = {
            "input_ids": input_ids,
            "token_type_ids": common.ids_tensor(shape, config.type_vocab_size),
            "attention_mask": common.random_attention_mask(shape),
        }
        return config, inputs


class EncoderDecoderTester(EncoderTester):
    """What the suite asks of an encoder–decoder: a small configuration, and a batch for it."""

    width = "d_model"

    def get_config(self):
        return self.config_class(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            encoder_attention_heads=self.num_attention_heads,
            decoder_attention_heads=self.num_attention_heads,
            encoder_ffn_dim=37,
            decoder_ffn_dim=37,
            max_position_embeddings=20,
            pad_token_id=1,
            decoder_start_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=None,
            **self.options,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple:
        shape = (self.batch_size, self.seq_length)
        inputs = {}
        for name in ("", "decoder_"):
            inputs[f"{name}input_ids"] = common.ids_tensor(shape, self.vocab_size).clamp(3)
            inputs[f"{name}attention_mask"] = common.random_attention_mask(shape)
        return self.get_config(), inputs


class PeerTests(common.ModelTesterMixin):
    """Every model test of Transformers, on the values of `models`; what its keys pass, they must pass.

    A test that fails or is skipped runs again on the stock classes, for the verdict: one that fails on both is
    expected to fail, one that only ours skip fails, and a difference that is meant stands in `DIFFERENCES`.

    Attributes:
        models (`dict[type, type]`): Stock model classes, each with ours that extends it; the base model first.
        options (`dict`): Settings of our configuration that the stock one lacks.
        model_tester_class (`type`): Builds configurations and batches.
        common_properties (`list[str]`, *optional*): What the suite expects of a configuration, where it lacks heads.
    """

    models: dict[type, type] = {}
    options: dict = {}
    model_tester_class = EncoderTester
    common_properties: list[str] | None = None
    # Off by default for architectures of before 2023: whether a weight that a checkpoint lacks is initialised.
    test_can_init_all_missing_weights_before_2023 = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.all_model_classes = tuple(cls.models.values())
        OURS.update({stock.__name__: ours.__name__ for stock, ours in cls.models.items()})

    def setUp(self):
        # The same inputs for ours and stock.
        set_seed(0)
        common.global_rng.seed(0)
        self.skips = []
        if self._testMethodName.startswith(OF_THE_BODY):
            self.all_model_classes = self.all_model_classes[:1]
        self.model_tester = self.model_tester_class(self.all_model_classes[0].config_class, self.options)

    @contextmanager
    def subTest(self, *args, **kwargs):
        """Lets a part that fails fail its test at once, and takes note of one that is skipped."""
        try:
            yield
        except unittest.SkipTest as skip:
            self.skips.append(str(skip))

    def run(self, result=None):
        test = getattr(self, self._testMethodName)
        setattr(self, self._testMethodName, functools.wraps(test)(lambda: self._hold_against_stock(test)))
        return super().run(result)

    def _hold_against_stock(self, test):
        name = self._testMethodName
        reason = DIFFERENCES.get(f"{type(self).__name__}.{name}", DIFFERENCES.get(name))
        try:
            self._run_where_stock_runs(test)
        except unittest.SkipTest:
            raise
        except Exception as error:
            if reason:
                pytest.xfail(reason)
            if isinstance(stock := self._stock_outcome(), Exception):
                pytest.xfail(f"fails on the stock classes, too: {stock!r}; on ours: {error!r}")
            raise
        if reason:
            self.fail(f"{name} passes; take it out of DIFFERENCES")

    def _run_where_stock_runs(self, test):
        skip = None
        try:
            test()
        except unittest.SkipTest as error:
            skip = error
            self.skips.append(str(error))
        if self.skips:
            stock = self._stock_outcome()
            if isinstance(stock, list) and len(stock) < len(self.skips):
                self.fail(f"skipped on ours, but not on the stock classes: {'; '.join(self.skips)}")
        if skip:
            raise skip

    def _stock_outcome(self) -> list[str] | Exception:
        """Why parts of the test are skipped on the stock classes, or how it fails there."""
        stock = type(self)(self._testMethodName)
        stock.all_model_classes = tuple(self.models)
        stock.options = {}
        try:
            # Unlike `run`, runs the plain test and raises what it raises.
            stock.debug()
        except unittest.SkipTest as skip:
            stock.skips.append(str(skip))
        except Exception as error:
            return error
        return stock.skips

    def test_config(self):
        config = self.model_tester.get_config()
        # As the configuration completes and JSON writes them: the tester compares them with what it saves.
        options = {name: json.loads(json.dumps(getattr(config, name))) for name in self.options}
        options |= self.model_tester.config_settings
        suite.test_configuration_common.ConfigTester(
            self,
            config_class=type(config),
            has_text_modality=hasattr(config, "vocab_size"),
            common_properties=self.common_properties,
            **options,
        ).run_common_tests()


class GenerationTests:
    """In place of the tests of generation, which the source distribution lacks; goes before [`PeerTests`]."""

    @parameterized.expand([(name,) for name in STRATEGIES])
    def test_generates_as_the_stock_class(self, name):
        """Tokens, scores and attention are those of the stock class with the same weights; gates are open."""
        pairs = [pair for pair in zip(self.all_model_classes, self.models) if pair[0].can_generate()]
        if not pairs:
            self.skipTest("generates nothing")
        ours, stock = pairs[0]
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        set_seed(0)
        model = ours._from_config(config, attn_implementation="eager").eval()
        twin_config = self.model_tester_class(stock.config_class, {}).get_config()
        twin = stock._from_config(twin_config, attn_implementation="eager").eval()
        twin.load_state_dict(model.state_dict(), strict=False)
        inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
        if STRATEGIES[name].get("prompt_lookup_num_tokens"):
            inputs = {key: value[:1] for key, value in inputs.items()}
        if name == "from_embeddings":
            if config.is_encoder_decoder:
                self.skipTest("is for decoders")
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        outputs = []
        for one in (model, twin):
            set_seed(0)
            outputs.append(one.generate(**inputs, **{**GENERATED, **STRATEGIES[name]}))
        assert outputs[0].keys() == outputs[1].keys()
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        for key in GENERATED_PARTS & outputs[0].keys():
            for found, expected in zip(tree_leaves(outputs[0][key]), tree_leaves(outputs[1][key]), strict=True):
                torch.testing.assert_close(found, expected, msg=key)
