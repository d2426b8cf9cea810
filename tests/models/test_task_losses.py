# Licensed under the Apache License, Version 2.0.
"""The task loss is one number, whether a model is told how many labels there are or not."""

import pytest
import torch
import transformers
from stock_models import STOCK_MODELS, TEXT, build_stock, stock_inputs
from tiny_models import CLASSES, batch_for, headwise_class, stock_config, tiny_model, vivid
from transformers import ElectraForPreTraining

import hf_attn_dynamics as had
from hf_attn_dynamics.models.head_losses import loss_terms_of, mean_loss, sentence_losses


HEADS = [(kind, head) for kind, head in CLASSES if headwise_class(kind, head).loss_terms]
HEADS += [("electra", "ForJointPreTraining")]
LABELS = {  # of eight sentences, the second of which has none
    "ForSequenceClassification": {"labels": [0, -100, 1, 1, 0, -100, 1, 0]},
    "ForNextSentencePrediction": {"labels": [0, -100, 1, 1, 0, -100, 1, 0]},
    "ForQuestionAnswering": {
        "start_positions": [0, 512, 3, -2, 1, 17, 16, 2],
        "end_positions": [4, 512, 512, 5, 1, 18, 512, 2],
    },
}


def labelled(kind, head):
    """A padded batch whose labels are odd: ignored ones on real tokens, and a sentence without any."""
    batch = batch_for(kind)
    if head in LABELS:
        return batch | {name: torch.tensor(values) for name, values in LABELS[head].items()}
    generator = torch.Generator().manual_seed(1)
    is_of_words = head.endswith(("LM", "LMHeadModel", "JointPreTraining", "MTModel"))
    classes = 60 if is_of_words else 2
    if (kind, head) == ("bert", "ForPreTraining"):
        classes = 60
        batch["next_sentence_label"] = torch.tensor([0, -100, 1, 1, 0, -100, 1, 0])
    shape = batch["input_ids"].shape
    labels = torch.randint(0, classes, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.4] = -100
    labels[1] = -100
    return batch | {"labels": labels}


def both(model, batch):
    with torch.no_grad():
        alone = model(**batch).loss
        return alone, model(**batch, num_items_in_batch=model.count_labels(batch)).loss


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("kind", "head"), HEADS)
def test_a_loss_is_the_same_with_and_without_a_number_of_labels(kind, head, masked):
    model, batch = vivid(tiny_model(kind, head).double()), labelled(kind, head)
    if not masked:
        batch = {name: value for name, value in batch.items() if not name.endswith("attention_mask")}
    alone, counted = both(model, batch)
    assert alone > 0.01
    # Stock causal heads compute the loss in single precision.
    torch.testing.assert_close(counted, alone, rtol=1e-6, atol=0, check_dtype=model.loss_terms[0].kind != "next")


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"num_labels": 1}, torch.linspace(-2, 3, 8)),
        ({"num_labels": 1}, torch.linspace(-2, 3, 8)[:, None]),
        ({"num_labels": 3, "problem_type": "regression"}, torch.linspace(-2, 3, 24).view(8, 3)),
        ({"num_labels": 3}, (torch.arange(24).view(8, 3) % 5 == 0).float()),
        ({"num_labels": 3}, torch.arange(8) % 3),
    ],
    ids=["regression", "column", "several", "multi_label", "classes"],
)
@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_every_problem_type_has_one_loss(kind, settings, labels):
    batch = batch_for(kind) | {"labels": labels}
    model, fresh = (vivid(tiny_model(kind, "ForSequenceClassification", **settings)) for _ in range(2))
    alone, counted = both(model, batch)
    torch.testing.assert_close(counted, alone, rtol=1e-5, atol=0)
    # The stock loss has written what it took the labels for into the configuration; here nothing has, so far.
    with torch.no_grad():
        first = fresh(**batch, num_items_in_batch=fresh.count_labels(batch)).loss
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=0)


def test_a_replaced_token_that_is_ignored_is_in_no_loss():
    model = vivid(tiny_model("electra", "ForPreTraining").double())
    batch = {
        "input_ids": torch.tensor([[5, 7, 8, 9], [6, 4, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    logits = model(**batch).logits
    # -log of the probability of "original" at one token, and of "replaced" at two: all others are not counted.
    expected = (
        torch.log1p(torch.exp(logits[0, 0]))
        + torch.log1p(torch.exp(-logits[0, 3]))
        + torch.log1p(torch.exp(-logits[1, 1]))
    ) / 3
    batch["labels"] = torch.tensor([[0, -100, -100, 1], [-100, 1, 1, -100]])
    for found in both(model, batch):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float64])
def test_whether_a_token_was_replaced_is_said_by_labels_of_any_type(dtype):
    model, batch = vivid(tiny_model("electra", "ForPreTraining").double()), batch_for("electra")
    replaced = torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"]) % 3 == 0
    expected, _ = both(model, batch | {"labels": replaced.long()})
    for found in both(model, batch | {"labels": replaced.to(dtype)}):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_without_ignored_labels_the_loss_is_the_stock_one_to_the_last_digit():
    model = vivid(tiny_model("electra", "ForPreTraining", guidance=None))
    stock = ElectraForPreTraining(stock_config("electra")).eval()
    stock.load_state_dict(model.state_dict())
    batch = batch_for("electra")
    batch["labels"] = batch["input_ids"] % 2
    with torch.no_grad():
        for mask in (batch["attention_mask"], None):
            batch["attention_mask"] = mask
            assert torch.equal(model(**batch).loss, stock(**batch).loss)


@pytest.mark.parametrize(
    "name", [name for name, (cls, *_) in STOCK_MODELS.items() if loss_terms_of(getattr(transformers, cls))]
)
def test_the_table_has_the_loss_of_every_stock_model(name):
    model = build_stock(name).double()
    batch = {key: value.double() if value.is_floating_point() else value for key, value in stock_inputs(model).items()}
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    if loss_terms_of(type(model))[0].kind == "problem":
        batch["labels"] = torch.tensor([2, 0])
    else:
        generator = torch.Generator().manual_seed(2)
        labels = torch.randint(
            0, 2 if loss_terms_of(type(model))[0].kind == "binary" else 60, ids.shape, generator=generator
        )
        batch["labels"] = labels if name == "electra" else labels.masked_fill(labels % 3 == 0, -100)
    with torch.no_grad():
        outputs = model(**batch)
    found = mean_loss(sentence_losses(loss_terms_of(type(model)), model.config, outputs, batch))
    torch.testing.assert_close(found, outputs.loss.to(found), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        ("BertForNextSentencePrediction", {"labels": torch.tensor([1, 0])}),
        ("BertForMultipleChoice", {"labels": torch.tensor([1, 0])}),
        ("BertForTokenClassification", {"labels": torch.tensor([[1, 0, -100, 0], [1, -100, 1, 1]])}),
        ("BertForQuestionAnswering", {"start_positions": torch.tensor([0, 9]), "end_positions": torch.tensor([2, 3])}),
        ("BartForCausalLM", {"labels": torch.tensor([[5, 6, -100, 8], [9, 10, 11, 12]])}),
    ],
)
def test_the_table_has_the_loss_of_other_heads(head, labels):
    cls = getattr(transformers, head)
    torch.manual_seed(0)
    settings = STOCK_MODELS["bart"][2] if head.startswith("Bart") else TEXT
    model = vivid(cls(cls.config_class(**settings)).eval())
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    batch = {"input_ids": ids[:, None].repeat(1, 2, 1) if head.endswith("Choice") else ids, **labels}
    with torch.no_grad():
        outputs = model(**batch)
    found = mean_loss(sentence_losses(loss_terms_of(cls), model.config, outputs, batch))
    torch.testing.assert_close(found, outputs.loss, rtol=1e-6, atol=0)


def test_an_architecture_without_a_head_has_no_terms():
    assert loss_terms_of(transformers.BertModel) == loss_terms_of(transformers.LlamaModel) == ()
    assert loss_terms_of(headwise_class("bert", "Model")) == ()


@pytest.mark.parametrize(("kind", "head"), [("bert", "ForMaskedLM"), ("marian", "MTModel")])
def test_losses_of_micro_batches_add_up_to_the_loss_of_the_whole(kind, head):
    model, batch = (
        vivid(tiny_model(kind, head, gates={} if kind == "bert" else {"encoder": {}}).double()),
        labelled(kind, head),
    )
    alone = {"guidance_weight": 0.3, "gate_penalty_weight": 0.01}
    whole = model(**batch, **alone)
    counts = {**model.count_labels(batch), "sentences": 8, "forward_passes": 3}
    parts = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 8)):
        micro = {name: value[rows] for name, value in batch.items()}
        parts.append(model(**micro, **alone, num_items_in_batch=counts))
    torch.testing.assert_close(sum(part.loss for part in parts), whole.loss, rtol=1e-6, atol=0)
    for name in ("guidance_loss", "gate_penalty", "task_loss"):
        torch.testing.assert_close(sum(part[name] for part in parts), whole[name], rtol=1e-6, atol=0)
    expected = whole.task_loss + 0.3 * whole.guidance_loss + 0.01 * whole.gate_penalty
    torch.testing.assert_close(whole.loss, expected, rtol=1e-6, atol=0)


def mixture_of_experts(name):
    """A headwise mixture of experts whose routers have a loss."""
    stock = build_stock(name)
    cls = getattr(had, f"Headwise{type(stock).__name__}")
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**STOCK_MODELS[name][2], **experts, **routers})).double().eval()
    inputs = stock_inputs(stock)
    return model, {**inputs, "labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("name", ["gpt-oss", "mixtral", "qwen2-moe", "qwen3-moe"])
def test_the_loss_of_routers_is_a_mean_over_forward_passes(name):
    model, batch = mixture_of_experts(name)
    alone, counted = both(model, batch)
    torch.testing.assert_close(counted, alone, rtol=1e-6, atol=0, check_dtype=False)
    counts = {**model.count_labels(batch), "forward_passes": 2}
    parts = [
        model(**{key: value[rows] for key, value in batch.items()}, num_items_in_batch=counts)
        for rows in (slice(0, 1), slice(1, None))
    ]
    unlabelled = model(**{key: value for key, value in batch.items() if key != "labels"})
    balance = torch.stack([part.aux_loss for part in parts])
    assert (balance > 0.1).all()
    assert balance[0] != balance[1]
    expected = alone - 0.5 * unlabelled.aux_loss + 0.5 * balance.mean()
    torch.testing.assert_close(sum(part.loss for part in parts), expected, rtol=1e-6, atol=0, check_dtype=False)


def test_a_loss_function_of_the_user_is_not_replaced_in_silence():
    model, batch = tiny_model("bert", "LMHeadModel", is_decoder=True, guidance=None), labelled("bert", "LMHeadModel")
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    torch.testing.assert_close(model(**batch).loss, model(**batch).logits.sum())
    with pytest.raises(ValueError, match="the loss_function of HeadwiseBertLMHeadModel has been replaced"):
        model(**batch, num_items_in_batch=model.count_labels(batch))
