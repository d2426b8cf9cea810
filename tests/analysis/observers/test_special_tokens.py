# Licensed under the Apache License, Version 2.0.
"""Observers that were not given the ids of special tokens take them from the tokenizer that `observe` is given."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_model, vivid
from transformers import AutoModel, AutoTokenizer, BertTokenizerFast, Trainer, TrainingArguments

import hf_attn_dynamics as had


WORDS = [f"w{number}" for number in range(55)]
COUNTS = torch.arange(60, 0, -1)
TEXTS = ["w9 w3 w9 w20 w41", "w7 w30 w7", "w1 w2 w3 w4 w5 w1"]


@pytest.fixture(scope="module")
def tokenizer():
    return BertTokenizerFast(
        vocab={word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    )


@pytest.fixture(scope="module")
def batch(tokenizer):
    return dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))


def model_of(kind="bert", head="Model"):
    return vivid(tiny_model(kind, head)).double()


def results(model, batch, *observers, **arguments):
    with torch.no_grad(), had.observe(model, *observers, **arguments) as seen:
        model(**batch)
    return seen.results()


def observers(ends=None, special=None):
    return (
        had.HeadConfidence(ends),
        had.RelativePositions(5, ends),
        had.DuplicateTokens(special),
        had.RareWords(COUNTS, special, frequent=10),
    )


def test_a_tokenizer_says_which_tokens_do_not_count(tokenizer, batch, caplog):
    assert (tokenizer.eos_token_id, tokenizer.sep_token_id, sorted(tokenizer.all_special_ids)) == (
        None,
        3,
        [0, 1, 2, 3, 4],
    )
    model = model_of()
    assert model.config.eos_token_id is None
    with caplog.at_level("WARNING"):
        found = results(model, batch, *observers(), tokenizer=tokenizer)
    assert "names no end of sentence" not in caplog.text
    assert found == results(model, batch, *observers([3], [0, 1, 2, 3, 4]))
    assert found["confidence"] != results(model, batch, had.HeadConfidence([]))["confidence"]


def test_ids_that_are_given_stay(tokenizer, batch):
    model = model_of()
    for given in (([], []), ([9], [2, 9])):
        assert results(model, batch, *observers(*given), tokenizer=tokenizer) == results(
            model, batch, *observers(*given)
        )


def test_a_tokenizer_comes_before_the_configuration_and_one_without_an_end_after_it(tokenizer, batch):
    model = model_of("roberta")
    assert model.config.eos_token_id == 2
    silent = SimpleNamespace(all_special_ids=[], eos_token_id=None, sep_token_id=None)
    for given, ends in ((tokenizer, [3]), (silent, [2]), (None, [2])):
        found = results(model, batch, had.HeadConfidence(), tokenizer=given)
        assert found == results(model, batch, had.HeadConfidence(ends)), ends


@pytest.mark.parametrize("observer", [had.DuplicateTokens(), had.RareWords(COUNTS, frequent=10)])
def test_observers_that_need_special_tokens_ask_for_them(observer, batch):
    with (
        had.observe(model := model_of(), observer),
        pytest.raises(ValueError, match=r"or excluded_ids=tokenizer\."),
    ):
        model(**batch)


def test_maps_are_shown_by_the_same_rule(tokenizer, batch):
    model, positions, explicit = model_of(), had.RelativePositions(5), had.RelativePositions(5, [3])
    maps = had.attention_maps(model, batch)["encoder"]
    had.show_maps(model, batch, maps, positions, tokenizer=tokenizer)
    had.show_maps(model, batch, maps, explicit)
    assert positions.compute() == explicit.compute()


@pytest.mark.parametrize("told", ["by the trainer", "by itself", "by a processor"])
def test_a_timeline_takes_them_from_the_tokenizer_of_its_trainer_or_its_own(told, tokenizer, batch, tmp_path):
    data = Dataset.from_dict({"input_ids": [[2, 7, 8, 3]] * 4, "labels": [0, 1] * 2})

    def history(*chosen, own=None, processing_class=None):
        watch = had.HeadDynamicsCallback(chosen, [batch], every=1, tokenizer=own)
        args = TrainingArguments(
            tmp_path, max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        )
        model = model_of(head="ForSequenceClassification")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[watch], processing_class=processing_class)
        trainer.train()
        return watch.history

    by_trainer = {"by the trainer": tokenizer, "by a processor": SimpleNamespace(tokenizer=tokenizer)}
    found = history(
        had.HeadConfidence(),
        had.DuplicateTokens(),
        own=tokenizer if told == "by itself" else None,
        processing_class=by_trainer.get(told),
    )
    explicit = history(had.HeadConfidence([3]), had.DuplicateTokens(tokenizer.all_special_ids))
    assert len(found) == len(explicit) > 0
    assert found.to_csv() == explicit.to_csv()


@pytest.mark.parametrize("given", ["bert-base-uncased", 3, torch.nn.Module()])
def test_what_is_no_tokenizer_is_refused(given, batch):
    message = f"tokenizer must be the tokenizer of the model, got {type(given).__name__}"
    with pytest.raises(ValueError, match=message):
        results(model_of(), batch, had.HeadConfidence(), tokenizer=given)
    with pytest.raises(ValueError, match=message):
        had.HeadDynamicsCallback([had.HeadConfidence()], [batch], tokenizer=given)


def test_minilm_leaves_out_its_last_token_with_its_tokenizer(real_models):
    folder = real_models / "minilm"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(["The dog that the cats saw was asleep.", "It rained."], padding=True, return_tensors="pt"))
    found = results(model, batch, had.HeadConfidence(), tokenizer=tokenizer)
    assert found == results(model, batch, had.HeadConfidence(excluded_ids=[tokenizer.sep_token_id]))
    assert found["confidence"].mean() < results(model, batch, had.HeadConfidence([]))["confidence"].mean()
