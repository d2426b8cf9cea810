# Licensed under the Apache License, Version 2.0.
import pytest
import torch
from roles import maps_of
from stock_models import build_stock
from tiny_models import padded_batch, ragged_sentences, tiny_model, vivid

from hf_attn_dynamics import DelimiterAttention, observe


DELIMITERS = [5, 6, 7, 8]


def slow_attention(model, texts, kind, delimiters):
    """Mean attention to delimiters, `(layers, heads)`: one query after the other, from eager maps."""
    values = []
    for ids in texts:
        maps = maps_of(model, ids)[kind]
        for query, token in enumerate(ids):
            if token not in delimiters:
                keys = [key for key, one in enumerate(ids) if one in delimiters]
                values.append(sum((maps[:, :, query, key] for key in keys), torch.zeros(maps.shape[:2]).double()))
    return torch.stack(values).mean(0)


@torch.no_grad()
def observed(model, texts, observer, batch_size=5, pad=1):
    with observe(model, observer) as seen:
        for start in range(0, len(texts), batch_size):
            batch = padded_batch(texts[start : start + batch_size], pad=pad)
            if model.config.is_encoder_decoder:
                batch |= {f"decoder_{name}": values for name, values in batch.items()}
            model(**batch)
    return seen.delimiter_attention


@pytest.mark.parametrize(
    ("name", "kinds"), [("bert", ["encoder"]), ("gpt2", ["decoder"]), ("marian", ["encoder", "decoder", "cross"])]
)
def test_attention_to_delimiters_is_that_of_one_row_after_the_other(name, kinds):
    model, texts = build_stock(name).double(), ragged_sentences(7)
    found = observed(model, texts, DelimiterAttention(DELIMITERS))
    assert list(found) == kinds
    for kind in kinds:
        torch.testing.assert_close(found[kind], slow_attention(model, texts, kind, DELIMITERS), rtol=0, atol=1e-12)
        assert found[kind].max() > 0


def test_batches_and_padding_change_nothing():
    model, texts = vivid(tiny_model("bert").double()), ragged_sentences(7)
    together = observed(model, texts, DelimiterAttention([0, *DELIMITERS]), pad=0)
    alone = observed(model, texts, DelimiterAttention([0, *DELIMITERS]), batch_size=1)
    torch.testing.assert_close(together["encoder"], alone["encoder"], rtol=0, atol=1e-12)


def test_sentences_without_delimiters_count_with_0_and_delimiters_alone_with_nothing():
    model = tiny_model("bert")
    assert (observed(model, [[20, 21, 22]], DelimiterAttention(DELIMITERS))["encoder"] == 0).all()
    assert observed(model, [[5, 6]], DelimiterAttention(DELIMITERS))["encoder"].isnan().all()


def test_which_tokens_are_delimiters_must_be_known():
    with pytest.raises(ValueError, match=r"or delimiter_ids=tokenizer\.all_special_ids"):
        observed(tiny_model("bert"), [[20, 5]], DelimiterAttention())
    with pytest.raises(ValueError, match=r"delimiter_ids must be a list of token ids, or None, got '</s>'"):
        DelimiterAttention("</s>")
