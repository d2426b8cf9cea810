import csv
import json
from types import SimpleNamespace

import pytest
import torch
import translating
from documented import undocumented
from launching import words
from transformers import AutoModelForSeq2SeqLM
from translating import files, loaded

from hf_attn_dynamics import attention_maps
from hf_attn_dynamics.analysis import alignment_error_rate, read_pharaoh
from hf_attn_dynamics.data import load_parallel, train_marian_tokenizer
from hf_attn_dynamics.recipes import align_translation, aligned_corpus, compare_translation
from hf_attn_dynamics.recipes.arguments.align_translation import UNITS
from hf_attn_dynamics.recipes.run import parse_yaml_or_flags
from hf_attn_dynamics.recipes.summaries.align_translation import ALIGNERS, IBM


SMALL = {**translating.SMALL, "eval_steps": 2, "logging_steps": 4, "cpu_threads": 1}
# Words of the text of these tests, and those of their translations, are in the same order.
GOLD = "0-0 1-1 2-2 3-3 4-4\n"


def flags(folder, text, **changes):
    return words(**{"output_dir": folder, **SMALL, **files(text), **changes})


def run(argv, recipe=align_translation):
    names = {align_translation: "Alignment", compare_translation: "Comparison"}
    types = (getattr(recipe, names[recipe] + kind) for kind in ("Arguments", "TrainingArguments"))
    return recipe.main(*parse_yaml_or_flags(*types, presets=recipe.PRESETS, argv=list(argv)))


@pytest.fixture(scope="module")
def references(text, tmp_path_factory):
    """Alignments of the validation text in both directions: the backward ones lack a link."""
    folder = tmp_path_factory.mktemp("references")
    count = len((text / "valid.de").read_text().splitlines())
    (folder / "forward").write_text(GOLD * count)
    (folder / "backward").write_text("0-0 1-1 2-2 3-3\n" * count)
    return [folder / "forward", folder / "backward"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text, references):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, run(flags(folder, text, reference_alignments=references))


def test_a_run_leaves_documented_keys_tables_pictures_and_alignments(finished, text):
    folder, summary = finished
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert undocumented(align_translation, summary) == set()
    for name in ("curves.svg", "alignment.svg"):
        assert (folder / name).stat().st_size > 0
    with (folder / "table.csv").open() as file:
        table = {row["aligner"]: row for row in csv.DictReader(file)}
    assert list(table) == list(ALIGNERS)
    assert float(table["guided"]["aer"]) == summary["aer_guided"]
    assert table["ibm_union"]["bleu"] == ""
    assert summary["reference"] == "forward, backward"


def test_error_rates_are_those_of_the_written_alignments_on_the_second_half(finished):
    folder, summary = finished
    half = summary["chosen_on_pairs"]
    assert (half, summary["measured_pairs"]) == (6, 6)
    sure, possible = ([[(word, word) for word in range(count)]] * half for count in (4, 5))
    for name in ALIGNERS:
        links = read_pharaoh(folder / "alignments" / f"{name}.txt")[half:]
        assert summary[f"aer_{name}"] == pytest.approx(alignment_error_rate(links, sure, possible)), name


def test_the_unguided_head_is_the_best_one_on_the_first_half(finished):
    summary = finished[1]
    heads = summary["heads"]["unguided"]
    assert len(heads) == 2 * 4  # rows and heads of one layer
    best = min(heads, key=lambda one: one["aer_chosen_on"])
    assert summary["chosen_head_unguided"] == {key: best[key] for key in ("layer", "head", "rows")}
    assert summary["aer_unguided"] == best["aer"]
    assert summary["chosen_head_guided"] == {"layer": 0, "head": 0, "rows": "input"}


def test_the_unguided_model_is_that_of_a_comparison_of_translations(tmp_path, text, finished):
    compared = run(flags(tmp_path / "run", text, systems="base"), compare_translation)
    assert finished[1]["validation_nll_unguided"] == compared["validation_nll_base"]
    assert finished[1]["bleu_unguided"] == compared["bleu_base"]
    assert finished[1]["validation_nll_guided"] != compared["validation_nll_base"]


def test_only_the_named_head_is_guided(tmp_path, text):
    run(flags(tmp_path / "run", text, decoder_layers=2, guided_layer=1, guided_head=2, guided_rows="output"))
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/guided").config
    assert config.guided_heads("cross") == {1: {"aligned": [2]}}
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/unguided").config.guidance is None


def test_without_references_ibm_model_1_is_the_reference_and_has_no_results(tmp_path, text):
    summary = run(flags(tmp_path / "run", text, max_steps=2))
    assert summary["reference"] == "IBM Model 1"
    assert {summary[f"aer_{name}"] for name in IBM} == {None}
    assert 0 <= summary["aer_guided"] <= 1


@pytest.mark.parametrize("rows", ["output", "input"])
def test_the_guided_head_learns_its_targets(tmp_path, text, references, rows):
    longer = {"max_steps": 150, "hidden_size": 32, "save_strategy": "no", "eval_steps": 50, "logging_steps": 50}
    summary = run(
        flags(tmp_path / "run", text, **longer, guided_rows=rows, guidance_weight=1, guidance_schedule="constant")
    )
    assert summary["guided_accuracy"] > 0.9
    assert summary["aer_guided"] < 0.2
    assert summary["aer_guided"] < summary["aer_unguided"]


# ---------------------------------------------------------------------------------------------------------------------
# Words, targets and references
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenized(text, tmp_path_factory):
    pairs = load_parallel([text / "train.de"], [text / "train.en"])
    tokenizer = train_marian_tokenizer(pairs["source"], pairs["target"], 36, tmp_path_factory.mktemp("tokenizer"))
    return pairs, tokenizer, {units: aligned_corpus.word_tokenizer(units)(pairs, tokenizer) for units in UNITS}


def test_words_and_texts_have_the_same_tokens(tokenized):
    pairs, tokenizer, found = tokenized
    whole = tokenizer(pairs["source"][:], text_target=pairs["target"][:])
    for units in UNITS:
        for name in ("input_ids", "labels", "attention_mask"):
            assert list(found[units][name]) == whole[name]


def test_each_token_has_the_index_of_its_word(tokenized):
    pairs, tokenizer, found = tokenized
    row = found["words"][0]
    assert row["source_words"] == pairs[0]["source"].lower().split()
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    for number, word in enumerate(pairs[0]["source"].split()):
        of_word = [token for token, index in zip(tokens, row["source_indices"]) if index == number]
        assert "".join(of_word) == f"▁{word}"
    assert row["source_indices"][-1] is None
    row = found["tokens"][0]
    assert row["target_words"] == tokenizer.convert_ids_to_tokens(row["labels"][:-1])
    assert row["target_indices"] == [*range(len(row["labels"]) - 1), None]


def test_the_row_that_reads_a_token_is_the_next_one():
    assert aligned_corpus.of_rows([3, -100, 4, -100], "output") == [3, -100, 4, -100]
    assert aligned_corpus.of_rows([3, -100, 4, -100], "input") == [-100, 3, -100, 4]


def test_attention_of_words_is_the_sum_over_source_tokens_and_the_mean_over_target_tokens(finished, text):
    model, tokenizer = loaded(finished[0] / "guided")
    pairs = load_parallel([text / "valid.de"], [text / "valid.en"])
    found = aligned_corpus.word_tokenizer("words")(pairs, tokenizer)
    corpus = SimpleNamespace(tokenizer=tokenizer, validation=found)
    maps = aligned_corpus.head_word_maps(model, corpus, batch_size=5)
    for row, of_words in zip(found, maps):
        batch = {key: torch.tensor([row[key]]) for key in ("input_ids", "labels")}
        alone = attention_maps(model, batch)["cross"][:, 0]
        for rows, shift in (("output", 0), ("input", 1)):
            for target in range(len(row["target_words"])):
                at = [token + shift for token, word in enumerate(row["target_indices"]) if word == target]
                for source in range(len(row["source_words"])):
                    keys = [token for token, word in enumerate(row["source_indices"]) if word == source]
                    expected = alone[:, :, at][..., keys].sum(-1).mean(-1)
                    torch.testing.assert_close(of_words[rows][:, :, target, source], expected)


def test_a_file_may_mark_possible_links_and_two_files_are_intersected_and_united(tmp_path):
    (tmp_path / "a").write_text("0-0 1?1\n\n")
    (tmp_path / "b").write_text("0-0 2-1\n1-0\n")

    def read(*names):
        args = SimpleNamespace(reference_alignments=[tmp_path / name for name in names], max_eval_examples=None)
        return aligned_corpus.read_references(args, 2)

    assert read("a") == ([[(0, 0)], []], [[(0, 0), (1, 1)], []])
    assert read("a", "b") == ([[(0, 0)], []], [[(0, 0), (2, 1)], [(1, 0)]])


def test_precision_counts_possible_links_and_recall_sure_ones():
    sure, possible = [[(0, 0), (1, 1)]], [[(0, 0), (1, 1), (2, 1)]]
    found = aligned_corpus.quality([[(0, 0), (2, 1), (3, 1)]], sure, possible)
    assert found == {"precision": pytest.approx(2 / 3), "recall": 0.5, "aer": pytest.approx(1 - (1 + 2) / (3 + 2))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alignment_method": "best"}, "method must be one of intersection, union"),
        ({"guided_head": 4}, "guided_head must be below 4, got 4"),
        ({"guided_layer": -1}, "guided_layer must be at least 0, got -1"),
        ({"guided_rows": "both"}, "guided_rows must be output or input, got 'both'"),
        ({"guidance_weight": 0}, "guidance_weight=0 guides no head"),
        ({"max_eval_examples": 1}, "needs two pairs at least"),
        ({"gate_penalty": 0.1}, "gate_penalty=0.1 has no effect here; this recipe prunes no heads"),
        ({"reference_alignments": ["nowhere.txt"]}, "nowhere.txt"),
        ({"reference_alignments": ["a", "b", "c"]}, "one file, or two of both directions, got a b c"),
        ({"reference_alignments": ["a"], "units": "tokens"}, "align words, but units is tokens"),
        ({"reference_alignments": ["{short}"]}, "has 1 lines, but the validation text 12 pairs"),
        ({"reference_alignments": ["{wrong}"]}, "have the link 0-5 for a pair of 5 and 5 words"),
    ],
)
def test_bad_input_is_one_message_and_status_2_before_anything_is_written(tmp_path, text, capsys, changes, message):
    (tmp_path / "short").write_text(GOLD)
    (tmp_path / "wrong").write_text("0-5\n" * 12)
    places = {name: str(tmp_path / name) for name in ("short", "wrong")}
    if "reference_alignments" in changes:
        changes["reference_alignments"] = [name.format(**places) for name in changes["reference_alignments"]]
    with pytest.raises(SystemExit) as stop:
        run(flags(tmp_path / "run", text, **changes))
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error:" in error
    assert message in error
    assert not (tmp_path / "run").exists()
