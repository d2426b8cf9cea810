# Licensed under the Apache License, Version 2.0.
"""Rows of a corpus against single sentences, one after the other."""

import pytest
import torch
from tiny_lstms import CLASSES, LEXICAL_MODELS, SOURCES, TARGETS, labels_of, tiny_lexical
from torch.nn.functional import cross_entropy

from hf_attn_dynamics import (
    AgreementTracker,
    IbmModel1,
    agreement,
    ibm_rows,
    kendall_tau,
    lexical_probe,
    optimal_attention,
    row_mask,
    source_rows,
)
from hf_attn_dynamics.analysis.lexical.rows import performance


LSTM, CLASSIFIER = "LstmSeq2SeqForConditionalGeneration", "LstmForSequenceClassification"
# Which quantities a model has.
CASES = [
    (name, quantity)
    for name in LEXICAL_MODELS
    for quantity in ("attention", "probe", "saliency")
    if quantity != "attention" or name.startswith("Lstm")
]


def batch_of(name, rows, extra=0):
    """Some of the sentences, with more padding than they need."""
    sources = [SOURCES[row] for row in rows]
    length = max(map(len, sources)) + extra
    ids = torch.tensor([[*words, *[0] * (length - len(words))] for words in sources])
    labels = labels_of([TARGETS[row] for row in rows], extra) if "Seq2Seq" in name else CLASSES[rows]
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def whole(name):
    return [batch_of(name, list(range(6)))]


def alone(name):
    return [batch_of(name, [row]) for row in range(6)]


def words_of(rows, mask):
    """Values of the words of each row."""
    return torch.cat([row[is_real] for row, is_real in zip(rows, mask)])


def slow_rows(model, batches, quantity):
    """Values of the words, for sentences that are alone, one output word after the other."""
    values = []
    for batch in batches:
        if quantity == "attention":
            if batch["labels"].dim() == 1:
                rows = model(**batch).attention_weights
            else:
                rows = model(**batch, output_attentions=True).cross_attentions[0].mean(1)[0]
        elif quantity == "probe":
            rows = lexical_probe(model, batch).log_odds.flatten(0, -2)
        else:
            rows = slow_saliency(model, batch)
        values.append(rows.detach().flatten())
    return torch.cat(values)


def slow_saliency(model, batch):
    """Minus the derivative by a factor of each word, as a difference."""
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    rest = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}

    def losses(factors):
        logits = model(inputs_embeds=embeddings * factors[:, None], **rest).logits.flatten(0, -2)
        return cross_entropy(logits, batch["labels"].flatten(), reduction="none")

    columns, length = [], embeddings.shape[1]
    for place in range(length):
        change = torch.zeros(length, dtype=embeddings.dtype)
        change[place] = 1e-5
        columns.append(-(losses(1 + change) - losses(1 - change)) / 2e-5)
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("name", "quantity"), CASES)
def test_rows_are_those_of_single_sentences(name, quantity):
    model = tiny_lexical(name)
    found = words_of(source_rows(model, whole(name), quantity), row_mask(whole(name)))
    with torch.no_grad():
        torch.testing.assert_close(found, slow_rows(model, alone(name), quantity), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "quantity"), CASES)
def test_neither_padding_nor_batches_change_rows(name, quantity):
    model = tiny_lexical(name)
    batches = [batch_of(name, [0, 1, 2], extra=3), batch_of(name, [3], extra=1), batch_of(name, [4, 5])]
    expected = words_of(source_rows(model, whole(name), quantity), row_mask(whole(name)))
    torch.testing.assert_close(words_of(source_rows(model, batches, quantity), row_mask(batches)), expected)


def test_rows_leave_a_model_in_its_mode_and_without_gradients():
    model = tiny_lexical(LSTM, dropout=0.5).train()
    rows = {name: source_rows(model, whole(LSTM), name) for name in ("attention", "probe", "saliency")}
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, values in rows.items():
        assert not values.requires_grad
        assert torch.equal(values, source_rows(model, whole(LSTM), name))


def test_attention_is_the_mean_of_heads():
    model = tiny_lexical(LSTM, num_attention_heads=3)
    batch = whole(LSTM)[0]
    with torch.no_grad():
        heads = model(**batch, output_attentions=True).cross_attentions[0]
    rows = source_rows(model, [batch], "attention")
    torch.testing.assert_close(rows, heads.mean(1)[batch["labels"] != -100])
    torch.testing.assert_close(rows.sum(1), torch.ones_like(rows[:, 0]))


def test_optimal_attention_has_the_smallest_loss():
    model = tiny_lexical(LSTM, readout="additive")
    batch = batch_of(LSTM, [1, 3])
    rows, mask = source_rows(model, [batch], "optimal_attention"), row_mask([batch])
    contexts, states = model.word_contexts(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
    contexts, states = contexts[:, 0], states[:, :, 0]

    def losses(attention):
        weights = attention.new_zeros(*batch["labels"].shape, mask.shape[1])
        weights[batch["labels"] != -100] = attention
        logits = model.readout(weights @ contexts, states)
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")

    with torch.no_grad():
        best = losses(rows)
        assert best.sum() < losses(source_rows(model, [batch], "attention")).sum()
        torch.manual_seed(0)
        for _ in range(20):
            other = torch.rand_like(rows).masked_fill(~mask, 0)
            assert (losses(other / other.sum(1, keepdim=True)) >= best - 2e-6).all()
        output = model.readout.output
        direct = optimal_attention(
            contexts @ output.weight.T, batch["labels"], output(states), batch["attention_mask"]
        ).attention
    torch.testing.assert_close(rows, direct[batch["labels"] != -100], rtol=0, atol=1e-3)


@pytest.mark.parametrize("quantity", ["attention", "probe", "saliency", "optimal_attention"])
def test_a_decoder_reads_what_it_is_given(quantity):
    model, batch = tiny_lexical(LSTM, readout="additive"), batch_of(LSTM, [1, 3])
    read = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    # The first word of each target is read, but not asked for.
    labels = torch.cat([torch.full_like(read[:, :1], -100), batch["labels"][:, 1:]], 1)
    found = source_rows(model, [{**batch, "labels": labels, "decoder_input_ids": read}], quantity)
    expected = source_rows(model, [batch], quantity)[(labels != -100)[batch["labels"] != -100]]
    torch.testing.assert_close(found, expected)


def test_a_proxy_reads_no_decoder():
    model, batch = tiny_lexical("ProxyForSeq2Seq"), batch_of("ProxyForSeq2Seq", [1, 3])
    found = lexical_probe(model, {**batch, "decoder_input_ids": batch["labels"].clamp(min=0)})
    torch.testing.assert_close(found, lexical_probe(model, batch), equal_nan=True)


@pytest.mark.parametrize("name", [LSTM, CLASSIFIER])
def test_a_model_that_returns_tuples_has_the_same_rows(name):
    model = tiny_lexical(name)
    expected = {quantity: source_rows(model, whole(name), quantity) for own, quantity in CASES if own == name}
    loss, figures = model(**whole(name)[0]).loss, performance(model, whole(name))
    model.config.return_dict = False
    assert model(**whole(name)[0])[0] == loss
    assert performance(model, whole(name)) == figures
    for quantity, rows in expected.items():
        assert torch.equal(source_rows(model, whole(name), quantity), rows)


@pytest.mark.parametrize("padded_left", [False, True])
def test_alignment_of_ibm_model_1_lies_where_the_words_are(padded_left):
    model = IbmModel1(null_word=False).fit([([5, 6], [7, 8]), ([5], [7]), ([6, 9], [8])], 3)
    ids = [[0, 5, 6], [0, 0, 6]] if padded_left else [[5, 6, 0], [6, 0, 0]]
    ids = torch.tensor(ids)
    batch = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([[7, 8], [4, -100]]),
    }
    rows, mask = ibm_rows(model, [batch]), row_mask([batch])
    expected = torch.from_numpy(model.alignment_probabilities([([5, 6], [7, 8])])[0])
    torch.testing.assert_close(torch.stack([row[is_real] for row, is_real in zip(rows[:2], mask[:2])]), expected)
    # No word of its source was ever seen with the last one.
    assert rows[2].isnan().all()
    assert agreement(rows, rows, mask).item() == 1


@pytest.mark.parametrize("name", [LSTM, CLASSIFIER])
def test_performance_counts_all_labels_alike(name):
    model = tiny_lexical(name)
    batches = [batch_of(name, [0, 1, 2, 3], extra=2), batch_of(name, [4, 5])]
    losses, hits = [], []
    with torch.no_grad():
        for batch in alone(name):
            logits, labels = model(**batch).logits.flatten(0, -2), batch["labels"].flatten()
            losses.append(cross_entropy(logits, labels, reduction="none"))
            hits.append(logits.argmax(-1) == labels)
    figures = performance(model, batches)
    assert figures["loss"] == pytest.approx(torch.cat(losses).mean().item())
    assert figures["accuracy"] == pytest.approx(torch.cat(hits).double().mean().item())


def test_a_tracker_compares_each_model_with_the_reference():
    reference = source_rows(tiny_lexical(LSTM), whole(LSTM), "attention")
    tracker = AgreementTracker(whole(LSTM), "probe", reference)
    other = tiny_lexical(LSTM, attention="uniform")
    other.readout.output.bias.data.add_(torch.randn(11, dtype=torch.float64))
    rows, mask = source_rows(other, whole(LSTM), "probe"), row_mask(whole(LSTM))
    assert tracker(other) == {
        **performance(other, whole(LSTM)),
        "agreement": agreement(reference, rows, mask).item(),
        "kendall_tau": kendall_tau(reference, rows, mask).item(),
    }
    same = AgreementTracker(whole(LSTM), "attention", reference)(tiny_lexical(LSTM))
    assert same["agreement"] == 1
    assert same["kendall_tau"] == pytest.approx(1)
    assert set(AgreementTracker(whole(LSTM))(other)) == {"loss", "accuracy"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: source_rows(model, whole(LSTM), "gamma"), "quantity must be attention, probe, saliency"),
        (lambda model: source_rows(model, [], "probe"), "batches are empty"),
        (
            lambda model: row_mask([{"input_ids": SOURCES, "labels": CLASSES}]),
            "batch 0 of batches has no attention_mask",
        ),
        (
            lambda model: source_rows(model, whole(LSTM), "optimal_attention"),
            "whose readout is not additive, .* create it with readout='additive'",
        ),
        (
            lambda model: source_rows(tiny_lexical("ProxyForSeq2Seq"), whole(LSTM), "attention"),
            "model is a ProxyForSeq2Seq, not an LSTM model with attention",
        ),
        (
            lambda model: performance(model, [{**whole(LSTM)[0], "labels": torch.full((6, 3), -100)}]),
            "batches have no labels",
        ),
        (lambda model: AgreementTracker(whole(LSTM), "probe"), "quantity='probe' needs a reference"),
        (
            lambda model: AgreementTracker(whole(LSTM), "probe", torch.zeros(3, 4)),
            r"reference has shape \(3, 4\), but the batches have",
        ),
    ],
    ids=["quantity", "empty", "mask", "readout", "proxy", "labels", "reference", "other batches"],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(tiny_lexical(LSTM))


@pytest.mark.parametrize("quantity", ["mask", "attention"])
def test_batches_without_any_label_have_no_rows(quantity):
    name = "LstmForSequenceClassification"
    batch = batch_of(name, [0, 1])
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with pytest.raises(ValueError, match="batches have no labels"):
        row_mask([batch]) if quantity == "mask" else source_rows(tiny_lexical(name), [batch], quantity)
