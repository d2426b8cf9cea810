import csv
import json
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import translating
import yaml
from launching import words
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from translating import PAIRS, files, write_pairs

from hf_attn_dynamics import HeadwiseMarianMTModel, head_relevance
from hf_attn_dynamics.recipes import train_translation, translation
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags
from hf_attn_dynamics.recipes.summaries.train_translation import TranslationSummary
from hf_attn_dynamics.recipes.sweeps import Sweep, collect


ROOT = Path(__file__).parents[2]


SMALL = {**translating.SMALL, "gate_steps": 4, "finetune_steps": 2}


def flags(folder, text=None, **changes):
    given = {} if text is None else files(text)
    return words(**{"output_dir": folder, **SMALL, **given, **changes})


def parse(*argv):
    return parse_yaml_or_flags(
        train_translation.PruningArguments,
        train_translation.PruningTrainingArguments,
        presets=train_translation.PRESETS,
        argv=list(argv),
    )


def run(argv):
    return train_translation.main(*parse(*argv))


def weights(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run with two numbers of heads, each also from scratch, and a test text."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    test = {"test_source_file": text / "test.de", "test_target_file": text / "test.en"}
    more = {"num_beams": 2, "languages": ["de", "en"], "relevance_examples": 1000}
    summary = run(flags(folder, text, keep=[6, 3], from_scratch="true", **more, **test))
    return folder, summary


@pytest.fixture(scope="module")
def plain(tmp_path_factory, text):
    """A run with nothing special."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, run(flags(folder, text, keep=6, seed=7))


def test_a_run_leaves_summary_table_pictures_models_and_cards(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    for name in ("curve", "heads", "gates", "gate_history"):
        for suffix in ("png", "svg"):
            assert (folder / f"{name}.{suffix}").stat().st_size > 0, name
    for name in ("dense", "model-6", "model-3"):
        card = yaml.safe_load((folder / name / "README.md").read_text().split("---")[1])
        assert f"sacrebleu {summary['sacrebleu_version']}" in (folder / name / "README.md").read_text()
        assert card["pipeline_tag"] == "translation"
        assert card["language"] == ["de", "en"]


def test_the_summary_has_the_documented_keys(finished):
    summary = finished[1]
    documented = {key for keys in TranslationSummary.documentation() for key in keys.split(", ")}
    assert {key for key in documented if not key.startswith("rows[].")} == set(summary)
    assert {key.removeprefix("rows[].") for key in documented if key.startswith("rows[].")} == set(summary["rows"][0])
    assert {"seed", "device", "command", "torch_version", "sacrebleu_version"} <= set(summary)


def test_exactly_so_many_heads_are_left_and_the_summary_says_where(finished):
    folder, summary = finished
    assert (summary["heads_total"], summary["heads_kept"]) == (12, 6)
    assert [row["heads"] for row in summary["rows"]] == [12, 6, 3, 6, 3]
    for row in summary["rows"]:
        assert row["heads"] == row["heads_encoder"] + row["heads_decoder"] + row["heads_cross"]
        # There is one layer.
        for kind in ("encoder", "decoder", "cross"):
            assert row[f"mean_layer_{kind}"] == (0.0 if row[f"heads_{kind}"] else None)
    for keep in (6, 3):
        kept = AutoModelForSeq2SeqLM.from_pretrained(folder / f"model-{keep}").config.kept_heads()
        row = next(row for row in summary["rows"] if row["heads"] == keep)
        assert {site.kind: len(heads) for site, heads in kept.items()} == {
            kind: row[f"heads_{kind}"] for kind in ("encoder", "decoder", "cross")
        }


def test_the_mean_layer_is_that_of_the_heads():
    assert train_translation.mean_layer([1, 0, 3]) == 1.5


def test_models_load_by_their_names_and_translate_as_the_summary_says(finished, text):
    folder, summary = finished
    sources, references = ((text / f"test.{side}").read_text().splitlines() for side in ("de", "en"))
    for name, row in (("dense", summary["rows"][0]), ("model-6", summary["rows"][1])):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / name)
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert isinstance(model, HeadwiseMarianMTModel)
        assert model.generation_config.use_cache
        assert model.config.use_cache
        assert model.config.gates is None
        longest = model.config.max_position_embeddings
        hypotheses = []
        for source in sources:  # one by one, where the run makes batches
            tokens = model.generate(**tokenizer(source, return_tensors="pt"), num_beams=2, max_length=longest)
            hypotheses.append(tokenizer.decode(tokens[0], skip_special_tokens=True).strip())
        assert BLEU().corpus_score(hypotheses, [references]).score == pytest.approx(row["bleu"])
        for example in summary["examples"]:
            key = "dense" if name == "dense" else "pruned"
            assert hypotheses[sources.index(example["source"])] == example[key]
        assert row["parameters"] == sum(p.numel() for p in model.parameters())


def test_relevance_is_that_of_the_dense_model_on_validation_pairs(finished, plain, text):
    """Sentence by sentence."""
    folder, summary = finished
    model, tokenizer = translating.loaded(folder / "dense")
    pairs = zip(*translating.lines(text, "valid"))
    batches = [tokenizer(source, text_target=target, return_tensors="pt") for source, target in pairs]
    expected = head_relevance(model, map(dict, batches), rule="alpha_beta")
    for kind in ("encoder", "decoder", "cross"):
        found = torch.tensor(summary["relevance"][kind], dtype=torch.float64)
        torch.testing.assert_close(found, expected[kind], rtol=0, atol=1e-5)
        assert summary[f"relevance_largest_{kind}"] == pytest.approx(found.amax(1).mean().item())
        median = sum(statistics.median(row) for row in found.tolist()) / len(found)
        assert summary[f"relevance_median_{kind}"] == pytest.approx(median)
    assert (folder / "relevance.png").stat().st_size > 0
    assert not any(key.startswith("relevance") for key in plain[1])


def test_the_likelihood_is_that_of_the_model_without_smoothing(finished, text):
    folder, summary = finished
    sources, targets = ((text / f"valid.{side}").read_text().splitlines() for side in ("de", "en"))
    model, tokenizer = (cls.from_pretrained(folder / "model-6") for cls in (AutoModelForSeq2SeqLM, AutoTokenizer))
    total = count = 0
    for source, target in zip(sources, targets):
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(**tokenizer(source, return_tensors="pt"), labels=labels).logits
        total -= logits.log_softmax(-1)[0, range(labels.shape[1]), labels[0]].sum().item()
        count += labels.shape[1]
    assert summary["nll_pruned"] == pytest.approx(total / count, rel=1e-5)
    assert summary["bleu_text"] == "test"


def test_the_table_has_both_ways_to_the_same_heads_side_by_side(finished):
    folder, summary = finished
    with (folder / "table.csv").open() as file:
        table = {row["model"]: row for row in csv.DictReader(file)}
    assert list(table) == ["dense", "6", "3"]
    assert table["dense"]["bleu_from_scratch"] == ""
    for keep in (6, 3):
        pruned, scratch = (row for row in summary["rows"] if row["heads"] == keep)
        assert float(table[str(keep)]["nll_from_trained"]) == pruned["nll"]
        assert float(table[str(keep)]["nll_from_scratch"]) == scratch["nll"]
        assert table[str(keep)]["heads_cross"] == str(pruned["heads_cross"])
        assert {key: pruned[key] for key in ("heads_encoder", "heads_decoder", "parameters")} == {
            key: scratch[key] for key in ("heads_encoder", "heads_decoder", "parameters")
        }
    assert summary["nll_from_scratch"] != summary["nll_pruned"]
    assert summary["steps_from_scratch"] == summary["steps_pruned"] == 4 + 4 + 2


def test_learning_is_seen_in_bleu_and_likelihood(tmp_path, text):
    longer = {"max_steps": 150, "hidden_size": 32, "save_strategy": "no", "finetune_steps": 20, "gate_steps": 20}
    summary = run(flags(tmp_path / "run", text, keep=10, per_device_train_batch_size=16, **longer))
    assert summary["exact_match_dense"] > 0.9
    assert summary["bleu_dense"] > 90
    assert summary["nll_dense"] < 0.3


def test_the_rate_goes_on_falling_where_it_was():
    _, training_args = parse("--max_steps", "100", "--warmup_steps", "20", "--learning_rate", "1e-2")
    parameter = torch.nn.Parameter(torch.zeros(1))

    def rates(rate, warmup, steps, **kwargs):
        optimizer = torch.optim.SGD([parameter], lr=rate)
        schedule = train_translation_schedule(optimizer, num_warmup_steps=warmup, **kwargs)
        found = []
        for _ in range(steps):
            found.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        return found

    from transformers.optimization import get_inverse_sqrt_schedule as train_translation_schedule

    whole = rates(1e-2, 20, 160)
    settings = train_translation.schedule_after(100, training_args)
    later = rates(settings["learning_rate"], settings["warmup_steps"], 60, **settings["lr_scheduler_kwargs"])
    assert later == pytest.approx(whole[100:])
    training_args.lr_scheduler_type = "linear"
    assert train_translation.schedule_after(100, training_args) == {}


def test_gates_in_the_encoder_alone_leave_the_decoder_as_it_is(tmp_path, text):
    summary = run(flags(tmp_path / "run", text, gate_sites="encoder", keep=2))
    assert (summary["heads_total"], summary["heads_kept"]) == (4, 2)
    assert (summary["heads_encoder"], summary["heads_decoder"], summary["heads_cross"]) == (2, 4, 4)
    dense, pruned = weights(tmp_path / "run/dense"), weights(tmp_path / "run/model-2")
    changed = {name for name in pruned if not torch.equal(dense.get(name, torch.empty(0)), pruned[name])}
    assert changed
    assert all(name.startswith("model.encoder.layers") for name in changed)


def test_all_else_is_trained_with_gates_everywhere(finished):
    dense, pruned = weights(finished[0] / "dense"), weights(finished[0] / "model-6")
    assert not torch.equal(dense["model.decoder.layers.0.fc1.weight"], pruned["model.decoder.layers.0.fc1.weight"])
    assert not torch.equal(dense["model.shared.weight"], pruned["model.shared.weight"])


def test_each_penalty_coefficient_gives_a_model(tmp_path, text):
    # The second penalty is high enough to close gates within a few steps, since these move by the gate learning rate.
    penalties = {"gate_penalty": [1e-6, 100], "gate_learning_rate": 2, "gate_steps": 6}
    summary = run(flags(tmp_path / "run", text, gate_sites="encoder", from_scratch="true", **penalties))
    dense, free, dear, *scratch = summary["rows"]
    assert (free["gate_penalty"], dear["gate_penalty"]) == (1e-6, 100)
    assert dear["heads"] == 0 < free["heads"]
    assert [row["heads"] for row in scratch] == [free["heads"], 0]
    assert dense["gate_penalty"] is None
    for name in ("model-penalty-1e-06", "model-penalty-100"):
        assert (tmp_path / "run" / name / "README.md").is_file()
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model-penalty-100").config
    assert config.pruned_heads == {"encoder": {0: [0, 1, 2, 3]}}


def test_guided_heads_are_trained_with_the_guidance_loss(plain, tmp_path, text):
    guided = {"guidance": '{"fraction": 0.5, "patterns": ["first"]}', "guidance_weight": 1, "logging_steps": 1}
    summary = run(flags(tmp_path / "guided", text, keep=6, seed=7, finetune_steps=1, **guided))
    assert summary["nll_dense"] != plain[1]["nll_dense"]
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "guided/dense").config
    assert config.guided_heads() == {0: {"first": [0, 1]}}
    state = json.loads((tmp_path / "guided/checkpoints/dense/checkpoint-4/trainer_state.json").read_text())
    weights = [entry["guidance_weight"] for entry in state["log_history"] if entry.get("guidance_loss", 0) > 0]
    assert weights == pytest.approx([1, 2 / 3, 1 / 3, 0])
    state = json.loads((tmp_path / "guided/checkpoints/model-6/checkpoint-1/trainer_state.json").read_text())
    assert not any("guidance_loss" in entry for entry in state["log_history"])


def test_the_same_seed_gives_the_same_results_also_with_a_guidance_weight_of_zero(plain, tmp_path, text):
    guided = {"guidance": '{"fraction": 0.5}', "guidance_weight": 0}
    second, other = (
        run(flags(tmp_path / "2", text, keep=6, seed=7, **guided)),
        run(flags(tmp_path / "3", text, keep=6)),
    )
    for key in ("nll_dense", "nll_pruned"):
        assert plain[1][key] == second[key]
        assert plain[1][key] != other[key]
    assert other["bleu_from_scratch"] is None
    assert other["steps_from_scratch"] is None
    assert other["bleu_text"] == "validation"


def test_embedded_text_needs_no_file_and_half_and_a_quarter_of_the_heads_are_kept(tmp_path, monkeypatch):
    # As it is, but less of it.
    monkeypatch.setattr(translation, "embedded_translation", partial(translation.embedded_translation, 2_000, 100))
    few = {"vocab_size": 100, "max_eval_examples": 10, "max_length": 64, "finetune_steps": 0}
    summary = run(flags(tmp_path / "run", **few))
    assert summary["text"] == "German number words to English"
    assert [row["heads"] for row in summary["rows"]] == [12, 6, 3]
    assert summary["eval_examples"] == summary["bleu_examples"] == 10
    assert len(summary["examples"]) == 5


def test_longer_pairs_are_not_trained_on(tmp_path, text):
    pairs = [*PAIRS, ("die " * 40 + "Kuh", "the cow")]
    write_pairs(tmp_path, "train", pairs)
    longer = {"source_file": tmp_path / "train.de", "target_file": tmp_path / "train.en"}
    summary = run(flags(tmp_path / "run", text, keep=6, **longer))
    assert summary["train_examples"] == len(PAIRS)


STEPS = {"finetune_steps": 4, "keep": 6, "from_scratch": "true"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run that was not stopped."""
    return run(flags(tmp_path_factory.mktemp("whole") / "run", text, **STEPS))


def validation_losses(folder):
    """Validation losses of a training by its steps, and its last checkpoint."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    log = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["eval_loss"] for entry in log if "eval_loss" in entry}, last


def test_each_model_is_trained_until_the_validation_loss_stops_falling(tmp_path, text):
    # With such a learning rate, the loss soon rises.
    patience = {"early_stopping_patience": 2, "eval_steps": 2, "learning_rate": 0.3, "warmup_steps": 6}
    most = {"max_steps": 80, "finetune_steps": 80, "save_total_limit": 9}
    argv = flags(tmp_path / "run", text, keep=6, from_scratch="true", **patience, **most)
    summary = run(argv)
    found = {}
    for name in ("dense", "model-6", "scratch-6"):
        losses, last = validation_losses(tmp_path / "run/checkpoints" / name)
        found[name] = min(losses, key=losses.get)
        assert last.name == f"checkpoint-{found[name] + 2 * 2}"
        assert max(losses) == found[name] + 2 * 2 < 80
        if name != "scratch-6":
            best = weights(last.with_name(f"checkpoint-{found[name]}"))
            assert all(torch.equal(weight, best[key]) for key, weight in weights(tmp_path / "run" / name).items())
    assert summary["steps_dense"] == found["dense"]
    assert summary["steps_pruned"] == found["dense"] + 4 + found["model-6"]
    assert summary["steps_from_scratch"] == found["scratch-6"]
    assert [row["steps"] for row in summary["rows"]] == [
        summary[f"steps_{model}"] for model in ("dense", "pruned", "from_scratch")
    ]
    # A run that ended between two models goes on with the same ones.
    (tmp_path / "run/summary.json").unlink()
    for record in (tmp_path / "run/checkpoints").glob("*/run.json"):
        record.unlink()
    again = run([*argv, "--resume", "true"])
    for key in ("nll_dense", "nll_pruned", "nll_from_scratch", "steps_pruned", "bleu_from_scratch"):
        assert again[key] == summary[key]


def test_the_sweep_behind_the_results_has_valid_flags_and_finds_its_figures(finished, tmp_path):
    sweep = Sweep.load(ROOT / "recipes/sweeps/translation_pruned.yaml")
    args, training_args = parse(*words(**{**sweep.settings, "output_dir": tmp_path}))
    assert (args.keep, args.from_scratch, training_args.eval_steps) == ([24, 12], True, 874)
    # The run stands for one of the sweep, with a quarter of the heads.
    figures = json.loads(json.dumps(sweep.figures).replace('"heads": 24', '"heads": 6').replace("12}", "3}"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/seed-1").symlink_to(finished[0])
    pruned, scratch = collect(replace(sweep, figures=figures, seeds=[1]), tmp_path)
    assert None not in pruned.values()
    assert pruned["BLEU, 24 heads"] == finished[1]["bleu_pruned"]
    assert scratch["NLL, 24 heads"] == finished[1]["nll_from_scratch"]
    assert scratch["steps, 12 heads"] == 10


def test_translations_that_repeat_themselves_are_cut_short(capsys):
    translation.print_examples([{"source": "eins", "target": "one", "dense": "one " * 100, "pruned": "one"}])
    *_, dense, pruned = capsys.readouterr().out.splitlines()
    assert dense == f"dense      ✗ {'one ' * 75}…"
    assert pruned == "pruned     ✓ one"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_file": "nowhere.de"}, "nowhere.de"),
        ({"source_file": None}, "target_file"),
        ({"validation_source_file": None, "validation_target_file": None}, "no text to evaluate on"),
        ({"validation_source_file": None}, "needs --validation_source_file"),
        ({"source_file": None, "target_file": None}, "needs --source_file or --dataset_name"),
        ({"dataset_name": "some/data"}, "give one of them"),
        ({"target_file": "SHORT"}, "lines"),
        ({"source_column": "de"}, "source_column"),
        ({"keep": 12}, "keep=12, but the gated sites (encoder, decoder, cross) have 12 heads"),
        ({"keep": 4, "gate_sites": ["decoder"]}, "keep=4, but the gated sites (decoder) have 4 heads"),
        ({"num_attention_heads": 1, "gate_sites": ["decoder"]}, "keep=1, but the gated sites (decoder) have 1 heads"),
        ({"keep": 0}, "keep must be at least 1, got 0"),
        ({"keep": [3, 3]}, "keep must be non-empty and unique"),
        ({"keep": 3, "gate_penalty": 0.1}, "give one of them"),
        ({"gate_penalty": -1}, "gate_penalty must be above 0"),
        (
            {"gate_penalty": 0.1, "target_warmup": 0.2},
            "target_warmup=0.2 has no effect here; gate_penalty has no target",
        ),
        ({"gate_penalty": [0.1, 0.1]}, "gate_penalty must be non-empty and unique"),
        ({"gate_sites": "middle"}, "gate_sites must be among encoder, decoder, cross, got 'middle'"),
        ({"gate_sites": []}, "gate_sites"),
        ({"gate_variant": "papre"}, "gate_variant must be paper or paper_code"),
        ({"vocab_size": 5000}, "for these texts, got 5000"),
        ({"vocab_size": 5}, "every character of the texts, got 5"),
        ({"max_length": 2}, "max_length=2, but every pair"),
        ({"hidden_size": 18}, "hidden_size=18 must be a multiple of num_attention_heads=4"),
        ({"dropout": 1.5}, "dropout must be at least 0 and below 1"),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"num_train_epochs": 2}, "num_train_epochs=2.0 has no effect here; set max_steps"),
        ({"gate_steps": 0}, "gate_steps must be at least 1, got 0"),
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"early_stopping_patience": 0}, "early_stopping_patience must be at least 1, got 0"),
        ({"generation_num_beams": 4}, "generation_num_beams=4 has no effect here; set num_beams"),
        ({"generation_max_length": 1000}, "generation_max_length=1000"),
        ({"target_heads": 4}, "target_heads=4 has no effect here; set keep"),
        ({"layer_rate_decay": 0.9}, "layer_rate_decay=0.9 has no effect here; it needs a single stack"),
        ({"guidance": "{"}, "not valid JSON"),
        ({"guidance": '{"patterns": ["nxt"]}'}, "pattern 'nxt'"),
        ({"guidance_weight": 1}, "guidance_weight=1.0 needs --guidance"),
        ({"languages": "de"}, "languages"),
        ({"preset": "huge"}, "preset 'huge' is not one of numerals, small, base"),
        ({"OUTPUT": "other run"}, "already holds files"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, capsys, changes, message):
    folder, changes = tmp_path / "run", dict(changes)
    if changes.pop("OUTPUT", None):
        folder.mkdir()
        (folder / "summary.json").write_text("{}")
    if changes.get("target_file") == "SHORT":
        changes["target_file"] = tmp_path / "short.en"
        changes["target_file"].write_text("the cow\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run(flags(folder, text, **changes))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in error
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before
