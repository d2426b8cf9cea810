# Licensed under the Apache License, Version 2.0.
import csv
import json
from pathlib import Path

import pytest
from documented import undocumented
from tiny_models import tiny_config
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM

from hf_attn_dynamics import CoreferenceScores, coreference_accuracy, prune_heads
from hf_attn_dynamics.data import add_distractors, load_open_sesame, load_winobias, train_byte_level_bpe
from hf_attn_dynamics.recipes import probe_coreference
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags
from hf_attn_dynamics.recipes.summaries.probe_coreference import SUMMARY


ROOT = Path(__file__).parents[2]


SMALL = {"device": "cpu", "cpu_threads": 1, "disable_tqdm": "true"}
PAIRS = [(who, whom) for who in ("king", "boy") for whom in ("cat", "dog")]
REFLEXIVES = [f"the {who} hurt the {whom} by himself\t6\t0 1\t3 4" for who, whom in PAIRS]
CONLL = """#begin document (x); part 000
x 0 0 The DT * - (0
x 0 1 king NN * - 0)
x 0 2 told VBD * - -
x 0 3 Ann NNP * - (1)
x 0 4 that IN * - -
x 0 5 he PRP * - (0)
x 0 6 saw VBD * - -
x 0 7 Ann NNP * - (1)

#end document
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data of three kinds, a headwise model, and a stock one without some of its heads."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "refl.0").write_text("\n".join(REFLEXIVES))
    (folder / "pro_stereotyped_type1.txt.dev").write_text("[The cook] met the clerk when [he] left.\n")
    (folder / "anti_stereotyped_type1.txt.dev").write_text("The cook met [the clerk] when [she] left.\n")
    (folder / "x_conll").write_text(CONLL)
    items = load_open_sesame(folder / "refl.0")
    # A word at the beginning of a text is another token than one within.
    texts = [item.text for seed in range(30) for item in (*items, *add_distractors(items, seed=seed))]
    tokenizer = train_byte_level_bpe([*texts, CONLL], 600, kind="bert")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 120}
    models = {
        "headwise": AutoModelForMaskedLM.from_config(tiny_config("bert", **sizes)),
        "pruned": prune_heads(
            BertForMaskedLM(
                BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, **sizes)
            ),
            {1: [0, 3]},
        ),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def run(folder, **settings):
    settings = {"output_dir": folder, **SMALL, **settings}
    argv = [word for key, value in settings.items() for word in (f"--{key}", *str(value).split(" "))]
    return probe_coreference.main(*parse_yaml_or_flags(probe_coreference.ProbeArguments, argv=argv))


def everything(files):
    data = f"open_sesame:{files}/refl.0 winobias:{files} conll2012:{files}/x_conll"
    return {"models": f"full={files}/headwise less={files}/pruned", "data": data, "random_seeds": "3 4"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, run(folder, **everything(files))


def test_the_summary_has_every_figure_and_is_what_was_returned(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert undocumented(probe_coreference, summary) == set()
    of_rows = {word.removeprefix("rows[].") for keys in SUMMARY.documentation() for word in keys.split(", ")}
    assert summary["rows"][0].keys() <= of_rows
    assert summary["models"] == ["full", "full-random3", "full-random4", "less", "less-random3", "less-random4"]
    assert summary["special_tokens"] == {"open_sesame": True, "winobias": True, "conll2012": False}
    assert summary["mentions_only"] == {"open_sesame": False, "winobias": False, "conll2012": True}


def test_rows_are_the_scores_of_the_library(finished, files):
    folder, summary = finished
    model, tokenizer = (auto.from_pretrained(files / "headwise") for auto in (AutoModelForMaskedLM, AutoTokenizer))
    scores = coreference_accuracy(model, tokenizer, load_winobias(files))
    assert CoreferenceScores.load(folder / "scores" / "full" / "winobias.json") == scores
    rows = [row for row in summary["rows"] if (row["model"], row["data"]) == ("full", "winobias")]
    assert [row["group"] for row in rows] == list(scores.counts) == ["all", "anti type 1", "pro type 1"]
    for row in rows:
        best = (row["site"], row["layer"], row["head"], row["best"])
        assert (best, row["mean"], row["items"]) == (
            scores.best(row["group"]), pytest.approx(scores.mean(row["group"])), scores.counts[row["group"]]
        )  # fmt: skip
        assert row["nearest_mention"] == scores.baselines["nearest mention"][row["group"]]


def test_heads_that_were_removed_have_no_score(finished):
    folder, _ = finished
    tables = [CoreferenceScores.load(file).accuracy["all"]["encoder"] for file in (folder / "scores/less").iterdir()]
    assert len(tables) == 3
    assert all(table.isnan().nonzero().tolist() == [[1, 0], [1, 3]] for table in tables)


def test_the_table_has_baselines_and_models_by_data_and_group(finished):
    folder, summary = finished
    with open(folder / "table.csv") as file:
        header, *lines = csv.reader(file)
    assert header[1:] == [
        *("open_sesame all", "winobias all", "winobias anti type 1", "winobias pro type 1"),
        *("conll2012 all", "conll2012 pronominal", "conll2012 proper"),
    ]
    baselines = ["previous word", "first word", "nearest mention", "chance"]
    assert [line[0] for line in lines] == [*baselines, *summary["models"]]
    assert all(0 <= float(cell) <= 1 for line in lines for cell in line[1:])
    assert [float(line[1]) for line in lines[:3]] == [0, 0, 0]
    for suffix in ("png", "svg"):
        assert (folder / f"heads.{suffix}").stat().st_size


def test_what_competes_can_be_chosen(files, tmp_path):
    data = {"models": f"a={files}/headwise", "data": f"conll2012:{files}/x_conll"}
    as_clark = run(tmp_path / "clark", **data)["rows"][0]
    summary = run(tmp_path / "all", **data, special_tokens="true", mentions_only="false")
    assert summary["special_tokens"] == {"conll2012": True}
    assert summary["mentions_only"] == {"conll2012": False}
    assert summary["rows"][0]["chance"] < as_clark["chance"]


def test_items_are_drawn_by_the_seed(files, tmp_path):
    data = {"models": f"a={files}/headwise", "data": f"open_sesame:{files}/refl.0", "distractor": "none"}
    summary = run(tmp_path / "run", **data, max_items=2)
    assert summary["rows"][0]["items"] == 2
    assert summary["rows"][0]["chance"] == pytest.approx(2 / 9)


def test_without_arguments_embedded_sentences_are_asked_of_a_tiny_model(tmp_path, capsys):
    summary = run(tmp_path / "run")
    assert (summary["models"], summary["data"], summary["rows"][0]["items"]) == (["tiny"], ["embedded"], 20)
    printed = capsys.readouterr().out
    assert "| tiny " in printed
    assert "tiny, embedded: layer" in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": "no-name"}, "model 'no-name' cannot be loaded: there is no such folder, nor"),
        ({"models": "a=/no/such"}, "model '/no/such' cannot be loaded: no such folder."),
        ({"models": "a=x a=y"}, "model names 'a' twice"),
        ({"models": "a/b=x"}, "model names 'a/b'; use letters"),
        ({"models": "a-random0=x"}, "model names 'a-random0'"),
        ({"data": "refl.0"}, "data must be KIND:PATH, got 'refl.0'"),
        ({"data": "gap:refl.0"}, "data 'gap' is not one of open_sesame"),
        ({"data": "winobias:nowhere"}, "nowhere is neither a file nor a folder"),
        ({"data": "winobias:a/x winobias:b/x"}, "data names 'winobias-x' twice"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_items": 0}, "max_examples must be at least 1, got 0"),
        ({"distractor": "within"}, "distractor must be before, after or none, got 'within'"),
        ({"distractor": "after"}, "distractor=after needs --data open_sesame:PATH"),
        ({"random_seeds": "1 1"}, "random_seeds must be non-empty and unique"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, capsys, settings, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "run", **settings)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sentences_of_other_words_are_refused(tmp_path, capsys):
    (tmp_path / "refl.0").write_text("the unheardof wight would defenestrate himself\t4\t0 1\n")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", data=f"open_sesame:{tmp_path}/refl.0")
    assert "every sentence has a word of several tokens of tiny" in capsys.readouterr().err
