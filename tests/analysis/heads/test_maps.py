import pytest
import torch
from stock_models import build_stock
from tiny_models import UNEVEN, batch_for, padded_batch, tiny_model, vivid

from hf_attn_dynamics import prune_heads
from hf_attn_dynamics.analysis.heads.maps import attention_maps, to_bertviz
from hf_attn_dynamics.data import train_byte_level_bpe


TEXTS = ["the cat sat on the mat", "a dog slept"]


def test_rows_of_tokens_sum_to_one_and_padding_is_zero():
    model = vivid(tiny_model("bert"))
    batch = batch_for("bert")
    (maps,) = attention_maps(model, batch).values()
    real = batch["attention_mask"].bool()
    assert maps.shape == (2, 8, 4, real.shape[1], real.shape[1])
    sums = maps.sum(-1).transpose(2, 3)  # (layers, batch, queries, heads)
    torch.testing.assert_close(sums[:, real], torch.ones_like(sums[:, real]))
    assert (maps.permute(1, 3, 0, 2, 4)[~real] == 0).all()
    assert (maps.permute(1, 4, 0, 2, 3)[~real] == 0).all()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_maps_are_the_softmax_where_a_model_in_training_returns_weights_after_dropout(kernel):
    model = vivid(tiny_model("bert", "Model", attention_probs_dropout_prob=0.5, attn_implementation=kernel))
    batch = padded_batch([[5, 6, 7, 8]], pad=0)
    with torch.no_grad():
        expected = torch.stack(model(**batch, output_attentions=True).attentions)
        after_dropout = torch.stack(model.train()(**batch, output_attentions=True).attentions)
    found = attention_maps(model, batch)["encoder"]
    assert model.training
    torch.testing.assert_close(found, expected)
    kept = after_dropout != 0
    assert 0.2 < kept.float().mean() < 0.8
    assert (after_dropout.sum(-1) - 1).abs().max() > 0.1


def test_maps_are_those_of_single_sentences():
    model = vivid(tiny_model("roberta")).double()
    sentences = [[5, 6, 7], [8, 9, 10, 11, 12]]
    (together,) = attention_maps(model, padded_batch(sentences)).values()
    for row, sentence in enumerate(sentences):
        (alone,) = attention_maps(model, padded_batch([sentence])).values()
        length = len(sentence)
        torch.testing.assert_close(together[:, row, :, :length, :length], alone[:, 0])


def test_layers_are_chosen_by_number_and_kind():
    model, batch = vivid(tiny_model("marian")), batch_for("marian")
    prune_heads(model, {"encoder": {1: range(4)}})
    maps = attention_maps(model, batch)
    chosen = attention_maps(model, batch, layers=[1, 0])
    assert list(chosen) == ["encoder", "decoder", "cross"]
    for kind, table in chosen.items():
        torch.testing.assert_close(table, maps[kind][[1, 0]], rtol=0, atol=0, equal_nan=True)
    # A layer without heads has no maps, which have a shape all the same.
    (alone,) = attention_maps(model, batch, layers={"encoder": [1]}).values()
    assert alone.shape == maps["encoder"][:1].shape
    assert alone.isnan().all()
    assert list(attention_maps(model, batch, layers={"cross": [0]})) == ["cross"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([8], "layers must be some of 0 to 1 at the encoder, got \\[8\\]"),
        ([-1], "layers must be a list of numbers of layers, .* got \\[-1\\]"),
        ([], "layers must be a list of numbers of layers"),
        (1, "layers must be a list of numbers of layers"),
        ({"middle": [1]}, "for encoder, decoder, cross, got {'middle': \\[1\\]}"),
        ({"cross": [1]}, "layers names the site 'cross', where HeadwiseBertForPreTraining has computed no attention"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        attention_maps(tiny_model("bert"), batch_for("bert"), layers)


def test_what_is_no_batch_or_no_model_is_refused():
    model, ids = tiny_model("bert"), torch.tensor([[5, 6]])
    with pytest.raises(ValueError, match=r"batch must be a dictionary, as in \{'input_ids': ids\}, got Tensor"):
        attention_maps(model, ids)
    with pytest.raises(ValueError, match=r"input_ids of the batch are a list, .* return_tensors='pt'"):
        attention_maps(model, {"input_ids": [[5, 6]]})
    with pytest.raises(ValueError, match=r"DataParallel only holds the model that attends; pass model.module"):
        attention_maps(torch.nn.DataParallel(model), {"input_ids": ids})


@pytest.mark.parametrize("kind", ["bert", "marian"])
def test_removed_heads_are_nan_in_the_original_numbering(kind):
    model = vivid(tiny_model(kind))
    prune_heads(model, UNEVEN[kind])
    maps = attention_maps(model, batch_for(kind))
    uneven = UNEVEN[kind] if kind == "marian" else {"encoder": UNEVEN[kind]}
    for site, layers in uneven.items():
        assert len(maps[site]) == 2
        for layer, table in enumerate(maps[site]):
            for head in range(table.shape[1]):
                assert table[:, head].isnan().all() == (head in layers.get(layer, []))


def test_bertviz_gets_what_its_views_take():
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, kind="bert")
    model = build_stock("bert", vocab_size=300)
    prune_heads(model, {0: [1]})
    views = to_bertviz(model, tokenizer, *TEXTS)
    length = len(views["tokens"])
    assert [layer.shape for layer in views["attention"]] == [(1, 4, length, length)] * 3
    assert views["attention"][0][:, 1].eq(0).all()
    assert views["tokens"][: views["sentence_b_start"]] == tokenizer.convert_ids_to_tokens(
        tokenizer(TEXTS[0])["input_ids"]
    )
    assert "sentence_b_start" not in to_bertviz(model, tokenizer, TEXTS[0])


def test_bertviz_gets_both_sides_of_a_translation():
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, kind="bert")
    views = to_bertviz(build_stock("marian", vocab_size=300), tokenizer, TEXTS[0], target=TEXTS[1])
    source, target = len(views["encoder_tokens"]), len(views["decoder_tokens"])
    assert views["encoder_attention"][0].shape == (1, 4, source, source)
    assert views["decoder_attention"][0].shape == (1, 4, target, target)
    assert views["cross_attention"][0].shape == (1, 4, target, source)


def test_bertviz_itself_renders_them():
    bertviz = pytest.importorskip("bertviz")
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, kind="bert")
    page = bertviz.head_view(
        **to_bertviz(build_stock("bert", vocab_size=300), tokenizer, TEXTS[0]), html_action="return"
    )
    assert "attention" in page.data


def test_targets_must_fit_the_model():
    tokenizer = train_byte_level_bpe(TEXTS, vocab_size=300, kind="bert")
    with pytest.raises(ValueError, match="MarianMTModel has a decoder: give the target that it reads, got"):
        to_bertviz(build_stock("marian", vocab_size=300), tokenizer, TEXTS[0])
    with pytest.raises(ValueError, match="BertForMaskedLM reads no target, got target='x'"):
        to_bertviz(build_stock("bert", vocab_size=300), tokenizer, TEXTS[0], target="x")
