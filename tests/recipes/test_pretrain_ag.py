import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from documented import undocumented
from launching import launch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_attn_dynamics import HeadScores, HeadTimeline
from hf_attn_dynamics.data import train_byte_level_bpe
from hf_attn_dynamics.recipes import objectives, pretrain_ag
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags


ROOT = Path(__file__).parents[2]


SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "block_size": 16,
    "max_steps": 6,
    "eval_steps": 2,
    "logging_steps": 2,
    "save_steps": 3,
    "per_device_train_batch_size": 4,
    "validation_examples": 6,
    "guidance_weight": "auto",
    "disable_tqdm": "true",
    "device": "cpu",
    "cpu_threads": 1,
}
KEYS = [
    "mlm_loss_eval_guided",
    "mlm_loss_eval_unguided",
    "mlm_loss_train_mean_guided",
    "mlm_loss_train_mean_unguided",
    "steps",
    "steps_to_unguided_final",
    "step_ratio",
    "seconds_per_step_guided",
    "seconds_per_step_unguided",
    "tokens_per_second_guided",
    "guidance_weight_initial",
    "plateau",
    "seed",
    "device",
    "command",
    "torch_version",
    "transformers_version",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two files of simple sentences, enough for some dozens of blocks."""
    folder = tmp_path_factory.mktemp("text")
    nouns, verbs = ["cat", "dog", "bird", "fox", "cow"], ["sees", "likes", "hears", "follows"]
    lines = [f"The {a} {v} the {b} ." for a in nouns for v in verbs for b in nouns]
    (folder / "train.txt").write_text("\n".join(lines * 3))
    (folder / "valid.txt").write_text("\n".join(reversed(lines)))
    return folder


def flags(folder, text=None, **changes):
    values = {"output_dir": folder, **SMALL, **changes}
    if text is not None:
        values = {"train_file": text / "train.txt", "validation_file": text / "valid.txt", **values}
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]


def run(argv):
    arguments = parse_yaml_or_flags(
        pretrain_ag.PretrainArguments,
        pretrain_ag.PretrainTrainingArguments,
        presets=pretrain_ag.PRESETS,
        argv=argv,
    )
    return pretrain_ag.main(*arguments)


def test_a_comparison_leaves_summary_pictures_models_and_cards(tmp_path, text):
    folder = tmp_path / "run"
    summary = run(flags(folder, text))
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [key for key in KEYS if key not in summary] == []
    assert undocumented(pretrain_ag, summary, LOSS=["mlm"]) == set()
    assert summary["steps"] == 6
    assert summary["mlm_loss_eval_guided"] != summary["mlm_loss_eval_unguided"]
    for name in ("curves.png", "curves.svg", "config.yaml"):
        assert (folder / name).stat().st_size > 0, name
    values = yaml.safe_load((folder / "config.yaml").read_text())
    assert values["max_length"] == 16
    for name in ("model", "model_unguided"):
        model = AutoModelForMaskedLM.from_pretrained(folder / name)
        assert len(AutoTokenizer.from_pretrained(folder / name)) == model.config.vocab_size
        assert (folder / name / "README.md").read_text().startswith("---\n")
    assert model.config.guidance is None


OBJECTIVES = [
    ({"objective": "rtd"}, "rtd", "HeadwiseElectraForPreTraining"),
    ({"objective": "rtd", "generator": "trained"}, "rtd", "HeadwiseElectraForPreTraining"),
    ({"objective": "mlm+nsp"}, "mlm", "HeadwiseBertForPreTraining"),
]


@pytest.fixture(scope="module")
def documents(text):
    """The same sentences, as documents of six."""
    for name in ("train", "valid"):
        lines = (text / f"{name}.txt").read_text().split("\n")
        documents = ["\n".join(lines[i : i + 6]) for i in range(0, len(lines), 6)]
        (text / f"{name}_documents.txt").write_text("\n\n".join(documents))
    return {"train_file": text / "train_documents.txt", "validation_file": text / "valid_documents.txt"}


@pytest.mark.parametrize(("changes", "loss", "architecture"), OBJECTIVES)
def test_every_objective_compares_its_own_loss_and_leaves_a_model(tmp_path, documents, changes, loss, architecture):
    summary = run(flags(tmp_path / "run", **documents, **changes))
    assert undocumented(pretrain_ag, summary, LOSS=[loss]) == set()
    for key in ("eval", "train", "train_mean"):
        guided, unguided = (summary[f"{loss}_loss_{key}_{name}"] for name in ("guided", "unguided"))
        assert 0 < guided != unguided > 0
    assert [step for step, _ in summary["eval_curve_guided"]] == [2, 4, 6]
    assert summary["eval_curve_guided"][-1][1] == summary[f"{loss}_loss_eval_guided"]
    for name in ("model", "model_unguided"):
        model, info = AutoModelForPreTraining.from_pretrained(tmp_path / "run" / name, output_loading_info=True)
        assert type(model).__name__ == architecture
        assert not any(info.values()), info
    assert (tmp_path / "run/curves.png").stat().st_size > 0
    if loss == "rtd":
        assert 0 <= summary["replaced_precision_guided"] <= 1
        assert 0 < summary["replaced_share_guided"] < 0.5
        assert ("generator_loss_eval_guided" in summary) == ("generator" in changes)
    else:
        assert summary["nsp_loss_eval_guided"] == pytest.approx(0.7, abs=0.3)
        assert summary["nsp_loss_train_mean_guided"] == pytest.approx(0.7, abs=0.3)


@pytest.mark.parametrize(("changes", "loss", "architecture"), OBJECTIVES)
def test_every_objective_goes_on_as_if_it_had_not_been_stopped(tmp_path, documents, changes, loss, architecture):
    settings = {**documents, **changes, "logging_steps": 1, "save_total_limit": 2, "compare": "false"}
    whole = run(flags(tmp_path / "whole", **settings))
    run(flags(tmp_path / "stopped", **settings))
    # As if it had died after its first checkpoint, which is at step 3.
    (tmp_path / "stopped/checkpoints/guided/run.json").unlink()
    (tmp_path / "stopped/summary.json").unlink()
    shutil.rmtree(tmp_path / "stopped/checkpoints/guided/checkpoint-6")
    resumed = run([*flags(tmp_path / "stopped", **settings), "--resume", "true"])
    for key in ("eval", "train_mean"):
        assert resumed[f"{loss}_loss_{key}_guided"] == whole[f"{loss}_loss_{key}_guided"]


@pytest.mark.parametrize(
    ("changes", "stock_class", "name"),
    [
        ({"num_key_value_heads": 2}, LlamaForCausalLM, "Llama"),
        ({"architecture": "gpt2", "packing": "false"}, GPT2LMHeadModel, "GPT-2"),
    ],
)
def test_a_decoder_learns_the_next_token(tmp_path, text, changes, stock_class, name):
    summary = run(flags(tmp_path / "run", text, objective="clm", **changes))
    assert undocumented(pretrain_ag, summary, LOSS=["clm"]) == set()
    assert (summary["objective"], summary["architecture"]) == ("clm", stock_class.config_class.model_type)
    assert 0 < summary["clm_loss_eval_guided"] != summary["clm_loss_eval_unguided"] > 0
    folder = tmp_path / "run" / "model"
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == f"Headwise{stock_class.__name__}"
    assert AutoModelForCausalLM.from_pretrained(folder).config.guided_heads() == {0: {"prev": [0], "first": [1]}}
    card = (folder / "README.md").read_text()
    assert f"guided {name}, 1 layers" in card
    assert "pipeline_tag: text-generation" in card
    # The loss is that of the stock class on the blocks, or sentences, of the validation text.
    model, tokenizer = stock_class.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = (text / "valid.txt").read_text().split("\n")
    if "packing" in changes:
        blocks = tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    else:
        tokens = [token for line in texts for token in [*tokenizer(line, add_special_tokens=False)["input_ids"], 2]]
        blocks = [[0, *tokens[at : at + 14], 2] for at in range(0, len(tokens), 14)]
    blocks = [torch.tensor(block) for block in blocks[:6]]
    with torch.no_grad():
        losses = [cross_entropy(model(b[None]).logits[0, :-1], b[1:], reduction="sum") for b in blocks]
    expected = sum(losses) / sum(len(block) - 1 for block in blocks)
    assert summary["clm_loss_eval_guided"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_decoder_goes_on_as_if_it_had_not_been_stopped(tmp_path, text):
    settings = {"objective": "clm", "logging_steps": 1, "save_total_limit": 2, "compare": "false"}
    whole = run(flags(tmp_path / "whole", text, **settings))
    run(flags(tmp_path / "stopped", text, **settings))
    (tmp_path / "stopped/checkpoints/guided/run.json").unlink()
    (tmp_path / "stopped/summary.json").unlink()
    shutil.rmtree(tmp_path / "stopped/checkpoints/guided/checkpoint-6")
    resumed = run([*flags(tmp_path / "stopped", text, **settings), "--resume", "true"])
    for key in ("clm_loss_eval_guided", "clm_loss_train_mean_guided"):
        assert resumed[key] == whole[key]


def test_the_plateau_of_a_decoder_counts_all_tokens_but_the_first(tmp_path, text):
    few = {"max_steps": 2, "compare": "false", "save_strategy": "no"}
    summary = run(flags(tmp_path, text, objective="clm", **few))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    lines = (text / "train.txt").read_text().split("\n")
    tokens = [token for line in lines for token in [2, *tokenizer(line, add_special_tokens=False)["input_ids"]]][1:]
    seen = Counter(t for at in range(0, len(tokens) - 13, 14) for t in [*tokens[at : at + 14], 2])
    shares = np.array(list(seen.values())) / seen.total()
    assert summary["plateau"] == pytest.approx(-(shares * np.log(shares)).sum())


def test_a_tokenizer_without_padding_is_padded_by_its_end(tmp_path, text):
    few = {"max_steps": 2, "compare": "false", "save_strategy": "no", "objective": "clm", "packing": "false"}
    first = run(flags(tmp_path / "first", text, **few))
    settings = json.loads((tmp_path / "first/model/tokenizer_config.json").read_text())
    bare = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "first/model/tokenizer.json"),
        **{key: settings[key] for key in ("bos_token", "eos_token", "cls_token", "sep_token", "unk_token")},
    )
    bare.save_pretrained(tmp_path / "bare")
    second = run(flags(tmp_path / "second", text, **few, tokenizer_name=tmp_path / "bare"))
    assert second["clm_loss_eval_guided"] == pytest.approx(first["clm_loss_eval_guided"], rel=1e-2)
    assert second["plateau"] == pytest.approx(first["plateau"])


def test_another_encoder_fills_in_masks(tmp_path, text):
    summary = run(flags(tmp_path / "run", text, architecture="modernbert"))
    assert summary["architecture"] == "modernbert"
    assert summary["mlm_loss_eval_guided"] != summary["mlm_loss_eval_unguided"]
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert type(model).__name__ == "HeadwiseModernBertForMaskedLM"
    assert not any(info.values()), info
    assert model.config.guided_heads() == {0: {"next": [0], "prev": [1]}}


def test_the_embedded_text_has_documents_too(tmp_path, monkeypatch):
    monkeypatch.setattr(objectives, "embedded_splits", partial(objectives.embedded_splits, max_characters=200_000))
    few = {"max_steps": 2, "save_strategy": "no", "compare": "false", "block_size": 128}
    assert run(flags(tmp_path, objective="mlm+nsp", **few))["mlm_loss_eval_guided"] > 0


def test_heads_are_measured_in_both_runs_and_drawn_side_by_side(tmp_path, documents):
    summary = run(flags(tmp_path, **documents, objective="rtd", generator="trained", head_dynamics=4))
    files = [tmp_path / "checkpoints" / name / "head_dynamics.csv" for name in ("guided", "unguided")]
    guided, unguided = map(HeadTimeline.load, files)
    for timeline in (guided, unguided):
        assert list(timeline.of("relative_positions/best_offset_share")) == [0, 4, 6]
        assert timeline.of("entropy")[0]["encoder"].shape == (1, 4)
    # Both begin with the same weights.
    assert guided.of("confidence")[0] == unguided.of("confidence")[0]
    assert guided.of("confidence")[6] != unguided.of("confidence")[6]
    for name, timeline in (("guided", guided), ("unguided", unguided)):
        shares = timeline.of("relative_positions/best_offset_share")[6]["encoder"]
        assert summary[f"positional_heads_{name}"] == (shares >= 0.9).sum()
    assert (tmp_path / "head_dynamics.png").stat().st_size > 0
    assert "unguided" in (tmp_path / "head_dynamics.svg").read_text()
    for name in ("guided", "unguided"):
        page = (tmp_path / f"checkpoints/{name}/head_dynamics.html").read_text(encoding="utf-8")
        assert f"<h1>Attention heads over training: {name} ELECTRA" in page


def test_heads_become_positional_at_the_median_of_their_first_steps():
    timeline = HeadTimeline()
    shares = {0: [0.1, 0.2, 0.3, 0.95], 10: [0.1, 0.9, 0.3, 0.2], 20: [0.8, 0.95, 0.91, 0.3]}
    for step, values in shares.items():
        timeline.record(step, pretrain_ag.OFFSET_SHARE, HeadScores({"encoder": [values[:2], values[2:]]}))
    assert pretrain_ag.positional_heads(timeline) == {"positional_heads": 2, "positional_step": 10}
    never = HeadTimeline()
    never.record(0, pretrain_ag.OFFSET_SHARE, HeadScores({"encoder": [[0.5]]}))
    assert pretrain_ag.positional_heads(never) == {"positional_heads": 0, "positional_step": None}


def test_the_unguided_twin_starts_from_the_same_weights_and_sees_the_same_batches(tmp_path, text):
    summary = run(flags(tmp_path / "twin", text, guidance_weight=0))
    assert summary["mlm_loss_eval_guided"] == summary["mlm_loss_eval_unguided"]
    assert summary["mlm_loss_train_mean_guided"] == summary["mlm_loss_train_mean_unguided"]


@pytest.fixture(scope="module")
def suppressed(tmp_path_factory, text):
    """Runs with and without a suppressed model, and the folder of the first."""
    folder = tmp_path_factory.mktemp("suppressed")
    settings = {"max_steps": 40, "eval_steps": 10, "logging_steps": 1, "learning_rate": 0.02, "save_strategy": "no"}
    suppressing = {"suppress_steps": 20, "suppress_weight": 50}
    return folder / "with", *(
        run(flags(folder / name, text, **settings, **own)) for name, own in (("with", suppressing), ("without", {}))
    )


def test_suppression_adds_a_third_model_and_changes_nothing_else(suppressed):
    folder, summary, without = suppressed
    assert undocumented(pretrain_ag, summary, LOSS=["mlm"]) == set()
    added = {key for key in summary if key not in without}
    assert added
    assert all("suppress" in key for key in added)
    changing = ("second", "command")
    assert all(summary[key] == value for key, value in without.items() if not any(word in key for word in changing))
    assert summary["mlm_loss_eval_suppressed"] not in (summary["mlm_loss_eval_guided"], None)
    config = AutoModelForMaskedLM.from_pretrained(folder / "model_suppressed").config
    assert config.guidance["loss"] == "avoid"
    assert config.guided_heads() == AutoModelForMaskedLM.from_pretrained(folder / "model").config.guided_heads()
    assert "suppressed" in (folder / "curves.svg").read_text()


def test_heads_are_kept_from_their_patterns_and_then_released(suppressed):
    folder, summary, _ = suppressed
    history = json.loads((folder / "checkpoints/suppressed/run.json").read_text())["history"]
    weights = {entry["step"]: entry["guidance_weight"] for entry in history if "guidance_weight" in entry}
    assert all(weight == (50 if step <= 20 else 0) for step, weight in weights.items())
    assert summary["suppress_weight"] == 50
    attention = dict(summary["suppressed_attention"])
    assert attention[20] < 0.7 * attention[1]


def test_without_a_weight_of_its_own_suppression_has_that_of_guidance(tmp_path, text):
    summary = run(flags(tmp_path / "run", text, compare="false", guidance_weight=0.3, suppress_steps=2))
    assert summary["suppress_weight"] == summary["guidance_weight_initial"] == 0.3
    assert summary["mlm_loss_eval_unguided"] is None
    assert "suppressed_steps_to_unguided_final" not in summary


def test_the_same_seed_gives_the_same_figures_and_another_one_others(tmp_path, text):
    first, second, other = (
        run(flags(tmp_path / name, text, compare="false", seed=seed)) for name, seed in (("1", 7), ("2", 7), ("3", 8))
    )
    assert first["mlm_loss_eval_guided"] == second["mlm_loss_eval_guided"]
    assert first["mlm_loss_eval_guided"] != other["mlm_loss_eval_guided"]
    assert first["mlm_loss_eval_unguided"] is None


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path, text):
    path = tmp_path / "config.yaml"
    lines = ["preset: roberta-16", "hidden_size: 24", "guidance_patterns: [first, self]", "learning_rate: 1.0e-2"]
    path.write_text("\n".join([*lines, "eval_steps: null"]))
    args, training_args = parse_yaml_or_flags(
        pretrain_ag.PretrainArguments,
        pretrain_ag.PretrainTrainingArguments,
        presets=pretrain_ag.PRESETS,
        argv=[str(path), "--learning_rate", "5e-3", "--output_dir", str(tmp_path)],
    )
    assert (args.num_hidden_layers, args.num_attention_heads, args.hidden_size) == (16, 16, 24)
    assert args.guidance_patterns == ["first", "self"]
    assert training_args.learning_rate == 5e-3
    assert training_args.eval_steps == training_args.logging_steps  # what the Trainer makes of null


@pytest.mark.parametrize("changes", [{"packing": "false"}, {"streaming": "true"}])
def test_texts_can_be_padded_or_streamed(tmp_path, text, changes):
    summary = run(flags(tmp_path / "run", text, compare="false", **changes))
    assert summary["mlm_loss_eval_guided"] > 0


@pytest.mark.parametrize("objective", ["mlm", "mlm+nsp"])
def test_files_may_be_in_another_encoding_and_columns_have_positions(tmp_path, objective):
    rows = [f"{number}\tdas Kätzchen Nummer {number} saß hier. es schläft\n" for number in range(40)]
    (tmp_path / "rows.tsv").write_bytes("".join(rows).encode("latin-1"))
    files = {"train_file": tmp_path / "rows.tsv", "validation_file": tmp_path / "rows.tsv", "text_column": 1}
    few = {"objective": objective, "compare": "false", "max_steps": 2, "save_strategy": "no"}
    run(flags(tmp_path / "run", **files, **few, encoding="latin-1"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert any("ß" in tokenizer.decode([index]) for index in range(len(tokenizer)))
    with pytest.raises(SystemExit):
        run(flags(tmp_path / "unread", **files, **few))


@pytest.mark.parametrize(
    ("objective", "without", "message"),
    [
        (
            "mlm",
            ["mask_token"],
            "has no mask_token, but objective mlm needs it; add it by",
        ),
        ("mlm", ["cls_token", "bos_token"], "has no cls_token or bos_token, but objective mlm needs it"),
        ("mlm+nsp", ["sep_token", "eos_token", "mask_token"], "has no sep_token or eos_token and no mask_token, but"),
        ("rtd", ["pad_token"], "has no pad_token, but objective rtd needs it"),
        (
            "clm",
            ["cls_token", "sep_token", "bos_token", "eos_token"],
            "has no cls_token or bos_token and no sep_token",
        ),
    ],
)
def test_a_tokenizer_without_a_special_token_is_refused(tmp_path, text, capsys, objective, without, message):
    whole = train_byte_level_bpe((text / "train.txt").read_text().split("\n"), 300)
    names = ("cls_token", "sep_token", "bos_token", "eos_token", "unk_token", "pad_token", "mask_token")
    kept = {name: str(getattr(whole, name)) for name in names if name not in without}
    PreTrainedTokenizerFast(tokenizer_object=whole.backend_tokenizer, **kept).save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit) as stop:
        run(flags(tmp_path / "run", text, objective=objective, tokenizer_name=tmp_path / "bare"))
    assert stop.value.code == 2
    (error,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert f"tokenizer_name '{tmp_path / 'bare'}' {message}" in error
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_is_not_there_is_said_not_to_be(tmp_path, text, capsys):
    with pytest.raises(SystemExit):
        run(flags(tmp_path / "run", text, tokenizer_name="nowhere/of/mine"))
    assert "tokenizer_name 'nowhere/of/mine' cannot be loaded: no such folder." in capsys.readouterr().err


def test_a_given_tokenizer_is_taken(tmp_path, text):
    run(flags(tmp_path / "first", text, compare="false", max_steps=2))
    summary = run(
        flags(tmp_path / "second", text, compare="false", max_steps=2, tokenizer_name=tmp_path / "first" / "model")
    )
    assert summary["vocab_size"] == AutoTokenizer.from_pretrained(tmp_path / "first" / "model").vocab_size


def test_a_time_limit_bounds_the_steps_and_both_runs_get_the_same(tmp_path, text, capfd):
    limit = {"preset": "tiny", "max_minutes": 0.01, "max_steps": 100_000, "disable_tqdm": "false"}
    summary = run(flags(tmp_path / "run", text, **limit, save_strategy="no"))
    assert 2 <= summary["steps"] < 100_000
    assert {curve[-1][0] for curve in (summary["eval_curve_guided"], summary["eval_curve_unguided"])} == {
        summary["steps"]
    }
    shown = capfd.readouterr()
    assert shown.out.count("Training each run for") == 1
    # The trial shows no progress bar and leaves nothing.
    assert "trial" not in shown.err
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "guided",
        "steps.json",
        "unguided",
    ]


# Four minutes for two runs: 240 / (2 · 0.2) = 600 steps.
@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 800), (0.2, 600), (1.0, 400)])
def test_the_demonstration_takes_as_many_steps_as_fit_from_400_to_800(tmp_path, monkeypatch, capsys, seconds, steps):
    args, training_args = parse_yaml_or_flags(
        pretrain_ag.PretrainArguments,
        pretrain_ag.PretrainTrainingArguments,
        presets=pretrain_ag.PRESETS,
        argv=["--output_dir", str(tmp_path), "--device", "cpu"],
    )
    assert (args.preset, args.max_minutes, args.min_steps, training_args.max_steps) == ("demo", 4, 400, 800)
    trials = []
    monkeypatch.setattr(pretrain_ag, "seconds_of_step", lambda *given, **data: trials.append(given) or seconds)
    of_runs = ["guided", "unguided"]
    assert pretrain_ag.steps_within(args, tmp_path, None, of_runs, training_args) == steps
    assert [config for _, config, _ in trials] == of_runs
    minutes = steps * 2 * seconds / 60
    assert f"Training each run for {steps} steps: all runs take about {minutes:.1f} minutes" in capsys.readouterr().out
    # The number of a run that goes on is that of its beginning.
    monkeypatch.setattr(pretrain_ag, "seconds_of_step", None)
    assert pretrain_ag.steps_within(args, tmp_path, None, of_runs, training_args) == steps


@pytest.mark.parametrize(
    ("words", "is_limited"),
    [
        ([], True),
        (["--max_steps", "1000"], False),
        (["--max_steps", "1000", "--max_minutes", "3"], True),
        (["--max_steps", "300"], False),
        (["--preset", "tiny"], False),
    ],
)
def test_max_steps_replaces_the_time_limit_of_the_demonstration(tmp_path, words, is_limited):
    args, training_args = parse_yaml_or_flags(
        pretrain_ag.PretrainArguments,
        pretrain_ag.PretrainTrainingArguments,
        presets=pretrain_ag.PRESETS,
        argv=["--output_dir", str(tmp_path), "--device", "cpu", *words],
    )
    assert pretrain_ag.is_limited(args, training_args.max_steps) == is_limited


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"eval_steps": 50}, 0.1 + 10 / 50),
        ({"eval_steps": 0.25}, 0.1 + 10 / 200),
        ({"eval_strategy": "no"}, 0.1),
    ],
)
def test_a_trial_times_steps_and_evaluations(tmp_path, monkeypatch, changes, seconds):
    class Trainer:
        def add_callback(self, timer):
            timer.seconds, timer.steps = 1.2, 12

        def train(self):
            pass

        def evaluate(self):
            clock.append(clock[-1] + 10)

    clock = [5.0]
    _, training_args = parse_yaml_or_flags(
        pretrain_ag.PretrainArguments,
        pretrain_ag.PretrainTrainingArguments,
        presets=pretrain_ag.PRESETS,
        argv=flags(tmp_path, max_steps=800, **changes),
    )
    monkeypatch.setattr(pretrain_ag, "pretraining_trainer", lambda *args, **data: Trainer())
    monkeypatch.setattr(pretrain_ag.time, "perf_counter", lambda: clock[-1])
    assert pretrain_ag.seconds_of_step(None, None, training_args) == pytest.approx(seconds)
    assert training_args.max_steps == 800


def test_a_run_that_is_shorter_than_the_least_is_not_timed(tmp_path, text, monkeypatch):
    monkeypatch.setattr(pretrain_ag, "seconds_of_step", None)
    assert run(flags(tmp_path / "run", text, compare="false", save_strategy="no"))["steps"] == 6


def test_a_resumed_run_keeps_the_steps_that_its_time_limit_gave(tmp_path, text):
    limit = {"preset": "tiny", "max_minutes": 0.01, "max_steps": 100_000, "save_strategy": "no"}
    first = run(flags(tmp_path / "run", text, **limit))
    (tmp_path / "run/checkpoints/unguided/run.json").unlink()
    second = run([*flags(tmp_path / "run", text, **limit), "--resume", "true", "--disable_tqdm", "false"])
    assert second["steps"] == first["steps"]
    assert second["mlm_loss_eval_unguided"] == first["mlm_loss_eval_unguided"]


def test_two_processes_that_are_launched_give_the_figures_of_one(tmp_path, text):
    """The other objectives are in test_several_processes.py, which starts two processes for all recipes."""
    settings = {"train_file": text / "train.txt", "validation_file": text / "valid.txt", **SMALL}
    settings |= {"compare": "false", "dropout": 0.0, "objective": "clm"}
    one = run(flags(tmp_path / "1", **settings))
    two = launch("pretrain_ag.py", tmp_path / "2", **{**settings, "per_device_train_batch_size": 2})
    assert two["num_processes"] == 2
    for name in ("clm_loss_eval_guided", "clm_loss_train_mean_guided", "guidance_weight_initial"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name


def test_too_long_a_block_for_a_small_text_is_refused(tmp_path, text, capsys):
    with pytest.raises(SystemExit) as stop:
        run(flags(tmp_path / "run", text, block_size=100_000))
    assert stop.value.code == 2
    assert "max_length=100000 needs 99998 tokens of text, but all texts have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_file": "nowhere.txt"}, "nowhere.txt"),
        ({"train_file": "EMPTY"}, "is empty"),
        ({"validation_file": None}, "there is no text to evaluate on; give --validation_file or"),
        ({"train_file": None}, "has no effect here; it needs --train_file or --dataset_name"),
        ({"train_file": None, "validation_file": None, "encoding": "latin-1"}, "no effect here; it needs files"),
        ({"train_file": None, "validation_file": None, "text_column": "q"}, "text_column=q has no effect here"),
        ({"validation_split": "dev"}, "validation_split=dev has no effect here; it needs --dataset_name"),
        ({"min_steps": 0}, "min_steps must be at least 1, got 0"),
        ({"max_eval_examples": 0}, "max_eval_examples must be at least 1, got 0"),
        ({"guidance_patterns": "nxt"}, "pattern 'nxt'"),
        ({"guidance_heads": '{"next": [4]}'}, "names head 4"),
        ({"guidance_heads": "{next"}, "not valid JSON"),
        (
            {"guidance_heads": '{"next": [0]}', "guidance_patterns": "prev"},
            "guidance_patterns=['prev'] has no effect here; guidance_heads names all guided heads",
        ),
        ({"guidance_fraction": 2}, "fraction must be greater than 0"),
        ({"guidance_weight": "heavy"}, "guidance_weight must be a number or 'auto'"),
        ({"preset": "huge"}, "preset 'huge' is not one of demo, tiny, roberta-8"),
        ({"device": "cuda"}, "device is cuda, but"),
        ({"device": "abacus"}, "device must be auto, cpu or cuda"),
        ({"cpu_threads": 0}, "cpu_threads must be at least 1, got 0"),
        ({"hidden_size": 18}, "not a multiple of 4 heads"),
        ({"vocab_size": 10}, "vocab_size must be at least 261"),
        ({"per_device_train_batch_size": 100_000}, "fewer than one batch of 100000"),
        ({"learning_rat": 1}, "learning_rat"),
        ({"max_steps": "many"}, "invalid int value: 'many'"),
        ({"dataloader_persistent_workers": "true", "dataloader_num_workers": 1}, "dataloader_persistent_workers=True"),
        ({"mlm_probability": 3}, "mlm_probability must be between 0 and 1"),
        ({"head_dynamics": -1}, "head_dynamics must be a number of steps, or 0 for no measurements, got -1"),
        ({"objective": "nsp"}, "objective must be mlm, clm, rtd, mlm+nsp, got 'nsp'"),
        ({"objective": "clm", "architecture": "lama"}, "'lama' has no row in the catalogue; the nearest is 'llama'"),
        ({"objective": "clm", "architecture": "falcon"}, "register_attention() adds others"),
        ({"architecture": "llama"}, "architecture llama has no head for objective mlm; these have: albert, bert"),
        ({"objective": "clm", "architecture": "whisper"}, "architecture whisper has no head for objective clm"),
        ({"objective": "rtd", "architecture": "bert"}, "no head for objective rtd; these have: electra"),
        ({"objective": "mlm+nsp", "architecture": "albert"}, "no head for objective mlm+nsp; these have: bert"),
        ({"objective": "clm", "guidance_patterns": "next"}, "pattern 'next'"),
        (
            {"objective": "clm", "mlm_probability": 0.3},
            "mlm_probability=0.3 has no effect here; objective clm masks no tokens",
        ),
        ({"objective": "clm", "num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": 2}, "needs grouped attention, which roberta does not have"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        ({"generator": "unigram"}, "generator='unigram' needs objective rtd, got objective mlm"),
        ({"objective": "rtd", "generator": "big"}, "generator must be unigram or trained, got 'big'"),
        ({"objective": "mlm+nsp", "streaming": "true"}, "cannot use streaming=True"),
        ({"objective": "mlm+nsp", "packing": "false"}, "cannot use packing=False"),
        ({"suppress_steps": 6}, "suppress_steps=6 must be below max_steps=6"),
        ({"suppress_steps": 0}, "suppress_steps must be at least 1, got 0"),
        ({"suppress_steps": 2, "suppress_weight": 0}, "suppress_weight must be greater than 0, got 0.0"),
        ({"suppress_weight": 1}, "suppress_weight=1.0 needs --suppress_steps"),
        ({"OUTPUT": "other run"}, "already holds files"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, capsys, changes, message):
    if changes.get("device") == "cuda" and pretrain_ag.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    folder = tmp_path / "run"
    if changes.pop("OUTPUT", None):
        folder.mkdir()
        (folder / "summary.json").write_text("{}")
    if changes.get("train_file") == "EMPTY":
        (tmp_path / "empty.txt").write_text("")
        changes = {"train_file": tmp_path / "empty.txt"}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        run(flags(folder, text, **changes))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in error
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before
