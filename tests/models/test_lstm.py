# Licensed under the Apache License, Version 2.0.
"""The LSTM classifier: values, padding, what is trained, and what is refused."""

import pytest
import torch
import transformers
from datasets import Dataset
from slow_lstm import slow_classification
from slow_score_norm import padded
from tiny_lstms import CLASSES, IDS, SOURCES, gradients, tiny_lexical, word_tokenizer

from hf_attn_dynamics import LstmConfig, LstmForSequenceClassification
from hf_attn_dynamics.models import masked_lstm


KINDS = [
    {},
    {"num_hidden_layers": 1, "bidirectional": False},
    {"attention": "uniform"},
    {"attention": "frozen", "num_labels": 3},
    {"num_labels": 4, "bidirectional": False},
]
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def model_of(**changes):
    return tiny_lexical("LstmForSequenceClassification", **changes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "learned")
@pytest.mark.parametrize(("side", "extra"), [("right", 0), ("right", 2), ("left", 1)])
def test_a_padded_batch_gives_what_the_equations_give_for_each_sentence(kind, side, extra):
    model, ids = model_of(**kind), padded(SOURCES, side, extra)
    output = model(ids, labels=CLASSES)
    losses = []
    for row, words in enumerate(SOURCES):
        probabilities, weights = slow_classification(model, words)
        torch.testing.assert_close(output.logits[row].softmax(-1), probabilities, **EXACT)
        torch.testing.assert_close(output.attention_weights[row, ids[row] != 0], weights, **EXACT)
        assert not output.attention_weights[row, ids[row] == 0].any()
        assert not output.states[row, ids[row] == 0].any()
        losses.append(-probabilities[CLASSES[row]].log())
    torch.testing.assert_close(output.loss, torch.stack(losses).mean(), **EXACT)
    torch.testing.assert_close(output.context, (output.attention_weights[..., None] * output.states).sum(1), **EXACT)
    assert (output.scores is None) == (kind.get("attention") == "uniform")


def test_two_classes_have_the_sigmoid_of_one_logit():
    model = model_of()
    logits = model(IDS).logits
    assert not logits[:, 0].any()
    torch.testing.assert_close(logits.softmax(-1)[:, 1], logits[:, 1].sigmoid(), **EXACT)
    assert model.classifier.weight.shape == (1, 8)


class Adapted(torch.nn.Module):
    """A linear layer and what an adapter adds to its output."""

    def __init__(self, base):
        super().__init__()
        self.base, self.added = base, torch.nn.Linear(base.in_features, base.out_features).to(base.weight)

    def forward(self, inputs):
        return self.base(inputs) + self.added(inputs)


def test_what_an_adapter_adds_to_the_classifier_moves_the_odds_of_two_classes():
    model = model_of()
    before = model(IDS)
    model.classifier = Adapted(model.classifier)
    moved = model(IDS).logits.diff() - before.logits.diff()
    torch.testing.assert_close(moved, model.classifier.added(before.context), **EXACT)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "learned")
def test_neither_padding_nor_the_rest_of_the_batch_change_a_gradient(kind):
    model = model_of(**kind)
    expected = gradients(model, model(IDS, labels=CLASSES).loss)
    assert all(gradient.any() for gradient in expected.values())
    alone = [model(padded([words]), labels=label[None]).loss for words, label in zip(SOURCES, CLASSES)]
    torch.testing.assert_close(gradients(model, torch.stack(alone).mean()), expected, **EXACT)
    left = model(padded(SOURCES, "left", 3), labels=CLASSES).loss
    torch.testing.assert_close(gradients(model, left), expected, **EXACT)


def test_a_mask_says_what_is_padding_whatever_stands_there():
    model, mask = model_of(), (IDS != 0).long()
    expected = model(IDS).logits
    torch.testing.assert_close(model(IDS.masked_fill(IDS == 0, 7), mask).logits, expected)
    embedded = model.get_input_embeddings()(IDS).masked_fill(IDS[..., None] == 0, torch.nan)
    torch.testing.assert_close(model(None, mask, inputs_embeds=embedded).logits, expected)
    assert not torch.allclose(model(IDS, torch.ones_like(IDS)).logits, expected)


def test_the_loss_is_the_mean_over_labels_or_over_those_of_the_whole_batch():
    model, labels = model_of(num_labels=3), torch.tensor([0, 1, -100, 2, 0, 1])
    logits = model(IDS).logits
    counted = labels >= 0
    each = logits.logsumexp(-1)[counted] - logits[counted, labels[counted]]
    torch.testing.assert_close(model(IDS, labels=labels).loss, each.mean())
    torch.testing.assert_close(model(IDS, labels=labels, num_items_in_batch=24).loss, each.sum() / 24)


def test_it_has_the_parameters_that_the_paper_counts():
    model = LstmForSequenceClassification(LstmConfig(vocab_size=30))
    assert model.num_parameters() - 30 * 300 == 1_274_882


def test_new_weights_are_those_of_pytorch():
    model = LstmForSequenceClassification(LstmConfig(vocab_size=900, embedding_std=0.3))
    assert not model.embeddings.weight[0].any()
    assert model.embeddings.weight[1:].std().item() == pytest.approx(0.3, rel=0.02)
    for module, inputs in ((model.lstm, 256), (model.attention[0], 512), (model.attention[2], 256)):
        for parameter in module.parameters():
            assert parameter.abs().max().item() <= inputs**-0.5
        assert next(module.parameters()).abs().max().item() == pytest.approx(inputs**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, {"embeddings", "lstm", "attention", "classifier"}),
        ({"attention": "uniform"}, {"embeddings", "lstm", "classifier"}),
        ({"attention": "frozen"}, {"embeddings", "lstm", "classifier"}),
        ({"train_attention_only": True}, {"attention"}),
    ],
)
@pytest.mark.parametrize(("batch_size", "accumulated"), [(6, 1), (4, 2)])
def test_a_trainer_moves_all_that_is_not_frozen_along_the_gradient_of_the_whole_batch(
    settings, trained, batch_size, accumulated, tmp_path
):
    model = model_of(**settings)
    expected = gradients(model, model(IDS, labels=CLASSES).loss)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Dataset.from_dict({"input_ids": IDS.tolist(), "labels": CLASSES.tolist()})
    transformers.Trainer(model, args, train_dataset=data).train()
    assert {name.split(".")[0] for name in expected} == trained
    for name, value in model.state_dict().items():
        # The last bias of the attention moves all scores alike.
        moved = name in expected and name != "attention.2.bias"
        assert moved != value.equal(before[name]), name
        if moved:
            torch.testing.assert_close(value, before[name] - 0.1 * expected[name])


def test_a_pipeline_names_the_classes(tmp_path):
    model = model_of(id2label={0: "bad", 1: "good"}).float()
    tokenizer = word_tokenizer()
    classify = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    texts = [" ".join(tokenizer.convert_ids_to_tokens(words)) for words in SOURCES]
    expected = model(IDS).logits[:, 1].sigmoid()
    for answers in (classify(texts, top_k=None), classify(texts, top_k=None, batch_size=4)):
        scores = [{answer["label"]: answer["score"] for answer in both}["good"] for both in answers]
        torch.testing.assert_close(torch.tensor(scores), expected)


def test_resized_embeddings_keep_what_the_words_had():
    model = model_of()
    before = model(IDS).logits
    model.resize_token_embeddings(14)
    assert model.config.vocab_size == len(model.embeddings.weight) == 14
    assert model(IDS).logits.equal(before)


@pytest.mark.parametrize("has_kernels", [None, False])
def test_half_precision_is_near(has_kernels, monkeypatch):
    if has_kernels is not None:
        monkeypatch.setattr(masked_lstm, "_has_half_kernels", lambda: has_kernels)
    model = model_of()
    exact = model(IDS).logits
    rounded = model.bfloat16()(IDS)
    assert rounded.logits.dtype == rounded.attention_weights.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.logits.double(), exact, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model.float()(IDS, labels=CLASSES)
    torch.testing.assert_close(mixed.logits.double(), exact, rtol=0.05, atol=0.05)
    assert mixed.loss.isfinite()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize(
    ("dtype", "capability", "halved"),
    [(torch.bfloat16, None, None), (torch.bfloat16, "AVX2", False), (torch.float16, None, False)],
)
def test_under_autocast_an_lstm_is_in_half_precision_where_the_cpu_has_kernels(dtype, capability, halved, monkeypatch):
    if capability is not None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    if halved is None:
        halved = torch.backends.cpu.get_cpu_capability() == "AVX512"
    model = model_of().float()
    with torch.autocast("cpu", dtype):
        outputs, _ = masked_lstm.run_lstm(model.lstm, model.embeddings(IDS), IDS != 0)
    assert outputs.dtype == (dtype if halved else torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be an integer from 1 to .* got 0"),
        ({"attention_size": 0}, "attention_size must be an integer from 1 to .* got 0"),
        ({"attention": "dot"}, "attention must be one of learned, uniform, frozen, got 'dot'"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"dropout": 0.5}, "dropout=0.5 is applied between LSTM layers, but num_hidden_layers is 1; set dropout=0"),
        ({"num_labels": 1}, "num_labels must be at least 2, got 1"),
        ({"problem_type": "regression"}, "problem_type must be single_label_classification, got 'regression'"),
        ({"embedding_std": -1.0}, "embedding_std must not be negative, got -1.0"),
        ({"attention": "uniform", "train_attention_only": True}, "needs attention='learned', got 'uniform'"),
        ({"pad_token_id": 5000}, "pad_token_id must be None or from 0 to 4999 .vocab_size is 5000., got 5000"),
    ],
)
def test_impossible_configurations_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LstmConfig(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either input_ids or inputs_embeds"),
        ({"input_ids": IDS, "inputs_embeds": torch.ones(6, 7, 5)}, "pass either input_ids or inputs_embeds"),
        ({"input_ids": IDS * (torch.arange(6) != 4)[:, None]}, "sentence 4 of the batch is empty; leave it out"),
        (
            {"inputs_embeds": torch.ones(6, 7, 4)},
            r"must have shape \(batch, length, 5\), got \(6, 7, 4\)",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(6, 1)},
            r"attention_mask must have shape \(6, 7\), .*, got \(6, 1\)",
        ),
        ({"input_ids": IDS[:, :0]}, "sentence 0 of the batch is empty"),
    ],
)
def test_what_cannot_be_classified_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        model_of()(**arguments)


def test_what_would_be_ignored_is_refused():
    with pytest.raises(TypeError, match="token_type_ids"):
        model_of()(IDS, token_type_ids=IDS)
