# Licensed under the Apache License, Version 2.0.
"""Vocabularies that change their size after a model was built: everything that has a row for each word follows."""

import pytest
import torch
from every_model import inputs_of, model_of
from tiny_lstms import IDS, LEXICAL_MODELS, labels_of, tiny_lexical
from tiny_models import CLASSES, KINDS, batch_for, headwise_class, tiny_config, tiny_model

import hf_attn_dynamics as had
from hf_attn_dynamics.models.resizing import resize_table


BOW = "BowAttentionForSequenceClassification"
MODELS = [
    *((kind, name, {}) for kind, name in CLASSES),
    *((kind, name, {"tie_word_embeddings": False}) for kind, name in CLASSES if "LM" in name or "Pre" in name),
    *(("electra", "ForJointPreTraining", {"tie_word_embeddings": tied}) for tied in (True, False)),
    ("marian", "MTModel", {"tie_word_embeddings": False}),
    ("marian", "Model", {"tie_word_embeddings": False}),
    *(("lexical", name, {}) for name in (*LEXICAL_MODELS, BOW)),
    ("lexical", "ProxyForSeq2Seq", {"target_vocab_size": None}),
    ("lexical", "LstmSeq2SeqForConditionalGeneration", {"readout": "additive", "target_vocab_size": 11}),
    ("lexical", "LstmSeq2SeqForConditionalGeneration", {"share_encoder_decoder_embeddings": False}),
    ("lexical", BOW, {"classifier": "mlp", "convolution": True, "freeze_keys": True}),
]


def built(kind, name, changes):
    if not changes:
        return model_of(kind, name)
    torch.manual_seed(0)
    if kind != "lexical":
        return headwise_class(kind, name)(tiny_config(kind, **changes)).eval()
    if name == BOW:
        return had.BowAttentionForSequenceClassification(had.BowAttentionConfig(vocab_size=11, **changes)).eval()
    return tiny_lexical(name, **changes)


def answer(outputs):
    """Logits of words or classes, or states of a model without a head."""
    return next(
        outputs[name]
        for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state")
        if name in outputs
    )


def predicts_words(kind, name):
    return (
        "LM" in name
        or "MTModel" in name
        or "Seq2Seq" in name
        or "Joint" in name
        or (kind, name) == ("bert", "ForPreTraining")
    )


def target_words(model):
    """How many words there are to predict."""
    for name in ("num_target_words", "decoder_vocab_size", "target_vocab_size"):
        if getattr(model.config, name, None) is not None:
            return getattr(model.config, name)
    return model.config.vocab_size


@pytest.mark.parametrize("settings", [{"new_num_tokens": 7}, {"new_num_tokens": -2}, {"pad_to_multiple_of": 8}])
@pytest.mark.parametrize(("kind", "name", "changes"), MODELS)
def test_a_model_of_another_size_has_its_words_learns_the_last_one_and_is_loaded_again(
    kind, name, changes, settings, tmp_path
):
    model, batch = built(kind, name, changes), inputs_of(kind, name)
    before = model.config.vocab_size
    kept = before + min(0, settings.get("new_num_tokens", 0))
    batch = {key: value.clamp(max=min(kept, target_words(model)) - 1) for key, value in batch.items()}
    plain = {key: value for key, value in batch.items() if "label" not in key and "positions" not in key}
    if kind == "lexical" and name.startswith("LstmSeq2Seq"):
        plain["decoder_input_ids"] = plain["input_ids"]
    with torch.no_grad():
        expected = answer(model(**plain))
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    if "new_num_tokens" in settings:
        settings = {"new_num_tokens": before + settings["new_num_tokens"]}
    table = model.resize_token_embeddings(**settings)
    size = settings.get("new_num_tokens", 8 * (before // 8 + 1))
    assert table is model.get_input_embeddings()
    assert model.config.vocab_size == table.num_embeddings == len(table.weight) == size
    assert {key: p.requires_grad for key, p in model.named_parameters()}.items() <= trained.items()
    with torch.no_grad():
        found = answer(model(**plain))
    words = min(found.shape[-1], expected.shape[-1])
    torch.testing.assert_close(found[..., :words], expected[..., :words], rtol=1e-5, atol=1e-6)

    batch["input_ids"][0, 0] = size - 1
    batch.pop("decoder_input_ids", None)
    if predicts_words(kind, name):
        batch["labels"][0, 0] = target_words(model) - 1
    elif kind == "marian":
        batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # what is not saved would start anew
                parameter.add_(0.01 * torch.randn_like(parameter))
    outputs = model(**batch)
    if outputs.get("loss") is not None:
        outputs.loss.backward()
        assert outputs.loss.isfinite()
    if (kind, name) == ("marian", "MTModel") or name.startswith("LstmSeq2Seq"):
        assert model.generate(batch["input_ids"], max_new_tokens=2, num_beams=2).max() < target_words(model)
    model.save_pretrained(tmp_path)
    back, info = type(model).from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(answer(back.eval()(**batch)), answer(outputs))


def test_target_words_follow_source_words_where_the_configuration_has_one_number_for_both():
    """The last target word could not be learnt: 107 embeddings, but a readout of 100 words."""
    model = had.ProxyForSeq2Seq(had.ProxyConfig(vocab_size=100))
    model.resize_token_embeddings(107)
    assert model(torch.tensor([[106]]), labels=torch.tensor([[106]])).loss.isfinite()
    own = had.ProxyForSeq2Seq(had.ProxyConfig(vocab_size=100, target_vocab_size=30))
    own.resize_token_embeddings(107)
    assert own(torch.tensor([[106]])).logits.shape == (1, 1, 30)


@pytest.mark.parametrize("count", [14, 8])
@pytest.mark.parametrize("name", ["ProxyForSeq2Seq", "LstmSeq2SeqForConditionalGeneration"])
def test_target_words_of_a_table_of_their_own_are_resized_by_themselves(name, count, tmp_path):
    changes = {"target_vocab_size": 11}
    if name.startswith("Lstm"):
        changes["share_encoder_decoder_embeddings"] = False
    model, labels = tiny_lexical(name, **changes), labels_of().clamp(max=7)
    expected = model(IDS, labels=labels).logits
    model.resize_decoder_token_embeddings(count)
    found = model(IDS, labels=labels).logits
    assert (model.config.vocab_size, model.config.target_vocab_size, found.shape[-1]) == (11, count, count)
    torch.testing.assert_close(found[..., : min(count, 11)], expected[..., : min(count, 11)])
    labels[0, 0] = count - 1
    assert model(IDS, labels=labels).loss.isfinite()
    model.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(back(IDS, labels=labels).logits, model(IDS, labels=labels).logits)


@pytest.mark.parametrize("count", [67, 56])
@pytest.mark.parametrize("tied", [True, False])
def test_target_tokens_of_marian_with_a_table_of_their_own_are_resized_by_themselves(tied, count, tmp_path):
    changes = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": tied}
    model, batch = tiny_model("marian", **changes), batch_for("marian")
    batch = {name: value.clamp(max=55) for name, value in batch.items()}
    expected = model(**batch).logits
    model.resize_decoder_token_embeddings(count)
    found = model(**batch).logits
    words = min(60, count)
    assert model.lm_head.out_features == count
    assert (model.config.vocab_size, model.config.decoder_vocab_size, found.shape[-1]) == (60, count, count)
    torch.testing.assert_close(found[..., :words], expected[..., :words])
    batch["decoder_input_ids"][0, 0] = count - 1
    model.save_pretrained(tmp_path)
    back = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(back(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("mean_resizing", [True, False])
def test_new_rows_start_at_the_mean_of_the_old_ones_or_as_in_a_new_model(mean_resizing):
    config = had.BowAttentionConfig(vocab_size=400, hidden_size=40, embedding_std=2.0, key_std=0.5)
    model = had.BowAttentionForSequenceClassification(config)
    old = {name: getattr(model, name).weight.clone() for name in ("embeddings", "keys")}
    model.resize_token_embeddings(800, mean_resizing=mean_resizing)
    for name, std in (("embeddings", 2.0), ("keys", 0.5)):
        new = getattr(model, name).weight[400:]
        assert torch.equal(getattr(model, name).weight[:400], old[name])
        if mean_resizing:
            # Noise of 1e-9 times the covariance of the old rows, so that new words are not the same.
            noise = new - old[name].mean(0)
            assert noise.std().item() == pytest.approx(std * 1e-9**0.5, rel=0.1)
        else:
            assert new.std().item() == pytest.approx(std, rel=0.05)


def test_a_table_keeps_its_kind_its_padding_and_what_is_frozen():
    model = tiny_lexical("LstmSeq2SeqForConditionalGeneration", train_attention_only=True)
    kind = type(model.readout.output)
    resize_table(model, model.readout, "output", 13, mean_resizing=True)
    assert type(model.readout.output) is kind
    assert model.readout.output.weight.shape == (13, 6)
    assert not model.readout.output.weight.requires_grad
    assert not model.readout.output.bias.requires_grad
    model.resize_token_embeddings(13)
    assert model.encoder.embeddings.padding_idx == 0
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"attention.query.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_without_a_token_that_the_configuration_names_are_refused_before_anything_changes(kind):
    guidance = {"fraction": 0.5, "patterns": ["first", "period"], "period_token_ids": [58]}
    model = tiny_model(kind, "Model", guidance={"encoder": guidance} if kind == "marian" else guidance)
    with pytest.raises(
        ValueError, match=r"period_token_ids must be a list of token ids below vocab_size 58, got \[58\]"
    ):
        model.resize_token_embeddings(58)
    model.config.pad_token_id = 59
    with pytest.raises(ValueError, match="59 tokens do not include pad_token_id 59; keep more"):
        model.resize_token_embeddings(59)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 60


@pytest.mark.parametrize("name", [*LEXICAL_MODELS, BOW])
def test_sizes_that_a_lexical_model_cannot_have_are_refused_before_anything_changes(name):
    model = model_of("lexical", name)
    model.config.pad_token_id = 9
    for arguments, message in (
        ((9,), "pad_token_id 9"),
        ((0,), "new_num_tokens must be an integer of at least 1, or None, got 0"),
        ((20, 2.5), "a multiple of `2.5`, which is .* Please make sure to pass an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            model.resize_token_embeddings(*arguments)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 11


def test_a_table_that_is_shared_is_resized_as_one():
    with pytest.raises(ValueError, match=r"share embeddings .* call resize_token_embeddings\(\)"):
        tiny_lexical("LstmSeq2SeqForConditionalGeneration").resize_decoder_token_embeddings(14)


def test_without_a_size_nothing_changes():
    for model in (tiny_model("bert"), tiny_lexical("ProxyForSeq2Seq")):
        table = model.get_input_embeddings()
        assert model.resize_token_embeddings() is table


@pytest.mark.parametrize("name", [*LEXICAL_MODELS, BOW])
def test_parameters_of_a_model_that_has_the_size_already_stay_those_of_its_optimizer(name):
    model = model_of("lexical", name)
    before = dict(model.named_parameters())
    model.resize_token_embeddings(11)
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
