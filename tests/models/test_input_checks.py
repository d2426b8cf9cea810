# Licensed under the Apache License, Version 2.0.
"""Inputs that no model can read: each class refuses each of them by one message, and changes none that it is given."""

import copy
import warnings

import pytest
import torch
from every_model import MODELS, inputs_of, model_of
from slow_score_norm import padded
from tiny_lstms import IDS, TARGETS
from tiny_models import KINDS, tiny_model

from hf_attn_dynamics.models.input_checks import check_integers


def changed(values, value):
    """The same tensor with another value in its second row."""
    values = values.clone()
    values[1].view(-1)[0] = value
    return values


def bad_inputs(kind, name):
    """Arguments to change, and what the message says: argument, value and limit."""
    batch = inputs_of(kind, name)
    ids, size = batch["input_ids"], 11 if kind == "lexical" else 60
    rows, length = ids.shape
    top = size - 1
    yield {"input_ids": changed(ids, size)}, rf"input_ids must be from 0 to {top} \(vocab_size is {size}\), got {size}"
    yield {"input_ids": changed(ids, -1)}, rf"input_ids must be from 0 to {top} \(vocab_size is {size}\), got -1"
    yield {"input_ids": ids.float()}, r"input_ids must be integers of type int64 or int32, got torch\.float32"
    yield (
        {"input_ids": ids[0], "attention_mask": None},
        rf"input_ids must have shape \(batch, length\), got \({length},\)",
    )
    nothing = {name: value[:0] for name, value in batch.items()}
    yield nothing, rf"input_ids has shape \(0, {length}\): the batch is empty"
    empty = {"input_ids": ids[:, :0], "attention_mask": batch["attention_mask"][:, :0]}
    yield empty, rf"input_ids has shape \({rows}, 0\): sentence 0 of the batch is empty"
    shape = (
        rf"attention_mask must have shape \({rows}, {length}\), one value for each .*, got \({rows}, {length - 1}\)"
    )
    yield {"attention_mask": batch["attention_mask"][:, 1:]}, shape
    if kind not in ("lexical", "marian"):
        kinds = torch.zeros_like(ids)
        for value in (2, -1):
            message = rf"token_type_ids must be from 0 to 1 \(type_vocab_size is 2\), got {value}"
            yield {"token_type_ids": changed(kinds, value)}, message
        yield {"token_type_ids": kinds[:, 1:]}, "token_type_ids must have shape"
        positions = r"position_ids must be from 0 to 39 \(max_position_embeddings is 40\), got 40"
        yield {"position_ids": changed(kinds, 40)}, positions
    if kind == "marian" or name == "LstmSeq2SeqForConditionalGeneration":
        decoder_ids = batch["input_ids"] if kind == "marian" else padded(TARGETS)
        for value in (size, -1):
            yield (
                {"decoder_input_ids": changed(decoder_ids, value)},
                rf"decoder_input_ids must be from 0 to .* got {value}",
            )
        other = {"decoder_input_ids": decoder_ids[:1], **({"labels": None} if "labels" in batch else {})}
        yield other, f"has 1 sentences, but the source has {rows}"
    if "labels" in batch and not batch["labels"].is_floating_point():
        for value in (size + 1, -5):
            wrong = changed(batch["labels"], value)
            yield (
                {"labels": wrong},
                rf"labels must be from 0 to \d+ \(.* is \d+\), or -100, which is ignored, got {value}",
            )
        yield {"labels": batch["labels"][:2]}, r"labels (must )?have shape|the target has 2 sentences, but the source"
    if kind != "marian" and name != "BowAttentionForSequenceClassification":
        embeds = torch.zeros(rows, length, 7)
        yield (
            {"input_ids": None, "inputs_embeds": embeds},
            r"inputs_embeds must have shape \(batch, length, \d+\), got",
        )
    if "next_sentence_label" in batch:
        wrong = changed(batch["next_sentence_label"], 2)
        yield {"next_sentence_label": wrong}, r"next_sentence_label must be from 0 to 1 .* got 2"


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_each_bad_input_is_refused_by_one_message_that_names_it_its_value_and_the_limit(kind, name):
    model, batch = model_of(kind, name), inputs_of(kind, name)
    with torch.no_grad():
        model(**batch)  # what is changed below is all that is wrong
        for change, message in bad_inputs(kind, name):
            with pytest.raises(ValueError, match=message) as error:
                model(**{**batch, **change})
            assert error.value.__cause__ is None, change


@pytest.mark.parametrize(("kind", "name"), [("marian", "MTModel"), ("lexical", "LstmSeq2SeqForConditionalGeneration")])
def test_generation_refuses_what_a_forward_pass_refuses(kind, name):
    model, ids = model_of(kind, name), inputs_of(kind, name)["input_ids"]
    for wrong, message in (
        (changed(ids, 60), "input_ids must be from 0 to .* got 60"),
        (changed(ids, -2), "input_ids must be from 0 to .* got -2"),
        (ids[:0], "the batch is empty"),
        (ids[:, :0], "sentence 0 of the batch is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(wrong, max_new_tokens=2)


@pytest.mark.parametrize(("kind", "name"), [("marian", "MTModel"), ("lexical", "LstmSeq2SeqForConditionalGeneration")])
@pytest.mark.parametrize("beams", [1, 4])
def test_generation_changes_nothing_that_it_is_given(kind, name, beams):
    model, batch = model_of(kind, name), inputs_of(kind, name)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    encoded = model.get_encoder()(**inputs, return_dict=True)
    given = {**inputs, "encoder_outputs": encoded, "max_new_tokens": 3, "num_beams": beams}
    kept, tensors = dict(given), dict(encoded)
    before = {name: value.clone() for name, value in {**tensors, **inputs}.items() if torch.is_tensor(value)}
    found = [model.generate(**given) for _ in range(2)]
    assert torch.equal(*found)
    assert given == kept
    assert encoded.keys() == tensors.keys()
    assert all(encoded[name] is value for name, value in tensors.items())
    assert all(torch.equal({**tensors, **inputs}[name], value) for name, value in before.items())


@pytest.mark.parametrize(("kind", "name"), MODELS)
def test_a_forward_pass_changes_nothing_that_it_is_given(kind, name):
    model, batch = model_of(kind, name).train(), inputs_of(kind, name)
    given, before = dict(batch), copy.deepcopy(batch)
    model(**given)
    assert given.keys() == before.keys()
    assert all(given[name] is batch[name] and torch.equal(batch[name], before[name]) for name in before)


def test_a_source_that_is_encoded_already_is_held_against_its_mask_and_its_target():
    model, batch = model_of("marian", "MTModel"), inputs_of("marian", "MTModel")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    given = {"encoder_outputs": model.get_encoder()(ids, mask), "decoder_input_ids": ids}
    model(**given, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(8, 17\), .* got \(8, 16\)"):
        model(**given, attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="the target has 1 sentences, but the source has 8"):
        model(**{**given, "decoder_input_ids": ids[:1]}, attention_mask=mask)
    with pytest.raises(ValueError, match="needs a target: pass decoder_input_ids, decoder_inputs_embeds or"):
        model(input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"labels have shape \(8, 16\), but the decoder input has \(8, 17\)"):
        model(**given, attention_mask=mask, labels=ids[:, 1:])


def test_the_mask_of_hidden_states_that_a_decoder_attends_to_is_of_their_shape():
    settings = {"is_decoder": True, "add_cross_attention": True, "guidance": None}
    model, states = tiny_model("bert", "Model", **settings), torch.ones(1, 5, 16)
    inputs = {"input_ids": torch.tensor([[5, 6]]), "encoder_hidden_states": states}
    model(**inputs, encoder_attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match=r"encoder_attention_mask must have shape \(1, 5\), .* got \(1, 2\)"):
        model(**inputs, encoder_attention_mask=torch.ones(1, 2))


def test_a_mask_of_a_text_that_is_cached_in_part_is_of_all_of_it():
    model = tiny_model("bert", "Model", is_decoder=True, guidance=None)
    ids = torch.tensor([[5, 6, 7, 8]])
    whole = model(ids, attention_mask=torch.ones(1, 4)).last_hidden_state
    first = model(ids[:, :3], use_cache=True, attention_mask=torch.ones(1, 3))
    second = model(ids[:, :3], use_cache=True, attention_mask=torch.ones(1, 3)).cache
    rest = model(ids[:, 3:], cache=first.cache, attention_mask=torch.ones(1, 4))
    torch.testing.assert_close(rest.last_hidden_state, whole[:, 3:])
    with pytest.warns(FutureWarning, match="Use `cache` instead"):
        older = model(ids[:, 3:], past_key_values=second, attention_mask=torch.ones(1, 4))
    assert torch.equal(older.last_hidden_state, rest.last_hidden_state)


def test_the_state_of_a_decoder_that_is_given_stays_as_it_is():
    model, batch = model_of("lexical", "LstmSeq2SeqForConditionalGeneration"), {"input_ids": IDS}
    state = model(**batch, decoder_input_ids=torch.ones(6, 2, dtype=torch.long), use_cache=True).cache
    before = state.hidden.clone(), state.cell.clone(), state.length
    words = torch.ones(6, 3, dtype=torch.long)
    model(**batch, decoder_input_ids=words[:, 2:], cache=state, use_cache=True)
    model.generate(IDS, decoder_input_ids=words, cache=state, num_beams=3, max_new_tokens=2)
    assert torch.equal(state.hidden, before[0])
    assert torch.equal(state.cell, before[1])
    assert state.length == before[2]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_the_limits_and_ignored_ones_are_taken(kind):
    batch = inputs_of(kind, "MTModel" if kind == "marian" else "ForMaskedLM")
    model = model_of(kind, "MTModel" if kind == "marian" else "ForMaskedLM")
    for value in (0, 59, -100):
        assert model(**{**batch, "labels": changed(batch["labels"], value)}).loss.isfinite()


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_labels_that_are_no_classes_are_not_held_to_be_some(problem):
    model = tiny_model("bert", "ForSequenceClassification", num_labels=3, problem_type=problem)
    batch = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "labels": torch.tensor([[0.0, 1.0, 7.5], [1.0, 0.0, -2.0]])}
    assert model(**batch).loss.isfinite()


def test_labels_of_padding_may_be_anything_where_a_mask_leaves_them_out():
    model, batch = tiny_model("electra"), inputs_of("electra", "ForPreTraining")
    expected = model(**batch).loss
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, 7)
    assert model(**batch).loss == expected


def test_a_larger_table_that_was_put_in_serves_more_tokens():
    model = tiny_model("bert", "Model")
    model.set_input_embeddings(torch.nn.Embedding(70, 16))
    with torch.no_grad():
        assert model(torch.tensor([[69]])).last_hidden_state.isfinite().all()
        with pytest.raises(ValueError, match=r"input_ids must be from 0 to 69 .* got 70"):
            model(torch.tensor([[70]]))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_values_are_looked_at_on_cpus_only_and_not_where_there_are_none():
    """Accelerators would be waited for; the meta device stands for them here."""
    wrong = torch.tensor([7])
    with pytest.raises(ValueError, match=r"ids must be from 0 to 6 \(size is 7\), got 7"):
        check_integers("ids", wrong, 7, "size")
    check_integers("ids", wrong.to("meta"), 7, "size")
    # Transforms of functions hand in tensors without values.
    torch.vmap(lambda ids: check_integers("ids", ids, 7, "size") or ids)(wrong[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        # Deprecated, but people have such code.
        torch.jit.trace(lambda ids: check_integers("ids", ids, 7, "size") or ids + 1, wrong, check_trace=False)
