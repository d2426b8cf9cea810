import csv
import json
from functools import partial

import pytest
import torch
import translating
import yaml
from documented import listed_keys, undocumented
from recipe_runs import Recipe
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM
from translating import PAIRS, files, likelihood, lines, translations, write_pairs

from hf_attn_dynamics import HeadwiseMarianMTModel
from hf_attn_dynamics.recipes import train_translation, translation


SMALL = {**translating.SMALL, "gate_steps": 4, "finetune_steps": 2}
RECIPE = Recipe("train_translation", **SMALL)


def run(folder, text=None, **changes):
    return RECIPE.run(folder, **{**(files(text) if text else {}), **changes})


def weights(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """A run with two numbers of heads, each also from scratch, and a test text."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    test = {"test_source_file": text / "test.de", "test_target_file": text / "test.en"}
    summary = run(folder, text, keep=[6, 3], from_scratch="true", num_beams=2, languages=["de", "en"], **test)
    return folder, summary


@pytest.fixture(scope="module")
def plain(tmp_path_factory, text):
    """A run with nothing special."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, run(folder, text, keep=6, seed=7)


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves
# ---------------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_summary_table_pictures_models_and_cards(finished):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == summary
    for name in ("curve", "heads", "gates", "gate_history"):
        for suffix in ("png", "svg"):
            assert (folder / f"{name}.{suffix}").stat().st_size > 0, name
    for name in ("dense", "model-6", "model-3"):
        card = yaml.safe_load((folder / name / "README.md").read_text().split("---")[1])
        assert card["pipeline_tag"] == "translation"
        assert card["language"] == ["de", "en"]


def test_every_documented_key_is_in_the_summary(finished):
    summary = finished[1]
    documented = train_translation.__doc__.split("say otherwise:\n")[1].split("Keys of models")[0]
    keys = listed_keys(documented)
    assert len(keys) == 31
    assert keys - set(summary) == set()
    assert undocumented(train_translation, summary) == set()
    assert {"seed", "device", "command", "torch_version", "sacrebleu_version"} <= set(summary)


def test_exactly_so_many_heads_are_left_and_the_summary_says_where(finished):
    folder, summary = finished
    assert (summary["heads_total"], summary["heads_kept"]) == (12, 6)
    assert [row["heads"] for row in summary["rows"]] == [12, 6, 3, 6, 3]
    for row in summary["rows"]:
        assert row["heads"] == row["heads_encoder"] + row["heads_decoder"] + row["heads_cross"]
    for keep in (6, 3):
        kept = AutoModelForSeq2SeqLM.from_pretrained(folder / f"model-{keep}").config.kept_heads()
        row = next(row for row in summary["rows"] if row["heads"] == keep)
        assert {site.kind: len(heads) for site, heads in kept.items()} == {
            kind: row[f"heads_{kind}"] for kind in ("encoder", "decoder", "cross")
        }


def test_models_load_by_their_names_and_translate_as_the_summary_says(finished, text):
    folder, summary = finished
    sources, references = lines(text, "test")
    for name, row in (("dense", summary["rows"][0]), ("model-6", summary["rows"][1])):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / name)
        assert isinstance(model, HeadwiseMarianMTModel)
        assert model.generation_config.use_cache
        assert model.config.use_cache
        assert model.config.gates is None
        longest = model.config.max_position_embeddings
        hypotheses = translations(folder / name, sources, num_beams=2, max_length=longest)
        assert BLEU().corpus_score(hypotheses, [references]).score == pytest.approx(row["bleu"])
        for example in summary["examples"]:
            key = "dense" if name == "dense" else "pruned"
            assert hypotheses[sources.index(example["source"])] == example[key]
        assert row["parameters"] == sum(p.numel() for p in model.parameters())


def test_the_likelihood_is_that_of_the_model_without_smoothing(finished, text):
    folder, summary = finished
    nll, _ = likelihood(folder / "model-6", zip(*lines(text, "valid")))
    assert summary["nll_pruned"] == pytest.approx(nll, rel=1e-5)
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


# ---------------------------------------------------------------------------------------------------------------------
# How it is trained
# ---------------------------------------------------------------------------------------------------------------------


def test_learning_is_seen_in_bleu_and_likelihood(tmp_path, text):
    longer = {"max_steps": 250, "hidden_size": 32, "save_strategy": "no", "finetune_steps": 20, "gate_steps": 20}
    summary = run(tmp_path / "run", text, keep=10, per_device_train_batch_size=16, **longer)
    assert summary["exact_match_dense"] > 0.9
    assert summary["bleu_dense"] > 90
    assert summary["nll_dense"] < 0.3


def test_the_rate_goes_on_falling_where_it_was():
    _, training_args = RECIPE.parse("--max_steps", "100", "--warmup_steps", "20", "--learning_rate", "1e-2")
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
    summary = run(tmp_path / "run", text, gate_sites="encoder", keep=2)
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


def test_prices_of_a_head_each_give_a_model(tmp_path, text):
    # The price is high enough to close gates within a few steps, since these move by the gate learning rate.
    prices = {"gate_penalty": [1e-6, 100], "gate_learning_rate": 2, "gate_steps": 6}
    summary = run(tmp_path / "run", text, gate_sites="encoder", from_scratch="true", **prices)
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
    summary = run(tmp_path / "guided", text, keep=6, seed=7, finetune_steps=1, **guided)
    assert summary["nll_dense"] != plain[1]["nll_dense"]
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "guided/dense").config
    assert config.guided_heads() == {0: {"first": [0, 1]}}
    state = json.loads((tmp_path / "guided/checkpoints/dense/checkpoint-4/trainer_state.json").read_text())
    weights = [entry["guidance_weight"] for entry in state["log_history"] if entry.get("guidance_loss", 0) > 0]
    assert weights == pytest.approx([1, 2 / 3, 1 / 3, 0])
    state = json.loads((tmp_path / "guided/checkpoints/model-6/checkpoint-1/trainer_state.json").read_text())
    assert not any("guidance_loss" in entry for entry in state["log_history"])


def test_the_same_seed_gives_the_same_figures_also_with_a_guidance_weight_of_zero(plain, tmp_path, text):
    guided = {"guidance": '{"fraction": 0.5}', "guidance_weight": 0}
    second, other = (
        run(tmp_path / "2", text, keep=6, seed=7, **guided),
        run(tmp_path / "3", text, keep=6),
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
    summary = run(tmp_path / "run", **few)
    assert summary["text"] == "German number words to English"
    assert [row["heads"] for row in summary["rows"]] == [12, 6, 3]
    assert summary["eval_examples"] == summary["bleu_examples"] == 10
    assert len(summary["examples"]) == 5


def test_longer_pairs_are_not_trained_on(tmp_path, text):
    pairs = [*PAIRS, ("die " * 40 + "Kuh", "the cow")]
    write_pairs(tmp_path, "train", pairs)
    longer = {"source_file": tmp_path / "train.de", "target_file": tmp_path / "train.en"}
    summary = run(tmp_path / "run", text, keep=6, **longer)
    assert summary["train_examples"] == len(PAIRS)


# ---------------------------------------------------------------------------------------------------------------------
# Runs that were stopped
# ---------------------------------------------------------------------------------------------------------------------


def test_translations_that_repeat_themselves_are_cut_short(capsys):
    translation.print_examples([{"source": "eins", "target": "one", "dense": "one " * 100, "pruned": "one"}])
    *_, dense, pruned = capsys.readouterr().out.splitlines()
    assert dense == f"dense      ✗ {'one ' * 75}…"
    assert pruned == "pruned     ✓ one"


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_file": None}, "target_file"),
        ({"validation_source_file": None, "validation_target_file": None}, "no text to evaluate on"),
        ({"validation_source_file": None}, "needs a validation_source_file"),
        ({"source_file": None, "target_file": None}, "needs a source_file or dataset_name"),
        ({"dataset_name": "some/data"}, "give one of them"),
        ({"source_column": "de"}, "source_column"),
        ({"keep": 12}, "keep=12, but the heads at encoder, decoder, cross are 12"),
        ({"keep": 4, "gate_sites": ["decoder"]}, "keep=4, but the heads at decoder are 4"),
        ({"num_attention_heads": 1, "gate_sites": ["decoder"]}, "keep=1, but the heads at decoder are 1"),
        ({"keep": [3, 3]}, "keep must name something, and nothing twice"),
        ({"keep": 3, "gate_penalty": 0.1}, "give one of them"),
        ({"gate_penalty": -1}, "gate_penalty must be above 0"),
        ({"gate_penalty": [0.1, 0.1]}, "gate_penalty must name something, and nothing twice"),
        ({"gate_sites": []}, "gate_sites"),
        ({"gate_variant": "papre"}, "gate_variant must be paper or paper_code"),
        ({"vocab_size": 5}, "vocab_size is 5"),
        ({"max_length": 2}, "max_length=2, but every pair"),
        ({"hidden_size": 18}, "no multiple of 4 heads"),
        ({"gate_steps": 0}, "gate_steps must be at least 1, got 0"),
        ({"generation_num_beams": 4}, "generation_num_beams=4 has no effect here; set num_beams"),
        ({"target_heads": 4}, "target_heads=4 has no effect here; set keep"),
        ({"layer_rate_decay": 0.9}, "layer_rate_decay=0.9 has no effect here; rates fall through one stack of layers"),
        ({"guidance": "{"}, "not valid JSON"),
        ({"guidance": '{"patterns": ["nxt"]}'}, "pattern 'nxt'"),
        ({"guidance_weight": 1}, "guidance_weight=1.0 weighs no guidance"),
        ({"languages": "de"}, "languages"),
        ({"preset": "huge"}, "preset 'huge' is not one of numerals, small, base"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, refused, changes, message):
    with refused(message):
        run(tmp_path / "run", text, **changes)
