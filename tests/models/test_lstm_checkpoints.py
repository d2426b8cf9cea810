# Licensed under the Apache License, Version 2.0.
"""LSTMs with attention and their proxies as checkpoints: Auto classes, what is frozen, and the code that travels."""

import importlib

import pytest
import torch
import transformers
from tiny_lstms import IDS, LEXICAL_MODELS, assert_saved_code_suffices, labelled, tiny_lexical

import hf_attn_dynamics as had
from hf_attn_dynamics.models.own_architectures import OWN_ARCHITECTURES


MODEL_TYPES = ("lstm-attention-seq2seq", "lstm-attention", "bag-of-words-proxy")
AUTO_OF = {
    f"{row.prefix}{head}": auto
    for row in (OWN_ARCHITECTURES[model_type] for model_type in MODEL_TYPES)
    for auto, head in row.heads.items()
}


@pytest.mark.parametrize("model_type", OWN_ARCHITECTURES)
def test_the_catalogue_names_the_classes_of_a_model_where_they_are(model_type):
    row = OWN_ARCHITECTURES[model_type]
    for auto, place in row.code_map().items():
        file, _, name = place.rpartition(".")
        cls = getattr(importlib.import_module(f"hf_attn_dynamics.models.{file}"), name)
        assert cls is getattr(had, name)
        if auto != "AutoConfig":
            assert cls.config_class.model_type == model_type


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LEXICAL_MODELS)
def test_auto_classes_bring_back_the_same_model(name, dtype, tmp_path):
    model = tiny_lexical(name).to(dtype)
    model.save_pretrained(tmp_path)
    back = getattr(transformers, AUTO_OF[name]).from_pretrained(tmp_path, dtype="auto")
    assert type(back) is type(model)
    assert type(back.config) is type(transformers.AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    assert not back.training
    found, expected = (one(IDS, labels=labelled(name)) for one in (back, model))
    assert found.logits.equal(expected.logits)
    assert found.loss.equal(expected.loss)
    assert found.logits.dtype == dtype


def test_the_saved_code_suffices_where_the_package_is_not_installed(tmp_path):
    checkpoints = []
    for name, auto in AUTO_OF.items():
        folder = tmp_path / name
        checkpoints.append((tiny_lexical(name), folder, auto))
        checkpoints[-1][0].save_pretrained(folder)
    lstm, proxy = (
        {path.name for path in (tmp_path / name).glob("*.py")}
        for name in ("LstmForSequenceClassification", "ProxyForSeq2Seq")
    )
    shared = {
        "compat.py",
        "input_checks.py",
        "resizing.py",
        "embedding_words.py",
        "configuration_checks.py",
        "saved_code.py",
        "own_architectures.py",
        "size_limits.py",
        "number_checks.py",
        "precision.py",
        "pytorch_initialization.py",
        "ignored_labels.py",
        "token_mask.py",
    }
    assert lstm == shared | {"modeling_lstm.py", "configuration_lstm.py", "freezing.py", "masked_lstm.py"}
    assert proxy == shared | {"modeling_proxy.py", "configuration_proxy.py"}
    assert_saved_code_suffices(checkpoints, tmp_path)


@pytest.mark.parametrize("name", ["LstmSeq2SeqForConditionalGeneration", "LstmForSequenceClassification"])
@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ({}, lambda key: False),
        ({"attention": "uniform"}, lambda key: False),
        ({"attention": "frozen"}, lambda key: key.startswith("attention.")),
        ({"train_attention_only": True}, lambda key: not key.startswith("attention.")),
    ],
    ids=["learned", "uniform", "frozen", "attention-only"],
)
def test_what_is_frozen_stays_frozen_in_a_checkpoint(name, settings, frozen, tmp_path):
    model = tiny_lexical(name, **settings)
    model.save_pretrained(tmp_path)
    loaded, _ = type(model).from_pretrained(tmp_path, output_loading_info=True)
    for one in (model, loaded, getattr(transformers, AUTO_OF[name]).from_pretrained(tmp_path)):
        names = {key: not parameter.requires_grad for key, parameter in one.named_parameters()}
        assert names == {key: frozen(key) for key in names}
        assert any(key.startswith("attention.") for key in names) == (settings != {"attention": "uniform"})


def test_a_checkpoint_can_be_frozen_when_it_is_loaded(tmp_path):
    tiny_lexical("LstmForSequenceClassification").save_pretrained(tmp_path)
    frozen = had.LstmForSequenceClassification.from_pretrained(tmp_path, train_attention_only=True)
    trained = {key.split(".")[0] for key, parameter in frozen.named_parameters() if parameter.requires_grad}
    assert trained == {"attention"}


def test_a_classifier_starts_from_a_checkpoint_with_other_classes(tmp_path):
    model = tiny_lexical("LstmForSequenceClassification")
    model.save_pretrained(tmp_path)
    other = had.LstmForSequenceClassification.from_pretrained(
        tmp_path, num_labels=4, ignore_mismatched_sizes=True, dtype="auto"
    )
    assert other.classifier.weight.shape == (4, 8)
    assert 0 < other.classifier.weight.abs().max() <= 8**-0.5
    assert other.lstm.weight_hh_l0.equal(model.lstm.weight_hh_l0)


@pytest.mark.parametrize("name", LEXICAL_MODELS)
def test_a_configuration_for_much_more_than_the_weights_hold_takes_no_memory(name, tmp_path):
    model = tiny_lexical(name)
    model.config.vocab_size, model.config.embedding_size = 2**24, 2**12
    # As in an edited file: the weights stay as they are.
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs 6\d,...,...,... elements that are missing from the weights"):
        type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("LstmForSequenceClassification", {"attention": "unifrom"}, "attention must be one of learned, .* 'unifrom'"),
        (
            "LstmForSequenceClassification",
            {"attention": "uniform", "train_attention_only": True},
            "train_attention_only needs attention='learned', got 'uniform'",
        ),
        ("LstmSeq2SeqForConditionalGeneration", {"readout": "mpl"}, "readout must be one of mlp, additive, got 'mpl'"),
        ("LstmSeq2SeqForConditionalGeneration", {"pad_token_id": 77}, "from 0 to 10 .vocab_size is 11., got 77"),
        ("LstmSeq2SeqForConditionalGeneration", {"num_attention_heads": 0}, "must be an integer from 1 .* got 0"),
        ("ProxyForSeq2Seq", {"embedding_std": -1.0}, "embedding_std must not be negative, got -1.0"),
    ],
)
def test_values_are_checked_as_well_when_a_checkpoint_is_loaded_with_them_or_they_are_assigned(
    name, changes, message, tmp_path
):
    model = tiny_lexical(name)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        type(model).from_pretrained(tmp_path, **changes)
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(ValueError, match=message):
        type(model)(model.config)
