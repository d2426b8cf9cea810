"""Trained models of other people, loaded as they are published."""

import gzip

import pytest
import torch
import transformers
from dense_guidance import dense_guidance_loss

from hf_attn_dynamics import HeadwiseBertModel, HeadwiseRobertaForMaskedLM, prune_closed_gates, prune_heads


def encoded(sentences, pad):
    length = max(map(len, sentences))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in sentences])
    return {"input_ids": ids, "attention_mask": ids.ne(pad).long()}


def english(folder, data):
    """Sentences of a treebank, as the model's own tokenizer cuts them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with gzip.open(data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    texts = [line.removeprefix("# text = ") for line in lines if line.startswith("# text = ")][:12]
    return tokenizer, tokenizer(texts)["input_ids"]


def proteins(folder):
    generator = torch.Generator().manual_seed(0)
    lengths = (40, 25, 7, 1)
    return [[0, *torch.randint(4, 24, (n,), generator=generator).tolist(), 2] for n in lengths]


def check(headwise_class, stock_class, folder, sentences, pad, guidance, periods):
    batch = encoded(sentences, pad)
    stock = stock_class.from_pretrained(folder).eval()
    ours = headwise_class.from_pretrained(folder, guidance=guidance).eval()
    with torch.no_grad():
        expected = stock(**batch).to_tuple()[0]
        found = ours(**batch, output_guidance_loss=True)
        assert torch.equal(found.to_tuple()[0], expected)
        stock.set_attn_implementation("eager")
        maps = []
        for ids in sentences:
            attentions = stock(torch.tensor([ids]), output_attentions=True).attentions
            maps.append((ids, torch.stack(attentions)[:, 0].double()))
    dense = dense_guidance_loss(maps, ours.config.guided_heads(), periods=periods)
    assert found.guidance_loss.item() == pytest.approx(dense.item(), rel=1e-5)


def test_minilm_on_english_sentences(real_models, real_data):
    folder = real_models / "minilm"
    tokenizer, sentences = english(folder, real_data)
    period = tokenizer.convert_tokens_to_ids(".")
    guidance = {"heads": {"next": [0], "prev": [5], "period": [2, 3]}, "period_token_ids": [period]}
    check(HeadwiseBertModel, transformers.BertModel, folder, sentences, tokenizer.pad_token_id, guidance, [period])


def test_sapiens_roberta_on_proteins(real_models):
    folder = real_models / "sapiens-vh"
    guidance = {"fraction": 0.5}
    check(HeadwiseRobertaForMaskedLM, transformers.RobertaForMaskedLM, folder, proteins(folder), 1, guidance, [])


def test_closed_gates_of_minilm_are_removed_without_a_trace_and_it_comes_back(real_models, real_data, tmp_path):
    folder = real_models / "minilm"
    tokenizer, sentences = english(folder, real_data)
    batch = encoded(sentences, tokenizer.pad_token_id)
    real = batch["attention_mask"].bool()
    gone = {0: [3, 11], 2: list(range(12)), 5: [0]}
    gated = HeadwiseBertModel.from_pretrained(folder, gates={}).eval()
    for (_, layer), gate in gated.head_gates().items():
        gate.log_alpha.data[gone.get(layer, [])] = -1.0
    stock = prune_heads(transformers.BertModel.from_pretrained(folder), gone).eval()
    with torch.no_grad():
        expected = gated(**batch).last_hidden_state[real]
        torch.testing.assert_close(stock(**batch).last_hidden_state[real], expected, rtol=1e-4, atol=1e-5)
        assert prune_closed_gates(gated).config.pruned_heads == gone
        torch.testing.assert_close(gated(**batch).last_hidden_state[real], expected, rtol=1e-4, atol=1e-5)
        gated.save_pretrained(tmp_path)
        back = transformers.AutoModel.from_pretrained(tmp_path)
        torch.testing.assert_close(back(**batch).last_hidden_state[real], expected, rtol=1e-4, atol=1e-5)
    assert back.num_parameters() == stock.num_parameters()
