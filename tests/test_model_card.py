import re
from pathlib import Path

import pytest
import torch
from cards import loaded_as_its_card_says, write_card
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from stock_models import build_stock
from tiny_models import tiny_config, tiny_model
from transformers import BertForMultipleChoice

from hf_attn_dynamics import prune_heads, prune_units
from hf_attn_dynamics.hub.card import TEMPLATE, Metric, count_parameters
from hf_attn_dynamics.recipes.arguments.base import PublishArguments
from hf_attn_dynamics.recipes.run import provenance


ROOT = Path(__file__).parents[1]
GUIDANCE = {"heads": {0: {"next": [0]}, 1: {"next": [0]}, 3: {"first": [1, 2]}}}


def card(folder, kind="roberta", config=None, **changes):
    """The card of a model with that configuration, whose weights are saved first."""
    model = tiny_model(kind, **({"num_hidden_layers": 4, "guidance": GUIDANCE} if config is None else config))
    model.save_pretrained(folder)
    return write_card(folder, model.config, **changes)


def test_a_card_has_metadata_that_the_hub_reads(tmp_path):
    data = card(tmp_path, license="apache-2.0").data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "fill-mask"
    assert data.model_name == "guided RoBERTa"
    assert data.license == "apache-2.0"


@pytest.mark.parametrize(("base_model", "linked"), [("google/electra-small", True), ("runs/own/model", False)])
def test_a_card_links_what_it_comes_from_if_that_is_on_the_hub(tmp_path, monkeypatch, base_model, linked):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "own" / "model").mkdir(parents=True)
    found = card(tmp_path / "card", base_model=base_model, hub_dataset="nyu-mll/glue")
    assert found.data.base_model == (base_model if linked else None)
    assert found.data.datasets == ["nyu-mll/glue"]
    assert f"- Trained from: {base_model if linked else 'own'}\n- Training data" in found.text


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_card_loads_a_tokenizer_only_if_there_is_one(tmp_path, has_tokenizer):
    if has_tokenizer:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    text = card(tmp_path).text
    assert ("AutoTokenizer" in text) == ("to both calls" in text) == has_tokenizer
    snippet = text.partition("```python\n")[2].partition("```")[0]
    compile(snippet, "card", "exec")
    assert snippet.splitlines()[2] == ""


def test_every_result_on_the_hub_has_its_data_part_and_seed(tmp_path):
    metrics = [Metric("f1", "F1", 0.5, "test"), Metric("f1", "F1", 0.25), Metric("loss", "loss", 1.5)]
    results = card(tmp_path, metric=metrics).data.eval_results
    assert {(one.metric_type, one.metric_value, one.dataset_split) for one in results} == {
        ("f1", 0.5, "test"),
        ("f1", 0.25, "validation"),
        ("loss", 1.5, "validation"),
    }
    assert all(one.dataset_name == "some text" and one.metric_args == {"seed": 7} for one in results)


def test_a_card_says_what_was_guided_and_how_it_was_made(tmp_path):
    text = card(tmp_path).text
    assert "| 0–1    | next: 0" in text
    assert "| 3      | first: 1, 2" in text
    assert "guidance_weight_initial" not in text
    assert provenance(7, "cpu")["command"] in text
    assert "Seed 7; python " in text
    assert "Deshpande" in text
    assert "Voita" not in text


def test_a_card_says_which_layers_learned_from_a_teacher(tmp_path):
    teacher = {"layers": {0: 2, 3: 5}, "heads": {0: 1, 3: 0}, "relations": ["value"]}
    guidance = {"heads": {"0": {"prev": [2]}}, "teacher": teacher}
    text = card(tmp_path, config={"num_hidden_layers": 4, "guidance": guidance}).text
    assert "| 0      | prev: 2; teacher's layer 2: 0, 3, relation value |" in text
    assert "| 3      | teacher's layer 5: 0, 3, relation value          |" in text


@pytest.mark.parametrize(("license", "line"), [(None, "not chosen"), ("mit", "mit")])
def test_a_card_says_what_is_licensed_how(tmp_path, license, line):
    assert (
        f"- License: {line} for the weights, Apache-2.0 for the code saved with them"
        in card(tmp_path, license=license).text
    )


@pytest.mark.parametrize("shard", ["1GB", "4kB"])
def test_a_card_counts_the_numbers_that_are_in_the_file(tmp_path, shard):
    model = tiny_model("roberta")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    stored = [value for file in tmp_path.glob("*.safetensors") for value in load_file(file).values()]
    total = sum(value.numel() for value in stored)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(tmp_path) == {"F32": total}
    assert f"- Parameters: {total:,}\n" in write_card(tmp_path, model.config).text


def test_the_card_of_a_pruned_translator_says_and_shows_which_heads_are_left(tmp_path):
    pruned = {"encoder": {0: [1, 2]}, "cross": {0: [0, 1], 1: [0]}}
    loaded = card(
        tmp_path,
        "marian",
        {"guidance": None, "pruned_heads": pruned},
        task="translation",
        metric=Metric("bleu", "BLEU", 30.0),
        methods=["gates"],
        language=["de", "en"],
    )
    for row in ("| encoder 0            | 0, 3 ", "| cross 0              | none", "| cross 1              | 1 "):
        assert row in loaded.text, loaded.text
    picture = re.search(r"!\[.+\]\((.+)\)", loaded.text)[1]
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "AutoModelForSeq2SeqLM.from_pretrained" in loaded.text
    assert "Voita" in loaded.text
    assert "Deshpande" not in loaded.text
    assert "pruned-attention-heads" in loaded.data.tags


@pytest.mark.parametrize(
    ("name", "task", "units", "rows"),
    [
        ("bert", "fill-mask", {0: range(20), 2: [0, 5]}, ["| 0 | 0, 1, 2, 3 | 4 |", "| 2 | 0, 1, 2, 3 | 22 |"]),
        (
            "bart",
            "summarization",
            {"decoder": {1: [3]}},
            ["| decoder 1 | 0, 1, 2, 3 | 23 |", "| cross 0, cross 1, cross 2 | 0, 1, 2, 3 | |"],
        ),
        (
            "multiple-choice",
            "text-classification",
            {1: range(24)},
            ["| 0, 2 | 0, 1, 2, 3 | 24 |", "| 1 | 0, 1, 2, 3 | 0 |"],
        ),
    ],
)
def test_the_card_of_a_model_with_fewer_units_says_and_shows_how_many_are_left(tmp_path, name, task, units, rows):
    # A class that no headwise one is made of.
    is_lone = name == "multiple-choice"
    model = BertForMultipleChoice(build_stock("bert").config) if is_lone else build_stock(name)
    prune_units(model, units).save_pretrained(tmp_path)
    written = write_card(tmp_path, model.config, task=task, methods=["fisher", "speedup_gates"])
    text = re.sub(" +", " ", written.text)
    for row in rows:
        assert row in text, written.text
    assert "![Remaining heads and units of each layer](heads.png)" in written.text
    assert "pruned-feed-forward-units" in written.data.tags
    assert "pruned-attention-heads" not in written.data.tags
    assert "Kwon" in written.text
    assert "Xia" in written.text
    names = loaded_as_its_card_says(tmp_path)
    assert ("load_pruned" in names) == is_lone
    for value, loaded in zip(model.parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(value, loaded)


def test_the_card_of_a_plain_model_cites_and_shows_nothing(tmp_path):
    loaded = card(tmp_path, config={"guidance": None})
    assert "Citation" not in loaded.text
    assert "![" not in loaded.text
    assert "attention-guidance" not in loaded.data.tags


def test_a_task_that_no_class_is_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task must be one of fill-mask, .*, got 'chess'"):
        card(tmp_path, task="chess")


def test_a_card_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no safetensors file; save the model there"):
        write_card(tmp_path, tiny_config("roberta"))


def test_a_name_of_several_lines_stays_in_its_heading(tmp_path):
    loaded = card(tmp_path, name="a\n---\n# b", dataset="{{ seed }}\n- c")
    assert "\n# a --- # b\n" in loaded.text
    assert "\n- Training data: {{ seed }} - c\n" in loaded.text
    assert loaded.data.model_name == "a --- # b"


def test_the_card_of_a_translator_says_what_is_guided_and_what_is_fixed_at_each_site(tmp_path):
    settings = {
        "guidance": {"cross": {"heads": {"first": [1]}}, "decoder": {"heads": {"prev": [0]}}},
        "hard_coded": {"encoder": {"offsets": [-1, 1], "std": 2.0}},
    }
    loaded = card(tmp_path, "marian", settings, task="translation", metric=Metric("bleu", "BLEU", 30.0))
    rows = ("| decoder 0, decoder 1 | prev: 0", "| cross 0, cross 1     | first: 1", "| encoder        | -1, 1 ")
    for row in rows:
        assert row in loaded.text, loaded.text
    assert {"attention-guidance", "hard-coded-attention"} <= set(loaded.data.tags)
    assert "Iyyer" in loaded.text
    assert "Deshpande" in loaded.text


@pytest.mark.parametrize("license", ["Apache 2.0", "", "mit\nfoo: bar"])
def test_a_licence_that_the_hub_cannot_know_is_refused(license):
    with pytest.raises(ValueError, match="license must be an identifier of the Hub such as apache-2.0, got"):
        PublishArguments(license=license)


@pytest.mark.parametrize("path", sorted((ROOT / "model_cards").glob("*.md")), ids=lambda path: path.stem)
def test_the_examples_of_cards_are_what_the_template_gives_now(path):
    template = re.sub(r"{%.*?%}", "", TEMPLATE.read_text())
    headings = {line for line in template.splitlines() if line.startswith("## ") and "{" not in line}
    example = ModelCard.load(path)
    found = {line for line in example.text.splitlines() if line.startswith("## ")}
    assert {line for line in found if not line.startswith("## Citation")} <= headings
    assert {"## Results", "## Usage", "## Training command"} <= found
    for entry in ("- Parameters: ", "- Training data: ", "- License: "):
        assert entry in example.text
    assert ("## Remaining heads" in found) == ("![Remaining heads of each layer]" in example.text)
    assert all(one.metric_args == {"seed": 42} and one.dataset_split for one in example.data.eval_results)
    for picture in re.findall(r"!\[.+\]\((.+)\)", example.text):
        assert (path.parent / picture).is_file()


@pytest.mark.parametrize(
    ("name", "task", "heads", "row"),
    [
        ("gpt2", "text-generation", {0: [1, 2], 1: range(4)}, "| 0      | 0, 3"),
        ("llama", "text-generation", {2: [0, 1]}, "| 2      | 2, 3, 4, 5"),
        ("bart", "summarization", {"cross": {1: [0]}}, "| cross 1 "),
        ("vit", "image-classification", {0: [3]}, "| 0      | 0, 1, 2"),
        ("whisper", "automatic-speech-recognition", {"decoder": {0: [3]}}, "| decoder 0 "),
        ("bert", "fill-mask", {0: [3]}, "| 0      | 0, 1, 2"),
        ("deberta-v2", "fill-mask", {0: [3]}, "| 0      | 0, 1, 2"),
        ("multiple-choice", "text-classification", {0: [3]}, "| 0      | 0, 1, 2"),
    ],
)
def test_the_card_of_a_pruned_stock_model_says_which_heads_are_left_and_how_to_load_it(
    tmp_path, name, task, heads, row
):
    # A class that no headwise one is made of.
    is_lone = name == "multiple-choice"
    model = BertForMultipleChoice(build_stock("bert").config) if is_lone else build_stock(name)
    prune_heads(model, heads).save_pretrained(tmp_path)
    written = write_card(tmp_path, model.config, task=task)
    assert row in written.text
    assert "![Remaining heads of each layer](heads.png)" in written.text
    assert (tmp_path / "heads.png").is_file()
    stored = sum(value.numel() for value in load_file(tmp_path / "model.safetensors").values())
    assert f"- Parameters: {stored:,}\n" in written.text
    names = loaded_as_its_card_says(tmp_path)
    assert ("load_pruned" in names) == is_lone
    for (key, value), (other, loaded) in zip(
        sorted(model.state_dict().items()), sorted(names["model"].state_dict().items()), strict=True
    ):
        assert key == other
        assert torch.equal(value, loaded)
