# Licensed under the Apache License, Version 2.0.
"""What `supervise_mlm` measures, and what a guided head learns."""

import csv
import json

import pytest
import torch
from documented import undocumented
from recipe_runs import Recipe
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertModel

from hf_attn_dynamics import coreference_accuracy
from hf_attn_dynamics.data import (
    Tree,
    embedded_coreference,
    embedded_trees,
    encode_words,
    train_byte_level_bpe,
)
from hf_attn_dynamics.recipes import supervise_mlm
from hf_attn_dynamics.recipes.arguments.supervise_mlm import SuperviseArguments
from hf_attn_dynamics.recipes.supervised_tasks import ALL, OFFSET, Antecedents, Parsing, divided, sampled


MODELS = ("initial", "unguided", "guided")
QUICK = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "vocab_size": 300,
    "max_steps": 4,
    "max_length": 40,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_train_batch_size": 8,
}
CONLLU = """1\tDogs\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_
2\tbark\t_\tVERB\t_\t_\t0\troot\t_\t_

1\tOld\t_\tADJ\t_\t_\t2\tamod\t_\t_
2\tdogs\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tbark\t_\tVERB\t_\t_\t0\troot\t_\t_

"""


@pytest.fixture(scope="module")
def small():
    """A stock BERT with large random weights, and its tokenizer."""
    texts = [item.text for item in (*embedded_trees(), *embedded_coreference())]
    tokenizer = train_byte_level_bpe(texts, vocab_size=400, kind="bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, initializer_range=0.3, **sizes)
    return BertModel._from_config(config, attn_implementation="eager").eval(), tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A summary of the demonstration in few steps, and its folder."""
    folder = tmp_path_factory.mktemp("run") / "parsing"
    return Recipe("supervise_mlm", **QUICK).run(folder, layer=0, head=2), folder


def attached(model, tokenizer, tree):
    """Whether the strongest word of each head, apart from the word itself, is the syntactic head: `(words, heads)`."""
    ids, words = encode_words(tree, tokenizer)
    with torch.no_grad():
        maps = torch.cat(model(torch.tensor([ids]), output_attentions=True).attentions)
    pieces = torch.tensor([[word == of for word in range(len(tree.words))] for of in words]).to(maps)
    attention = (pieces / pieces.sum(0)).T @ maps.flatten(0, 1) @ pieces
    attention.diagonal(dim1=-2, dim2=-1).fill_(-1)
    found = attention.argmax(-1)
    return [found[:, word] == head for word, head in enumerate(tree.heads) if head is not None]


def test_attachment_is_that_of_dense_maps_of_each_sentence(small):
    trees = embedded_trees()[:7]
    measured = Parsing(SuperviseArguments()).measure(*small, trees)
    expected = torch.stack([row for tree in trees for row in attached(*small, tree)]).double()
    torch.testing.assert_close(measured.accuracy[ALL]["encoder"], expected.mean(0).view(2, 4))
    assert measured.counts[ALL] == len(expected) == sum(len(tree.words) - 1 for tree in trees)


def test_the_offset_of_the_training_sentences_is_the_baseline():
    task = Parsing(SuperviseArguments())
    assert task.offset == 1
    trees = [
        Tree(("the", "old", "dog", "barks"), (2, 2, 3, None), ("det", "amod", "nsubj", "root")),
        Tree(("see", "dogs"), (None, 0), ("root", "obj")),
    ]
    distances = [distance for tree in trees for distance in task.distances(tree)]
    assert distances == [2, 1, 1, -1]


def test_words_that_share_their_tokens_count_as_one(small):
    spans = ((0, 2), (3, 9), (3, 9), (10, 15))
    tree = Tree(
        ("il", "de", "le", "voit"), (3, 3, 1, None), ("nsubj", "case", "det", "root"), (), "il du_jour voit", spans
    )
    task = Parsing(SuperviseArguments())
    assert list(task.distances(tree)) == [2, 1]
    assert task.measure(*small, [tree]).counts[ALL] == 2


def test_antecedents_are_measured_as_by_the_probe_among_words_and_among_mentions(small):
    items = embedded_coreference()
    measured = Antecedents(SuperviseArguments(task="antecedents")).measure(*small, items)
    assert list(measured.counts.values()) == [20, 20]
    for scores, mentions_only in zip(measured.accuracy.values(), (False, True), strict=True):
        expected = coreference_accuracy(*small, items, special_tokens=False, mentions_only=mentions_only)
        assert scores.to_dict() == expected.accuracy[ALL].to_dict()
    assert measured.baselines[ALL]["nearest_mention"] == measured.baselines["all, among mentions"]["nearest_mention"]


def test_the_distance_to_an_antecedent_counts_words_of_it_or_its_head_only():
    task = Antecedents(SuperviseArguments(task="antecedents"))
    items = embedded_coreference()[:1]  # [The king] told the nurse that [he] …
    assert list(task.distances(items[0])) == [-5]
    for offset, of_words, of_heads in ((-5, 1, 1), (-6, 1, 0), (-2, 0, 0)):
        task.offset = offset
        assert [task._offset_accuracy(items, heads_only) for heads_only in (False, True)] == [of_words, of_heads]


def test_a_part_of_the_sentences_is_drawn_and_set_aside_in_their_order():
    assert divided(range(7), 3) == ([0, 1, 3, 4, 6], [2, 5])
    drawn = sampled(list(range(50)), 8)
    assert drawn == sorted(set(drawn)) == sampled(list(range(50)), 8)
    assert len(drawn) == 8
    assert sampled([1, 2], None) == sampled([1, 2], 3) == [1, 2]


def test_both_models_begin_alike_and_only_one_is_guided(run):
    summary, folder = run
    histories = {
        name: json.loads((folder / "checkpoints" / name / "run.json").read_text())["history"]
        for name in ("guided", "unguided")
    }
    first = {name: history[0] for name, history in histories.items()}
    assert first["guided"]["task_loss"] == pytest.approx(first["unguided"]["task_loss"], abs=1e-6)
    assert all(entry["guidance_weight"] == 1 for entry in histories["guided"] if "guidance_loss" in entry)
    assert not any("guidance_loss" in entry for entry in histories["unguided"])
    assert [step for step, _ in summary["accuracy_curve"]] == [2, 4]
    guided = AutoModelForMaskedLM.from_pretrained(folder / "model").config.guidance
    assert guided["heads"] == {"0": {"syntax": [2]}}
    assert AutoModelForMaskedLM.from_pretrained(folder / "model_unguided").config.guidance is None


def test_the_summary_has_the_guided_head_and_the_heads_that_are_best_on_validation_data(run):
    summary, folder = run
    rows = summary["rows"]
    assert [(row["model"], row["data"]) for row in rows if row["group"] == ALL] == [
        (model, data) for model in MODELS for data in ("training", "validation", "test")
    ]
    for row in rows:
        if (row["data"], row["group"]) == ("validation", ALL):
            assert (row["chosen"], row["chosen_head"]) == (row["best"], row["best_head"])
        if row["group"] == ALL:
            key = f"accuracy_{row['data']}_{row['model']}"
            assert summary[key] == row["guided_head" if row["model"] == "guided" else "chosen_head"]
            assert summary[f"accuracy_{row['data']}_{OFFSET}"] == row[OFFSET]
    assert (summary["layer"], summary["head"], summary["steps"], summary["new_weights"]) == (0, 2, 4, [])
    with open(folder / "table.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    systems = [f"{data}_{system}" for data in ("training", "validation", "test") for system in (*MODELS, OFFSET)]
    assert undocumented(supervise_mlm, summary, DATA_SYSTEM=systems, DATA_MODEL=systems, DATA=["test"]) == set()


def test_a_guided_head_learns_the_trees_of_the_training_sentences(tmp_path):
    flags = {**QUICK, "hidden_size": 64, "vocab_size": 500, "max_steps": 100, "eval_strategy": "no"}
    summary = Recipe("supervise_mlm", **flags).run(
        tmp_path / "run", learning_rate=3e-3, per_device_train_batch_size=24
    )
    assert summary["accuracy_training_guided"] > 0.8
    assert summary["accuracy_training_guided"] > summary["accuracy_training_unguided"] + 0.3


def test_a_checkpoint_without_the_head_of_a_masked_language_model_gets_one(small, tmp_path):
    model, tokenizer = small
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "stock")
    (tmp_path / "a.conllu").write_text(CONLLU * 4)
    (tmp_path / "b.conllu").write_text(CONLLU)
    flags = {name: QUICK[name] for name in ("eval_strategy", "eval_steps", "logging_steps")}
    summary = Recipe("supervise_mlm", **flags, max_steps=2).run(
        tmp_path / "run",
        model=tmp_path / "stock",
        train_file=tmp_path / "a.conllu",
        test_file=tmp_path / "b.conllu",
        validation_every=4,
    )
    assert "cls.predictions.transform.dense.weight" in summary["new_weights"]
    assert (summary["train_examples"], summary["eval_examples"], summary["test_examples_test"]) == (6, 2, 2)
    saved = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model")
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight


def test_antecedents_of_files_are_measured_by_file(small, tmp_path):
    (tmp_path / "refl.0").write_text(
        "the king hurt himself\t3\t0 1\t\nthe girl saw the boy by herself\t6\t0 1\t3 4\n" * 4
    )
    (tmp_path / "refl.1").write_text("the king saw the cat by himself\t6\t0 1\t3 4\n")
    (tmp_path / "wino").write_text(
        "[The cook] met the clerk when [he] left.\nThe cook met [the clerk] when [she] left.\n"
    )
    tests = [f"open_sesame:{tmp_path / 'refl.1'}", f"winobias:{tmp_path / 'wino'}"]
    summary = Recipe("supervise_mlm", **QUICK).run(
        tmp_path / "run",
        task="antecedents",
        train_file=f"open_sesame:{tmp_path / 'refl.0'}",
        test_file=tests,
        validation_every=4,
        distractor="before",
    )
    assert (summary["test_examples_refl.1"], summary["test_examples_wino"]) == (1, 2)
    assert summary["accuracy_among_mentions_wino_chance"] == 0.5
    assert summary["accuracy_wino_nearest_mention"] == 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"layer": 2}, "layer must be below 2, the number of layers, got 2"),
        ({"head": 4}, "head must be below 4, the number of heads, got 4"),
        ({"validation_every": 40}, "there are 24 training sentences; validation_every=40 leaves none"),
        ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs must be greater than 0"),
    ],
)
def test_heads_and_numbers_that_do_not_fit_are_refused(flags, message, tmp_path, refused):
    with refused(message):
        Recipe("supervise_mlm", **QUICK).run(tmp_path / "run", **flags)


def test_flags_without_effect_are_refused():
    for flags, message in (
        ({"train_file": ["a.conllu"]}, "needs --test_file"),
        ({"test_file": ["a.conllu"]}, "needs --train_file"),
        ({"model": "bert", "hidden_size": 32}, "hidden_size=32 has no effect here; the checkpoint has its own"),
        (
            {"task": "antecedents", "train_file": ["winobias:a"], "test_file": ["winobias:a/b", "winogender:c/b"]},
            "test_file must be non-empty and unique",
        ),
        ({"distractor": "before"}, "distractor=before needs --task antecedents and open_sesame:PATH"),
    ):
        with pytest.raises(ValueError, match=message):
            SuperviseArguments(**flags)


def test_the_tokenizer_of_a_checkpoint_is_saved_with_both_models(run):
    _, folder = run
    for name in ("model", "model_unguided"):
        assert AutoTokenizer.from_pretrained(folder / name).mask_token
