import csv
import json
from pathlib import Path

import pytest
import torch
import translating
import yaml
from launching import words
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from translating import files, write_pairs

from hf_attn_dynamics.recipes import compare_translation, translation
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags
from hf_attn_dynamics.recipes.summaries.compare_translation import ComparisonSummary


ROOT = Path(__file__).parents[2]


SYSTEMS = ("base", "guided", "hard_coded")
SMALL = {**translating.SMALL, "eval_steps": 2, "logging_steps": 4, "max_eval_examples": 6}


def flags(folder, text, **changes):
    return words(**{"output_dir": folder, **SMALL, **files(text), **changes})


def parse(*argv):
    return parse_yaml_or_flags(
        compare_translation.ComparisonArguments,
        compare_translation.ComparisonTrainingArguments,
        presets=compare_translation.PRESETS,
        argv=list(argv),
    )


def run(argv):
    return compare_translation.main(*parse(*argv))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("finished") / "run"
    test = {"test_source_file": text / "test.de", "test_target_file": text / "test.en"}
    return folder, run(flags(folder, text, languages=["de", "en"], **test))


def history(folder, system):
    return json.loads((folder / f"checkpoints/{system}/checkpoint-4/trainer_state.json").read_text())["log_history"]


def test_a_run_leaves_summary_table_picture_models_and_cards(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    picture = (folder / "curves.svg").read_text()
    assert (folder / "curves.png").stat().st_size > 0
    for system in SYSTEMS:
        assert system.replace("_", "-") in picture
        card = yaml.safe_load((folder / system / "README.md").read_text().split("---")[1])
        assert f"sacrebleu {summary['sacrebleu_version']}" in (folder / system / "README.md").read_text()
        assert card["pipeline_tag"] == "translation"
        assert card["language"] == ["de", "en"]


def test_the_summary_has_the_documented_keys(finished):
    documented = {key for keys in ComparisonSummary.documentation() for key in keys.split(", ")}
    assert documented == set(finished[1])
    assert {"seed", "device", "command", "torch_version", "sacrebleu_version"} <= set(finished[1])


def test_the_table_has_a_line_per_metric_and_a_column_per_system(finished):
    folder, summary = finished
    with (folder / "table.csv").open() as file:
        table = {row["metric"]: row for row in csv.DictReader(file)}
    assert list(table)[:4] == ["train_nll", "average_train_nll", "validation_nll", "bleu"]
    for metric, row in table.items():
        assert list(row) == ["metric", *SYSTEMS]
        assert [float(row[system]) for system in SYSTEMS] == [summary[f"{metric}_{system}"] for system in SYSTEMS]


@pytest.mark.parametrize("system", SYSTEMS)
def test_training_losses_are_those_of_the_log_without_guidance(finished, system):
    folder, summary = finished
    losses = [entry["task_loss"] for entry in history(folder, system) if "loss" in entry]
    assert len(losses) == 2  # a checkpoint ends a window
    assert summary[f"train_nll_{system}"] == losses[-1]
    assert summary[f"average_train_nll_{system}"] == pytest.approx(sum(losses) / 2)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_curve_ends_in_the_likelihood_of_the_saved_model(finished, text, system):
    folder, summary = finished
    sources, targets = ((text / f"valid.{side}").read_text().splitlines()[:6] for side in ("de", "en"))
    model, tokenizer = (cls.from_pretrained(folder / system) for cls in (AutoModelForSeq2SeqLM, AutoTokenizer))
    total = count = 0
    for source, target in zip(sources, targets):
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(**tokenizer(source, return_tensors="pt"), labels=labels).logits
        total -= logits.log_softmax(-1)[0, range(labels.shape[1]), labels[0]].sum().item()
        count += labels.shape[1]
    assert summary[f"validation_nll_{system}"] == pytest.approx(total / count, rel=1e-5)
    curve = summary[f"eval_curve_{system}"]
    assert [step for step, _ in curve] == [2, 4]
    assert curve[-1][1] == pytest.approx(total / count, rel=1e-5)
    assert summary["bleu_text"] == "test"


def test_systems_start_alike_and_see_the_same_batches_in_every_epoch(tmp_path, text, monkeypatch):
    build = translation.translation_trainer
    starts, batches = {}, {}

    def watched(name, model, *args, **kwargs):
        trainer = build(name, model, *args, **kwargs)
        starts[name] = {key: value.clone() for key, value in model.state_dict().items()}
        batches[name] = []
        step = trainer.training_step
        trainer.training_step = lambda model, inputs, *rest: (
            batches[name].append(inputs["labels"].tolist()) or step(model, inputs, *rest)
        )
        return trainer

    monkeypatch.setattr(translation, "translation_trainer", watched)
    run(flags(tmp_path / "run", text, max_steps=16, save_strategy="no", dropout=0.1, attention_dropout=0.1))
    assert len(batches["base"]) == 16 > len(translating.PAIRS) / 8
    for system in ("guided", "hard_coded"):
        assert batches[system] == batches["base"]
        assert starts[system].keys() <= starts["base"].keys()
        for key, value in starts[system].items():
            torch.testing.assert_close(value, starts["base"][key], rtol=0, atol=0)
    assert starts["guided"].keys() == starts["base"].keys()


def test_guided_is_base_where_guidance_weighs_nothing(tmp_path, text):
    summary = run(flags(tmp_path / "run", text, systems=["base", "guided"], guidance_weight=0))
    for figure in ("train_nll", "average_train_nll", "validation_nll", "bleu", "eval_curve"):
        assert summary[f"{figure}_guided"] == summary[f"{figure}_base"], figure
    assert summary["steps_to_base_final"] == summary["steps"] == 4


def test_by_default_one_head_is_guided_to_each_side_in_the_encoder(finished):
    folder, summary = finished
    config = AutoModelForSeq2SeqLM.from_pretrained(folder / "guided").config
    assert config.guided_heads() == {0: {"next": [0], "prev": [1]}}
    assert summary["guidance_weight_initial"] > 0
    assert any("guidance_loss" in entry for entry in history(folder, "guided"))
    for system in ("base", "hard_coded"):
        assert AutoModelForSeq2SeqLM.from_pretrained(folder / system).config.guidance is None
        assert not any("guidance_loss" in entry for entry in history(folder, system))


def test_by_default_self_attention_is_hard_coded_in_encoder_and_decoder(finished):
    config = AutoModelForSeq2SeqLM.from_pretrained(finished[0] / "hard_coded").config
    assert config.hard_coded == compare_translation.HARD_CODED
    assert finished[1]["parameters_hard_coded"] < finished[1]["parameters_base"] == finished[1]["parameters_guided"]


@pytest.mark.parametrize(
    ("guidance", "sites"),
    [
        ('{"fraction": 0.25, "patterns": ["first"]}', {"encoder": {"first": [0]}}),
        ("{}", {"encoder": {"next": [0], "prev": [1]}}),
        ('{"decoder": {"heads": {"prev": [2]}}, "cross": {"heads": {"self": [0, 1]}}}',
         {"decoder": {"prev": [2]}, "cross": {"self": [0, 1]}}),
    ],
)  # fmt: skip
def test_guidance_names_heads_of_the_encoder_or_of_each_site(tmp_path, text, guidance, sites):
    run(flags(tmp_path / "run", text, systems="guided", guidance=guidance, max_steps=2))
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/guided").config
    guided = {kind: config.guided_heads(kind).get(0) for kind in ("encoder", "decoder", "cross")}
    assert {kind: heads for kind, heads in guided.items() if heads} == sites


def test_systems_that_were_not_asked_for_are_null_and_order_does_not_matter(tmp_path, text, finished):
    summary = run(flags(tmp_path / "run", text, systems=["hard_coded", "base"]))
    assert list(summary["examples"][0]) == ["source", "target", "base", "hard_coded"]
    for figure in ("train_nll", "validation_nll", "bleu", "seconds_per_step", "eval_curve"):
        assert summary[f"{figure}_guided"] is None
    assert summary["steps_to_base_final"] is summary["step_ratio"] is summary["guidance_weight_initial"] is None
    assert not (tmp_path / "run/guided").exists()
    # One system does not depend on which others are trained.
    assert summary["validation_nll_hard_coded"] == finished[1]["validation_nll_hard_coded"]


def test_the_step_at_which_guided_reaches_the_end_of_base_is_the_first_at_or_below_it():
    def with_losses(*losses):
        return {"history": [{"step": 10 * i, "eval_loss": loss} for i, loss in enumerate(losses, 1)]}

    base = with_losses(5.0, 2.0, 3.0)
    assert compare_translation.guided_reaches_base({"base": base, "guided": with_losses(4.0, 3.0, 2.5)}) == (20, 3.0)
    assert compare_translation.guided_reaches_base({"base": base, "guided": with_losses(4.0, 3.5, 3.1)}) is None
    assert compare_translation.guided_reaches_base({"base": base}) is None


def test_smoothing_is_in_the_losses_of_training_but_not_in_the_likelihood(tmp_path, text):
    plain = {"systems": "base", "learning_rate": 0.0}  # all models are the same
    summaries = [run(flags(tmp_path / str(x), text, **plain, label_smoothing_factor=x)) for x in (0.0, 0.5)]
    assert summaries[0]["validation_nll_base"] == summaries[1]["validation_nll_base"]
    assert summaries[0]["eval_curve_base"][-1][1] == pytest.approx(summaries[0]["validation_nll_base"])
    for figure in ("train_nll_base", "average_train_nll_base"):
        assert summaries[0][figure] != pytest.approx(summaries[1][figure], rel=1e-3)


def test_learning_is_seen_in_bleu_and_likelihood(tmp_path, text):
    longer = {"max_steps": 100, "hidden_size": 32, "save_strategy": "no", "eval_steps": 50, "logging_steps": 10}
    summary = run(flags(tmp_path / "run", text, **longer, per_device_train_batch_size=16))
    for system in SYSTEMS:
        assert summary[f"bleu_{system}"] > 50
        assert summary[f"validation_nll_{system}"] < 0.5
        assert summary[f"train_nll_{system}"] < summary[f"average_train_nll_{system}"]


def test_bfloat16_changes_the_losses_a_little(tmp_path, text, finished):
    summary = run(flags(tmp_path / "run", text, bf16="true"))
    for system in SYSTEMS:
        exact = finished[1][f"validation_nll_{system}"]
        assert exact != summary[f"validation_nll_{system}"] == pytest.approx(exact, rel=0.02)


def test_a_language_that_the_tokenizer_does_not_know_is_warned_of(tmp_path, text, caplog):
    write_pairs(tmp_path, "valid", [("Ο γάτος βλέπει", "the cat sees the cow")] * 2)
    strange = {"validation_source_file": tmp_path / "valid.de", "validation_target_file": tmp_path / "valid.en"}
    run(flags(tmp_path / "run", text, systems="base", max_steps=1, **strange))
    warnings = [record.message for record in caplog.records if "<unk>" in record.message]
    assert len(warnings) == 1
    assert "the validation source" in warnings[0]


def test_it_runs_as_a_script_and_shows_results_and_translations(tmp_path, text, run_as_script):
    argv = flags(tmp_path / "run", text, systems=["base", "guided"], max_steps=2)
    output = run_as_script("compare_translation.py", *argv)
    example = json.loads((tmp_path / "run/summary.json").read_text())["examples"][0]
    for line in (f"source     {example['source']}", f"reference  {example['target']}", "| guided |", "table.csv"):
        assert line in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"systems": []}, "systems"),
        ({"systems": "best"}, "systems must be among base, guided, hard_coded, got 'best'"),
        ({"systems": ["base", "base"]}, "systems must be non-empty and unique, got ['base', 'base']"),
        ({"systems": "base", "guidance": "{}"}, "guidance={} needs the system guided"),
        ({"systems": "base", "hard_coded": "{}"}, "hard_coded={} needs the system hard_coded"),
        ({"systems": "base", "guidance_weight": 1}, "guidance_weight=1.0 needs the system guided"),
        ({"guidance": "{"}, "guidance '{' is not valid JSON"),
        ({"guidance": "[1]"}, "must be a dictionary or None, got [1]"),
        ({"guidance": '{"encoder": {}, "fraction": 0.5}'}, "fraction"),
        ({"guidance": '{"patterns": ["nxt"]}'}, "pattern 'nxt'"),
        ({"num_attention_heads": 1}, "head 1"),
        ({"hard_coded": "{"}, "hard_coded '{' is not valid JSON"),
        ({"gate_penalty": 0.1}, "gate_penalty=0.1 has no effect here; this recipe prunes no heads"),
        ({"target_heads": 4}, "target_heads=4 has no effect here; this recipe prunes no heads"),
        ({"keep": 4}, "--keep"),
        ({"num_train_epochs": 2}, "num_train_epochs=2.0 has no effect here; set max_steps"),
        ({"systems": "base", "guidance_schedule": "constant"}, "guidance_schedule=constant needs the system guided"),
        ({"guidance_schedule": '{"syntax": "constant"}'}, "names 'syntax', but heads are guided to"),
        ({"guidance_schedule": '{"syntax": "slow"}'}, "guidance_schedule of 'syntax' must be one of linear, hold_lin"),
        ({"guidance_schedule": '{"prev": '}, 'guidance_schedule={"prev":  is not valid JSON'),
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"generation_max_length": 1000}, "generation_max_length=1000"),
        ({"target_file": "nowhere.en"}, "nowhere.en"),
        ({"preset": "huge"}, "preset 'huge' is not one of numerals, small, base"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, capsys, changes, message):
    with pytest.raises(SystemExit) as stop:
        run(flags(tmp_path / "run", text, **changes))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in error
    assert message in error
    assert not (tmp_path / "run").exists()
