# Licensed under the Apache License, Version 2.0.
"""Stacks of bag-of-words attention models against each model by itself."""

import copy

import pytest
import torch
from slow_score_norm import padded, ragged_words, slow_descent, slow_logits

from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification
from hf_attn_dynamics.data import topic_sentences, topic_words
from hf_attn_dynamics.training import BowAttentionStack, LabelledSentences, stacked_gradient_descent


SENTENCES = ragged_words(12, 10, shortest=2)
LABELS = [place % 3 for place in range(12)]
EVERY_KIND = [
    {"classifier": "fixed"},
    {"classifier": "mlp"},
    {"classifier": "linear", "freeze_keys": True},
    {"classifier": "linear", "freeze_embeddings": True},
    {"classifier": "linear"},
]


def models_of(kinds=EVERY_KIND, **changes):
    """Models in double precision whose weights all matter, those that are alike with other weights."""
    models = []
    for seed, kind in enumerate(kinds):
        torch.manual_seed(seed)
        sizes = {"vocab_size": 10, "hidden_size": 4, "key_size": 3, "num_labels": 3, "query_std": 0.7}
        config = BowAttentionConfig(**{**sizes, "embedding_std": 1.0, "key_std": 1.0, **kind, **changes})
        models.append(BowAttentionForSequenceClassification(config).double())
    return models


def descend(stack, data, rate=0.5, epochs=8):
    losses = []
    stacked_gradient_descent(
        lambda: stack.losses(data),
        stack.parameters,
        stack.learning_rates(rate),
        epochs,
        record=lambda _, values: losses.append(values),
        record_at=range(epochs),
    )
    return torch.stack(losses)


def sentences_for(models, sentences=SENTENCES, labels=LABELS):
    config = models[0].config
    return LabelledSentences(sentences, labels, config.vocab_size, config.convolution)


CHANGES = {
    "frozen query": {},
    "trained query": {"freeze_query": False},
    "convolution": {"convolution": True},
    "convolution, trained query": {"convolution": True, "freeze_query": False},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_stack_gives_the_logits_of_its_models(changes):
    models = models_of(**changes)
    logits = BowAttentionStack(models).logits(sentences_for(models))
    for run, model in enumerate(models):
        torch.testing.assert_close(logits[run], slow_logits(model, SENTENCES))
        torch.testing.assert_close(logits[run], model(padded(SENTENCES)).logits)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_runs_end_as_each_model_does_by_itself(changes):
    models = models_of(**changes)
    alone = copy.deepcopy(models)
    stack = BowAttentionStack(models)
    losses = descend(stack, sentences_for(models))
    for run, (model, own) in enumerate(zip(stack.unstack(), alone)):
        expected = slow_descent(own, SENTENCES, LABELS, 0.5, 8)
        torch.testing.assert_close(losses[:, run], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        for (name, found), value in zip(model.named_parameters(), own.parameters()):
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_run_is_the_same_in_a_stack_and_alone(changes):
    together = BowAttentionStack(models_of(**changes))
    descend(together, sentences_for(together.models))
    for model, own in zip(together.unstack(), models_of(**changes)):
        alone = BowAttentionStack([own])
        descend(alone, sentences_for([own]))
        for found, value in zip(model.parameters(), alone.unstack()[0].parameters()):
            torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)


def test_rates_are_those_of_each_run():
    kinds = [{"classifier": "linear"}, {"classifier": "linear"}]
    stack = BowAttentionStack(models_of(kinds))
    descend(stack, sentences_for(stack.models), rate=[0.1, 0.4])
    for run, rate in enumerate((0.1, 0.4)):
        own = models_of(kinds)[run]
        slow_descent(own, SENTENCES, LABELS, rate, 8)
        torch.testing.assert_close(stack.unstack()[run].embeddings.weight, own.embeddings.weight)


def test_scores_and_vectors_are_those_of_the_definition():
    models = models_of(freeze_query=False)
    scores, vectors = BowAttentionStack(models).score_norms(sentences_for(models))
    for run, model in enumerate(models):
        torch.testing.assert_close(scores[run], model.keys.weight @ model.query)
        torch.testing.assert_close(vectors[run], model.query.norm() * model.embeddings.weight)


def test_the_order_of_sentences_and_words_does_not_matter():
    models = models_of()
    shuffled = [words[::-1] for words in SENTENCES[::-1]]
    stack = BowAttentionStack(models)
    losses = stack.losses(sentences_for(models))
    torch.testing.assert_close(stack.losses(sentences_for(models, shuffled, LABELS[::-1])), losses)


def test_accuracy_is_the_share_of_correct_sentences():
    models = models_of()
    data = sentences_for(models)
    found = BowAttentionStack(models).accuracies(data)
    for run, model in enumerate(models):
        predicted = model(padded(SENTENCES)).logits.argmax(-1).tolist()
        correct = sum(one == label for one, label in zip(predicted, LABELS))
        assert found[run].item() == pytest.approx(correct / len(LABELS))


def test_large_scores_do_not_overflow():
    models = models_of()
    for model in models:
        model.keys.weight.data.mul_(3000)
    losses = BowAttentionStack(models[:1]).losses(sentences_for(models, [[3, 4]] * 2, [0, 1]))
    assert losses.isfinite().all()


def test_training_with_a_fixed_classifier_finds_the_topic_words():
    """Theorem 2: with independent columns, attention goes to the topic word and the loss to 0."""
    train, _ = topic_sentences(train_size=60, test_size=1, topics=3, words_per_topic=1, others=4, other_words=300)
    telling = [word for words in topic_words(3, 1) for word in words]
    config = BowAttentionConfig(vocab_size=304, hidden_size=6, num_labels=3, classifier="fixed")
    torch.manual_seed(0)
    model = BowAttentionForSequenceClassification(config)
    with torch.no_grad():
        # Independent, but far from orthonormal.
        model.classifier.weight.copy_(model.classifier.weight + 0.9 * model.classifier.weight[:1])
    stack = BowAttentionStack([model])
    data = LabelledSentences(train["input_ids"], train["label"], 304)
    losses = descend(stack, data, rate=1.0, epochs=1500)
    assert losses[-1].item() < 0.03 < 1 < losses[0].item()
    output = stack.unstack()[0](torch.tensor(train["input_ids"][:]))
    is_topic = torch.isin(torch.tensor(train["input_ids"][:]), torch.tensor(telling))
    assert output.attention_weights[is_topic].min() > 0.9
    assert torch.equal(output.logits.argmax(-1), torch.tensor(train["label"][:]))


def test_a_fixed_classifier_with_dependent_columns_is_refused():
    models = models_of([{"classifier": "linear"}, {"classifier": "fixed"}])
    models[1].classifier.weight.data[2] = models[1].classifier.weight.data[:2].sum(0)
    with pytest.raises(ValueError, match="classifier of model 1 has 3 columns of rank 2, but they must be linearly"):
        BowAttentionStack(models)


def losses_of(sentences, **changes):
    models = models_of(**changes)
    return BowAttentionStack(models).losses(sentences_for(models, sentences, [0] * len(sentences)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BowAttentionStack([]), "models are empty"),
        (
            lambda: BowAttentionStack([*models_of(), *models_of(hidden_size=5)]),
            r"must have the same hidden_size, got \[4, 5",
        ),
        (
            lambda: BowAttentionStack(models_of([{"classifier": "mlp", "classifier_hidden_size": n} for n in (3, 4)])),
            r"must have the same classifier_hidden_size, got \[3, 4\]",
        ),
        (lambda: BowAttentionStack(models_of()).learning_rates(0.0), "learning_rate must be greater than 0, got 0"),
        (lambda: BowAttentionStack(models_of()).learning_rates([0.1]), "learning_rate has 1 values for 5 runs"),
        (lambda: LabelledSentences([[1]], [0, 1], 5), "labels must have one class for each of 1 sentences, got 2"),
        (
            lambda: LabelledSentences([[1], [2]], [0, -100], 5),
            "labels must be at least 0, got -100; leave out sentences without a class",
        ),
        (lambda: LabelledSentences([[1, 2], [1]], [0, 1], 5, convolution=True), "sentence 1 is empty"),
        (
            lambda: BowAttentionStack(models_of()).losses(LabelledSentences(SENTENCES, LABELS, 11)),
            "data must have vocab_size=10",
        ),
        (
            lambda: BowAttentionStack(models_of(convolution=True)).losses(LabelledSentences(SENTENCES, LABELS, 10)),
            "data must have convolution=True",
        ),
        (lambda: losses_of([[1, 2, 0]]), "data contain padding, 0, which models do not attend to"),
        (lambda: losses_of([[1, 2, 0]], convolution=True), "data contain padding, 0"),
    ],
    ids=[
        *(
            "none",
            "sizes",
            "hidden units",
            "zero rate",
            "rates",
            "labels",
            "no label",
            "too short",
            "vocabulary",
            "convolution",
        ),
        *("padding", "padding of pairs"),
    ],
)
def test_impossible_stacks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
