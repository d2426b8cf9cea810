"""Encoders whose attention is causal, with the head of a language model."""

import pytest
import torch
import transformers
from tiny_models import (
    PAD,
    batch_for,
    headwise_class,
    padded_batch,
    ragged_sentences,
    stock_class,
    stock_config,
    tiny_config,
    vivid,
)

import hf_attn_dynamics as had


HEADS = {"bert": "LMHeadModel", "electra": "ForCausalLM", "roberta": "ForCausalLM"}


def decoder(kind, **changes):
    torch.manual_seed(0)
    config = tiny_config(kind, is_decoder=True, **{"guidance": {"fraction": 0.5}, **changes})
    return vivid(headwise_class(kind, HEADS[kind])(config)).eval()


def stock_of(model, kind):
    stock = stock_class(kind, HEADS[kind])(stock_config(kind, is_decoder=True)).eval()
    stock.load_state_dict(model.state_dict(), strict=False)
    return stock


@pytest.mark.parametrize("kind", HEADS)
def test_generated_text_is_that_of_the_stock_class(kind):
    model = decoder(kind)
    ids = torch.tensor([[5, 7, 8, 9], [11, 12, 13, 14]])
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    assert torch.equal(model.generate(ids, **settings), stock_of(model, kind).generate(ids, **settings))


@pytest.mark.parametrize("kind", HEADS)
def test_the_loss_is_that_of_the_stock_class_and_a_part_of_an_accumulated_batch(kind):
    model, batch = decoder(kind), batch_for(kind)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    with torch.no_grad():
        loss = model(**batch).loss
        assert loss == stock_of(model, kind)(**batch).loss
        counts = model.count_labels(batch)
        halves = [{name: column[rows] for name, column in batch.items()} for rows in (slice(4), slice(4, None))]
        parts = [model(**half, num_items_in_batch=counts).loss for half in halves]
    torch.testing.assert_close(sum(parts), loss)


@pytest.mark.parametrize("kind", HEADS)
def test_guided_heads_look_back(kind):
    model = decoder(kind)
    assert model.config.guided_heads("decoder") == {0: {"prev": [0], "first": [1]}, 1: {"prev": [0], "first": [1]}}
    sentences = ragged_sentences()
    batch = padded_batch(sentences, pad=PAD[kind])
    together = model(**batch, output_guidance_loss=True).guidance_loss
    alone = [model(**padded_batch([one], pad=PAD[kind]), output_guidance_loss=True).guidance_loss for one in sentences]
    torch.testing.assert_close(together, torch.stack(alone).mean())


def test_a_stock_language_model_that_lost_heads_comes_back_by_its_auto_class(tmp_path):
    model = stock_of(decoder("bert"), "bert")
    had.prune_heads(model, {0: [1]}).save_pretrained(tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(back) is had.HeadwiseBertLMHeadModel
    ids = torch.tensor([[5, 7, 8, 9]])
    assert torch.equal(back(ids).logits, model(ids).logits)
