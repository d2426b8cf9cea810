# Licensed under the Apache License, Version 2.0.
import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cards import loaded_as_its_card_says
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from translating import PAIRS, words, write_pairs

from hf_attn_dynamics import AgreementTracker, contextualized_agreement, source_rows
from hf_attn_dynamics.recipes import lexical_knowledge
from hf_attn_dynamics.recipes.lexical_arguments import LEXICAL_SIZES
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {
    "embedding_size": 6,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "dropout": 0,
    "max_steps": 6,
    "checkpoints": [0, 2, 4],
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "device": "cpu",
    "cpu_threads": 1,
    "disable_tqdm": "true",
}
ARGUMENTS = (lexical_knowledge.LexicalArguments, lexical_knowledge.LexicalTrainingArguments)
GOOD, BAD = ("powerful", "solid", "fun", "warm"), ("worst", "stupid", "mess", "dull")
NEUTRAL = ("a", "the", "film", "plot", "with", "and", "of")


def sentences(adjectives, seed):
    generator = np.random.default_rng(seed)
    return [
        " ".join([*generator.choice(NEUTRAL, generator.integers(2, 6)), str(generator.choice(adjectives)), "."])
        for _ in range(24)
    ]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name, seed in (("train", 0), ("dev", 2)):
        both = {"1": sentences(GOOD, seed), "0": sentences(BAD, seed + 1)}
        rows = [f"{line}\t{label}\n" for label, lines in both.items() for line in lines]
        (folder / f"{name}.tsv").write_text("".join(rows))
        for label, lines in both.items():
            (folder / f"{name}.class{label}").write_text("\n".join(lines))
    (folder / "one_class.tsv").write_text("".join(f"{line}\t1\n" for line in sentences(GOOD, 0)))
    write_pairs(folder, "train", PAIRS)
    write_pairs(folder, "valid", PAIRS[::4])
    (folder / "short.en").write_text("the cat\n")
    (folder / "empty.en").write_text("\n")
    (folder / "vectors.txt").write_text("film 1 2 3 4 5 6\nfun 6 5 4 3 2 1\n")
    return folder


def classification(text, **settings):
    return {"train_file": text / "train.tsv", "validation_file": text / "dev.tsv", **settings}


def translation(text, **settings):
    return {
        "task": "translation",
        "train_file": [text / "train.de", text / "train.en"],
        "validation_file": [text / "valid.de", text / "valid.en"],
        "vocab_size": 36,
        **settings,
    }


def run(folder, **settings):
    argv = words(**{**SMALL, "output_dir": folder, **settings})
    return lexical_knowledge.main(*parse_yaml_or_flags(*ARGUMENTS, argv=argv))


@pytest.fixture(scope="module")
def classified(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "classification"
    return folder, run(folder, **classification(text, frozen_beta="true", glove=text / "vectors.txt"))


@pytest.fixture(scope="module")
def translated(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "translation"
    return folder, run(folder, **translation(text, readout="additive", optimal_sentences=4))


@pytest.fixture(params=["classified", "translated"])
def finished(request):
    return request.getfixturevalue(request.param)


def assert_documented(summary):
    documented = lexical_knowledge.__doc__.partition("Keys of `summary.json`")[2]
    pairs = {line["pair"] for line in summary["rows"]}
    for key in summary:
        for pair in sorted(pairs, key=len, reverse=True):
            key = key.replace(pair, "PAIR")
        assert key in documented or key.endswith("_version"), key
    assert all(pair in documented for pair in pairs)


def test_the_summary_has_every_figure_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert_documented(summary)
    with open(folder / "table.csv", encoding="utf-8") as file:
        assert [line["pair"] for line in csv.DictReader(file)] == [line["pair"] for line in summary["rows"]]
    for line in summary["rows"]:
        assert 0 <= line["agreement"] <= 1
        assert summary[f"agreement_{line['pair']}"] == line["agreement"]
        assert summary[f"kendall_tau_xi_{line['pair']}"] == line["kendall_tau_xi"]
    for picture in ("agreement", "attention"):
        assert all((folder / f"{picture}.{kind}").is_file() for kind in ("png", "svg"))


def test_models_have_cards_of_the_checkpoint_that_they_are(finished):
    folder, summary = finished
    for name in ("standard", *summary["best_step"]):
        found = loaded_as_its_card_says(folder / name)
        assert found["model"].config.vocab_size == len(found["tokenizer"]) == summary["vocab_size"]
        card = (folder / name / "README.md").read_text()
        step = summary["best_step"].get(name, summary["max_steps"])
        (reached,) = [entry for entry in summary["history"][name] if entry["step"] == step]
        assert f"is taken at step {step} of 6." in card
        assert f"| loss     | {reached['loss']:.3f} |" in card


def test_each_task_has_its_pairs(classified, translated):
    common = ["alpha_beta_uf", "beta_uf_beta_px", "saliency_beta_uf", "alpha_beta"]
    assert [line["pair"] for line in classified[1]["rows"]] == [*common, "alpha_alpha_fr"]
    of_translation = ["alpha_alpha_ibm", "alpha_alpha_ibm_em", "alpha_opt_beta"]
    assert [line["pair"] for line in translated[1]["rows"]] == [*common, *of_translation]
    assert 0 < translated[1]["agreement_alpha_opt_beta"] <= 1


def test_models_are_measured_at_the_checkpoints_and_taken_at_their_best(finished):
    _, summary = finished
    for history in summary["history"].values():
        assert [entry["step"] for entry in history] == [0, 2, 4, 6]
    for model, pair in (("uniform", "alpha_beta_uf"), ("proxy", "beta_uf_beta_px"), ("frozen_beta", "alpha_alpha_fr")):
        if model in summary["history"]:
            best = max(entry["agreement"] for entry in summary["history"][model])
            assert summary[f"agreement_{pair}"] == pytest.approx(best)
            at = {entry["step"]: entry["agreement"] for entry in summary["history"][model]}
            assert at[summary["best_step"][model]] == best


def test_contextualised_agreement_is_that_of_the_second_seed(finished):
    _, summary = finished
    history = summary["history"]["second_seed"]
    reached, performances = ([entry[name] for entry in history] for name in ("agreement", "accuracy"))
    assert summary["xi_star"] == performances[-1] == summary["accuracy"]["second_seed"]
    for line in summary["rows"]:
        xi = contextualized_agreement(line["agreement"], reached, performances)
        assert line["agreement_xi"] == xi.performance
        assert line["agreement_xi_step"] == (None if xi.checkpoint is None else history[xi.checkpoint]["step"])


def test_models_differ_in_their_seed_and_only_attention_of_the_frozen_one_is_trained(classified):
    folder, summary = classified
    losses = [summary["history"][name][0]["loss"] for name in ("standard", "second_seed", "frozen_beta")]
    assert len(set(losses)) == 3
    frozen, standard = (
        AutoModelForSequenceClassification.from_pretrained(folder / name) for name in ("frozen_beta", "standard")
    )
    assert frozen.config.train_attention_only
    # Both started from the same vectors.
    tokenizer = AutoTokenizer.from_pretrained(folder / "standard")
    film = tokenizer.convert_tokens_to_ids("film")
    assert frozen.embeddings.weight[film].tolist() == [1, 2, 3, 4, 5, 6]
    assert standard.embeddings.weight[film].tolist() != [1, 2, 3, 4, 5, 6]
    assert AutoModelForSequenceClassification.from_pretrained(folder / "uniform").config.attention == "uniform"
    assert standard.config.id2label == {0: "0", 1: "1"}


def test_agreement_can_be_found_again_from_the_saved_models(classified, text):
    folder, summary = classified
    corpus, _ = corpus_of(**classification(text))
    standard, uniform = (
        AutoModelForSequenceClassification.from_pretrained(folder / name) for name in ("standard", "uniform")
    )
    reference = source_rows(standard, corpus.batches(), "attention")
    figures = AgreementTracker(corpus.batches(), "probe", reference)(uniform)
    assert figures["agreement"] == pytest.approx(summary["agreement_alpha_beta_uf"])
    assert figures["kendall_tau"] == pytest.approx(summary["kendall_tau_alpha_beta_uf"])


def test_sentences_are_learnt_from_their_words(text, tmp_path):
    summary = run(tmp_path / "run", **classification(text, max_steps=80, checkpoints=[0, 20, 40]))
    assert all(summary["accuracy"][name] > 0.9 for name in ("standard", "second_seed", "uniform"))
    for pair in ("alpha_beta_uf", "beta_uf_beta_px", "alpha_beta"):
        assert summary[f"agreement_{pair}"] > 1.5 * summary["agreement_chance"]
        assert summary[f"kendall_tau_{pair}"] > 0


def test_finished_models_are_not_trained_again(classified, text, monkeypatch):
    folder, summary = classified
    monkeypatch.setattr(lexical_knowledge, "train_lexical_model", lambda *_: pytest.fail("was trained again"))
    settings = classification(text, frozen_beta="true", glove=text / "vectors.txt")
    again = run(folder, resume="true", **settings)
    assert {key for key in summary if again[key] != summary[key]} <= {"agreement_seconds", "command"}
    with pytest.raises(SystemExit):
        run(folder, resume="true", **{**settings, "max_steps": 7})


class StoppedTracker(AgreementTracker):
    """Stops the run when the second seed has been trained for a while."""

    measured = 0

    def __call__(self, model):
        if self.quantity == "attention":
            self.measured += 1
            if self.measured == 3:
                raise KeyboardInterrupt
        return super().__call__(model)


def test_a_model_that_was_stopped_goes_on_from_its_checkpoint(classified, text, tmp_path, monkeypatch):
    settings = classification(text, frozen_beta="true", glove=text / "vectors.txt")
    settings |= {"save_strategy": "steps", "save_steps": 3}
    with monkeypatch.context() as patch:
        patch.setattr(lexical_knowledge, "AgreementTracker", StoppedTracker)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", **settings)
    assert (tmp_path / "run/checkpoints/second_seed/checkpoint-3").is_dir()
    assert not (tmp_path / "run/checkpoints/second_seed/run.json").exists()
    summary = run(tmp_path / "run", resume="true", **settings)
    assert summary["history"] == classified[1]["history"]


@pytest.mark.parametrize("task", LEXICAL_SIZES)
@pytest.mark.parametrize("text", ["embedded", "paper"])
def test_sizes_that_are_not_given_are_those_of_the_text(task, text):
    files = ["--train_file", "a.tsv"] if text == "paper" else []
    args, training_args = parse_yaml_or_flags(*ARGUMENTS, argv=["--task", task, *files, "--hidden_size", "7"])
    lexical_knowledge.choose_sizes(args, training_args)
    found = {**vars(training_args), **vars(args)}
    expected = {**LEXICAL_SIZES[task][text], "hidden_size": 7}
    assert {name: found[name] for name in expected} == expected


def corpus_of(**settings):
    args, training_args = parse_yaml_or_flags(*ARGUMENTS, argv=words(**SMALL, **settings))
    lexical_knowledge.choose_sizes(args, training_args)
    return lexical_knowledge.prepare_corpus(lexical_knowledge.TASKS[args.task](args), args, training_args)


def test_number_words_are_translated_without_files():
    corpus, facts = corpus_of(task="translation", vocab_size=150)
    assert facts["text"] == "German number words to English"
    assert (facts["train_examples"], facts["eval_examples"]) == (10_000, 300)
    lengths = [int(batch["attention_mask"].sum(1).max()) for batch in corpus.batches()]
    assert lengths == sorted(lengths, reverse=True)


def test_texts_come_from_files_of_classes_and_are_split_by_the_seed(text):
    files = [f"good={text / 'train.class1'}", f"bad={text / 'train.class0'}"]
    corpus, facts = corpus_of(train_file=files, validation_share=0.25)
    assert (facts["train_examples"], facts["eval_examples"]) == (36, 12)
    assert facts["text"] == f"{text.name}/train.class1, {text.name}/train.class0"
    assert corpus.labels == ["good", "bad"]
    again, other = (
        corpus_of(train_file=files, validation_share=0.25, seed=seed)[0].train["input_ids"] for seed in (42, 7)
    )
    assert corpus.train["input_ids"][:] == again[:] != other[:]


def test_texts_of_classes_may_be_in_another_encoding(text, tmp_path):
    for label in ("class0", "class1"):
        (tmp_path / label).mkdir()
        for number, line in enumerate((text / f"train.{label}").read_text().splitlines()):
            (tmp_path / label / f"review{number}").write_bytes(f"{line} façade".encode("latin-1"))
    files = [f"good={tmp_path / 'class1'}", f"bad={tmp_path / 'class0'}"]
    corpus, facts = corpus_of(train_file=files, validation_share=0.25, encoding="latin-1")
    assert (facts["train_examples"], facts["eval_examples"]) == (36, 12)
    assert "façade" in corpus.tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"train_file": ["data/sst2/train.tsv"]}, "sst2/train.tsv"),
        ({"train_file": ["good=reviews/pos", "bad=reviews/neg"]}, "reviews/pos, reviews/neg"),
        ({"train_file": ["/a.de", "/b/c/a.en"], "task": "translation"}, "a.de, c/a.en"),
        ({"dataset_name": "nyu-mll/glue", "dataset_config": "sst2"}, "nyu-mll/glue, sst2"),
        ({"dataset_name": "stanfordnlp/sst2"}, "stanfordnlp/sst2"),
    ],
)
def test_a_text_is_called_by_what_tells_it_from_others(settings, name, monkeypatch):
    task = lexical_knowledge.TASKS[settings.get("task", "classification")]
    monkeypatch.setattr(task, "load", lambda self, *files, **hub: Dataset.from_dict({"text": ["a"] * 20}))
    args, _ = parse_yaml_or_flags(*ARGUMENTS, argv=words(**settings))
    assert lexical_knowledge.read_splits(task(args), args, seed=0)[1] == name


def test_tables_of_both_sides_are_translated(tmp_path):
    for name, pairs in (("train", PAIRS), ("valid", PAIRS[::4])):
        (tmp_path / f"{name}.tsv").write_text("de\ten\n" + "".join(f"{one}\t{other}\n" for one, other in pairs))
    files = {"train_file": tmp_path / "train.tsv", "validation_file": tmp_path / "valid.tsv"}
    corpus, facts = corpus_of(task="translation", columns=["de", "en"], vocab_size=36, **files)
    assert facts["train_examples"] == len(PAIRS)
    assert corpus.tokenizer.decode(corpus.train[0]["labels"], skip_special_tokens=True) == PAIRS[0][1]


def test_texts_without_words_are_left_out(text, tmp_path, caplog):
    (tmp_path / "train.tsv").write_text((text / "train.tsv").read_text() + "  \t1\n")
    _, facts = corpus_of(train_file=tmp_path / "train.tsv", validation_file=text / "dev.tsv")
    assert facts["train_examples"] == 48
    assert "1 of 49 texts have no words and are left out" in caplog.text


def test_the_configuration_file_has_every_key_and_its_default():
    path = ROOT / "recipes/configs/lexical_knowledge.yaml"
    from_file, defaults = (parse_yaml_or_flags(*ARGUMENTS, argv=argv) for argv in ([str(path)], []))
    assert from_file[0] == defaults[0]
    values = yaml.safe_load(path.read_text())
    assert set(vars(defaults[0])) <= set(values)
    for name in set(values) - set(vars(defaults[0])):
        assert getattr(from_file[1], name) == getattr(defaults[1], name), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "parsing"}, "task must be classification or translation, got 'parsing'"),
        ({"min_count": 2, "task": "translation"}, "min_count=2 is for task classification, not for translation"),
        ({"encoding": "latin-1"}, "encoding=latin-1 has no effect here; no file is named"),
        ({"readout": "mlp"}, "readout=mlp is for task translation, not for classification"),
        ({"task": "translation", "optimal_sentences": 3}, "optimal_sentences=3 needs readout=additive"),
        ({"validation_file": "dev.tsv"}, "validation_file ['dev.tsv'] needs a train_file or dataset_name"),
        ({"train_file": "a.tsv", "dataset_name": "b"}, "both name a text; give one"),
        ({"train_file": "a.tsv", "validation_share": 1.5}, "validation_share must be between 0 and 1, got 1.5"),
        ({"train_file": "a.tsv", "dataset_split": "test"}, "dataset_split 'test' is of a dataset_name"),
        ({"train_file": "a.tsv", "columns": "text"}, "columns must be two"),
        ({"checkpoints": [3, -1]}, "checkpoints must not be negative, got -1"),
        ({"num_train_epochs": 2}, "num_train_epochs=2.0 has no effect here; set max_steps"),
        ({"eval_strategy": "steps"}, "eval_strategy=steps has no effect here; set checkpoints"),
    ],
    ids=str,
)
def test_flags_that_do_not_go_together_are_one_line(tmp_path, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (classification, {"train_file": "one_class.tsv"}, "all texts to train on have the label 1; two classes"),
        (classification, {"vocab_size": 2}, "vocab_size must be at least 3"),
        (classification, {"min_count": 1000}, "no word of the texts occurs min_count=1000 times"),
        (classification, {"glove": "vectors.txt", "embedding_size": 8}, "have 6 numbers, but embedding_size is 8"),
        (classification, {"glove": "train.de"}, "train.de has none of the"),
        (classification, {"train_file": "nowhere.tsv"}, "nowhere.tsv"),
        (classification, {"max_steps": 0}, "max_steps must be at least 1, got 0"),
        (classification, {"checkpoints": [0, 7]}, "checkpoints name step 7, but max_steps is 6; leave it out"),
        (classification, {"dropout": 0.5}, "dropout=0.5 is applied between LSTM layers"),
        (
            translation,
            {"train_file": ["train.de", "short.en"]},
            "they must be aligned by line",
        ),
        (translation, {"train_file": ["train.de", "empty.en"]}, "empty.en is empty"),
        (translation, {"vocab_size": 4000}, "for these texts, got 4000"),
        (translation, {"max_length": 1}, "max_length=1, but every pair of the training text is longer"),
        (translation, {"train_file": ["train.de", "train.en", "train.de"]}, "has a source and a target file, or one"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bad_text_is_one_line_before_anything_is_written(text, tmp_path, capsys, make, settings, message):
    def placed(name, value):
        if name not in ("train_file", "glove"):
            return value
        return [text / one for one in value] if isinstance(value, list) else text / value

    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", **make(text, **{name: placed(name, value) for name, value in settings.items()}))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_films_are_judged_by_words_that_a_bag_of_words_knows(real_data, tmp_path):
    torch.manual_seed(0)
    sst2 = real_data / "sst2"
    summary = run(
        tmp_path / "run",
        train_file=sst2 / "train.tsv",
        validation_file=sst2 / "dev.tsv",
        embedding_size=24,
        hidden_size=16,
        max_steps=60,
        checkpoints=[0],
        per_device_train_batch_size=64,
        max_eval_examples=300,
        max_length=30,
    )
    assert summary["accuracy"]["standard"] > 0.6
    assert summary["agreement_beta_uf_beta_px"] > 1.5 * summary["agreement_chance"]
