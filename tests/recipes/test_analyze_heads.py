# Licensed under the Apache License, Version 2.0.
import csv
import json
import re

import pytest
import torch
from recipe_runs import Recipe
from tiny_models import tiny_config, vivid
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    XLNetConfig,
    XLNetModel,
)

from hf_attn_dynamics import (
    HeadConfidence,
    HeadReading,
    HeadScores,
    RelativeAttention,
    RoleScores,
    head_importance,
    observe,
    prune_heads,
)
from hf_attn_dynamics.analysis.sentences import Sentences
from hf_attn_dynamics.data import embedded_trees, load_conllu, train_byte_level_bpe
from hf_attn_dynamics.recipes import analyze_heads, reading


run = Recipe("analyze_heads", frequent=20).run
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}


def conllu(trees):
    blocks = []
    for tree in trees:
        heads = [0 if head is None else head + 1 for head in tree.heads]
        rows = zip(tree.words, heads, tree.relations)
        blocks.append("".join(f"{n}\t{w}\t_\tX\t_\t_\t{h}\t{r}\t_\t_\n" for n, (w, h, r) in enumerate(rows, 1)))
    return "\n".join(blocks) + "\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Trees, text, a headwise language model, a classifier without some of its heads, and one of another kind."""
    folder = tmp_path_factory.mktemp("files")
    trees = embedded_trees()
    (folder / "trees.conllu").write_text(conllu(trees), encoding="utf-8")
    (folder / "text.txt").write_text(
        "\n".join(tree.text for tree in trees[:5]) + "\n" + "word " * 60, encoding="utf-8"
    )
    tokenizer = train_byte_level_bpe([tree.text for tree in trees], 400, kind="bert")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 60, "pad_token_id": tokenizer.pad_token_id}
    classifier = BertForSequenceClassification(BertConfig(**SIZES, **sizes))
    models = {
        "headwise": vivid(AutoModelForMaskedLM.from_config(tiny_config("bert", **sizes))),
        "pruned": vivid(prune_heads(classifier, {1: [0, 3]})),
        "xlnet": XLNetModel(XLNetConfig(vocab_size=len(tokenizer), d_model=16, n_layer=1, n_head=2, d_inner=16)),
    }
    smaller = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2}
    models["smaller"] = BertModel(BertConfig(**smaller, **sizes))
    models["headless"] = prune_heads(BertModel(BertConfig(**SIZES, **sizes)), {0: range(4), 1: range(4)})
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def language_model(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "heads"
    return folder, run(folder, model=files / "headwise", data=f"{files}/trees.conllu {files}/text.txt")


def test_everything_is_measured_and_written(language_model):
    folder, summary = language_model
    assert summary == json.loads((folder / "summary.json").read_text())
    trees = len(embedded_trees())
    assert (summary["sentences"], summary["sentences_with_trees"], summary["too_long"]) == (trees + 5, trees, 1)
    assert summary["not_measured"] == {}
    assert summary["heads"] == {"encoder": 8}
    assert {"nsubj to head", "rarest", "duplicate"} <= set(summary["roles"])
    rows = list(csv.DictReader((folder / "heads.csv").open(encoding="utf-8")))
    assert [(row["layer"], row["head"]) for row in rows] == [
        (str(layer), str(h)) for layer in (0, 1) for h in range(4)
    ]
    scores = HeadScores.load(folder / "results" / "confidence.json")["encoder"]
    assert [float(row["confidence"]) for row in rows] == pytest.approx(scores.flatten().tolist())
    assert {"importance", "relevance", "entropy", "distance_mean", "nsubj to head"} <= set(rows[0])
    RoleScores.load(folder / "results" / "syntactic_roles.json")
    RelativeAttention.load(folder / "results" / "relative_positions.json")
    reading = HeadReading.load(folder / "reading.json")
    assert reading["confidence"] == HeadScores.load(folder / "results" / "confidence.json")
    names = ("functions", "confidence", "entropy", "importance", "relevance", "positions", "distances")
    for name in (*names, "syntactic_roles", "rare_words", "duplicate_tokens"):
        assert (folder / f"{name}.png").is_file()
        assert (folder / f"{name}.svg").is_file()


def test_the_report_has_everything_in_the_file(language_model):
    folder, summary = language_model
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 10
    assert html.count("<svg width") == 16  # two sentences for each head: there are eight
    assert "heads worth knowing" in html
    for role in summary["roles"]:
        assert role in html


def test_figures_are_those_of_the_observers(files, language_model):
    folder, _ = language_model
    model, tokenizer = analyze_heads.load_model(analyze_heads.AnalyzeArguments(model=str(files / "headwise")))
    texts = [tree.text for tree in (*load_conllu(files / "trees.conllu"), *embedded_trees()[:5])]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    observer = HeadConfidence([tokenizer.sep_token_id])
    with torch.no_grad(), observe(model, observer):
        for one in ids:
            model(input_ids=torch.tensor([one]))
    found = HeadScores.load(folder / "results" / "confidence.json")["encoder"]
    torch.testing.assert_close(found, observer.compute()["encoder"])


def test_pruned_classifiers_keep_their_numbers(files, tmp_path):
    summary = run(tmp_path / "heads", model=files / "pruned", data=files / "text.txt", relevance_sentences=2)
    assert summary["heads"] == {"encoder": 6}
    # Nothing has trees; of five sentences, none has a rare token; classifiers have no masked ones.
    assert set(summary["not_measured"]) == {"syntactic_roles", "rare_words", "importance"}
    assert "needs a masked or causal language model" in summary["not_measured"]["importance"]
    assert summary["not_measured"]["syntactic_roles"] == "these sentences have no trees; .conllu files do."
    table = HeadScores.load(tmp_path / "heads" / "results" / "relevance.json")["encoder"]
    assert table.isnan().nonzero().tolist() == [[1, 0], [1, 3]]
    # What was not measured is no zero.
    assert summary["syntactic_heads"] == summary["rare_word_heads"] == {"encoder": None}
    assert summary["functions_kept"]["all"]["syntactic"] is None
    assert isinstance(summary["positional_heads"]["encoder"], int)
    page = (tmp_path / "heads" / "report.html").read_text(encoding="utf-8")
    assert page.count('<td class="number">not measured</td>') + page.count("<td>not measured</td>") == 2
    assert "Syntactic roles: not measured; these sentences have no trees; .conllu files do." in page


def test_heads_of_causal_models_matter_for_the_next_token(files, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(files / "headwise")
    model = vivid(
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=4, n_positions=60))
    )
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    settings = {"model": tmp_path / "model", "data": files / "text.txt", "relevance_sentences": 0, "batch_size": 2}
    run(tmp_path / "heads", **settings)
    found = HeadScores.load(tmp_path / "heads" / "results" / "importance.json")["decoder"]
    texts = [text for text in (files / "text.txt").read_text(encoding="utf-8").splitlines() if len(text) < 200]
    single = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
    expected = head_importance(model, [{"input_ids": ids, "labels": ids} for ids in single], normalize="l2")
    torch.testing.assert_close(found, expected["decoder"])
    assert "Not measured: relevance, not requested." in capsys.readouterr().out


def test_functions_of_pruned_checkpoints_are_counted(files, language_model, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(files / "headwise")
    prune_heads(model, {0: [0, 1, 2], 1: [3]}).save_pretrained(tmp_path / "less")
    slow = {"importance_sentences": 8, "relevance_sentences": 0}
    settings = {"model": files / "headwise", "data": files / "trees.conllu", "pruned": tmp_path / "less", **slow}
    summary = run(tmp_path / "heads", **settings)
    rows = list(csv.DictReader((tmp_path / "heads" / "heads.csv").open(encoding="utf-8")))
    kept = [row for row in rows if (row["layer"], row["head"]) not in {("0", "0"), ("0", "1"), ("0", "2"), ("1", "3")}]
    counts = summary["functions_kept"]
    assert [counts[name]["heads"] for name in counts] == [8, 4, 4]
    for function in ("positional", "syntactic", "rare words", "duplicate tokens", "delimiters"):
        assert counts["all"][function] == sum(function in row["functions"] for row in rows)
        assert counts["less"][function] == sum(function in row["functions"] for row in kept)
    assert (tmp_path / "heads" / "kept.png").is_file()


def test_a_second_model_reads_the_same_sentences(files, tmp_path, capsys):
    model = AutoModelForMaskedLM.from_pretrained(files / "headwise")
    prune_heads(model, {0: [2], 1: [3]}).save_pretrained(tmp_path / "less")
    AutoTokenizer.from_pretrained(files / "headwise").save_pretrained(tmp_path / "less")
    slow = {"importance_sentences": 8, "relevance_sentences": 0}
    settings = {"model": files / "headwise", "data": files / "trees.conllu", **slow}
    summary = run(tmp_path / "both", **settings, compare=tmp_path / "less", compare_name="less")
    comparison = summary["comparison"]
    assert comparison["names"] == [str(files / "headwise"), "less"]
    assert (comparison["heads"], comparison["removed_in_second"]) == (6, 2)
    assert "to B, less:\n| function " in capsys.readouterr().out
    alone = run(tmp_path / "alone", **{**settings, "model": tmp_path / "less"})
    assert alone["comparison"] is None
    second = HeadReading.load(tmp_path / "both" / "compared.json")
    assert second.results == HeadReading.load(tmp_path / "alone" / "reading.json").results
    table = second["importance"]["encoder"]
    kept = ~table.isnan()
    first = HeadReading.load(tmp_path / "both" / "reading.json")["importance"]["encoder"]
    assert comparison["means"]["importance"] == pytest.approx(
        {"first": first[kept].mean().item(), "second": table[kept].mean().item()}
    )
    for name, key in (("positional", "positional_heads"), ("delimiters", "delimiter_heads")):
        counts = comparison["functions"][name]
        assert (counts["first"], counts["second"]) == (summary[key]["encoder"], alone[key]["encoder"])
        assert counts["first"] == counts["kept"] + counts["lost"]
    html = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "B: less" in html
    assert html.count('<td class="removed"') == 2


def test_of_a_treebank_the_trees_are_read_and_not_its_license(files, tmp_path):
    bank = tmp_path / "bank"
    bank.mkdir()
    (bank / "LICENSE.txt").write_text("Creative Commons")
    (bank / "en-ud-dev.conllu").write_text((files / "trees.conllu").read_text(encoding="utf-8"), encoding="utf-8")
    args = reading.ReadingArguments(data=[str(bank), f"{files}/text.txt"], max_examples=None)
    trees, texts = reading.load_sentences(args)
    assert [tree.words for tree in trees] == [tree.words for tree in load_conllu(files / "trees.conllu")]
    assert texts == [tree.text for tree in embedded_trees()[:5]] + ["word " * 60]


def test_a_column_of_a_table_may_be_a_position(tmp_path):
    (tmp_path / "rows.tsv").write_text("1\tA cat sat.\n2\tA dog ran.\n")
    args = reading.ReadingArguments(data=[f"{tmp_path}/rows.tsv"], text_column="1")
    assert reading.load_sentences(args) == ([], ["A cat sat.", "A dog ran."])


def test_sentences_are_taken_from_the_first(files, tmp_path):
    data = f"{files}/trees.conllu {files}/text.txt"
    slow = {"importance_sentences": 0, "relevance_sentences": 0}
    summary = run(tmp_path / "heads", model=files / "headwise", data=data, max_examples=10, frequent=5, **slow)
    assert (summary["sentences"], summary["sentences_with_trees"]) == (10, 10)
    assert summary["not_measured"] == {"importance": "not requested.", "relevance": "not requested."}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "missing.conllu"}, "missing.conllu"),
        ({"pruned": "nowhere/at-all"}, "pruned: 'nowhere/at-all' cannot be loaded"),
        ({"model": "xlnet"}, "XLNetModel computes attention by itself"),
        ({"model": "headless"}, "BertModel has no head left that computes attention; name another model"),
        ({"data": "trees.conllu", "relations": "subject"}, "subject"),
        ({"compare": "nowhere/at-all"}, "compare 'nowhere/at-all' cannot be loaded"),
        ({"compare": "smaller"}, "has 1 attention layers with 2 heads, the model 2 attention layers with 4 heads"),
        ({"compare_name": "less"}, "compare_name='less' needs --compare"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, settings, message, refused):
    settings = {"model": "headwise", "data": "text.txt", **settings}
    settings |= {name: files / value for name, value in settings.items() if (files / value).exists()}
    with refused(message):
        run(tmp_path / "heads", **settings)


def test_unknown_tokens_are_warned_of(files, tmp_path, caplog):
    tokenizer = AutoTokenizer.from_pretrained(files / "headwise")
    words = {token: number for number, token in enumerate([*tokenizer.all_special_tokens, "the"])}
    model = BertModel(BertConfig(**SIZES, vocab_size=len(words)))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    slow = {"importance_sentences": 0, "relevance_sentences": 0, "max_sentences": 4}
    run(tmp_path / "heads", model=tmp_path / "model", data=files / "text.txt", **slow)
    assert re.search(r"\d\d % of the tokens of data are the unknown token \[UNK\]", caplog.text)


def test_batches_need_no_padding_token_and_move_no_position(files):
    model, tokenizer = analyze_heads.load_model(analyze_heads.AnalyzeArguments(model=str(files / "pruned")))
    tokenizer.pad_token, tokenizer.padding_side = None, "left"
    sentences = Sentences(embedded_trees()[:5], model, tokenizer)
    (batch,) = sentences.batches(5)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(*batch.values())]
    assert rows == sorted(sentences.ids, key=len)
    assert batch["attention_mask"][:, 0].all()
