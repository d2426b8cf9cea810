import pytest
from huggingface_hub import ModelCard
from tiny_models import tiny_config

from hf_attn_dynamics.hub import Metric, write_model_card
from hf_attn_dynamics.runs import provenance


GUIDANCE = {"heads": {0: {"next": [0]}, 1: {"next": [0]}, 3: {"first": [1, 2]}}}


def card(folder, kind="roberta", config=None, **changes):
    settings = {"num_hidden_layers": 4, "guidance": GUIDANCE} if config is None else config
    arguments = {
        "name": "guided RoBERTa",
        "description": "A small model.",
        "config": tiny_config(kind, **settings),
        "task": "fill-mask",
        "figures": {"mlm_loss_eval": 5.25, "guidance_weight_initial": None},
        "metric": Metric("loss", "masked-language-model loss", 5.25),
        "dataset": "some text",
        "provenance": provenance(7, "cpu"),
    }
    return ModelCard.load(write_model_card(folder, **{**arguments, **changes}))


def test_a_card_has_metadata_that_the_hub_reads(tmp_path):
    data = card(tmp_path).data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "fill-mask"
    assert data.model_name == "guided RoBERTa"
    assert data.eval_results[0].metric_value == 5.25
    assert data.eval_results[0].dataset_name == "some text"


def test_a_card_says_what_was_guided_and_how_it_was_made(tmp_path):
    text = card(tmp_path).text
    assert "| 0–1    | next: 0" in text
    assert "| 3      | first: 1, 2" in text
    assert "guidance_weight_initial" not in text
    assert provenance(7, "cpu")["command"] in text
    assert "Seed 7; python " in text
    assert "Deshpande" in text
    assert "Voita" not in text


def test_the_card_of_a_pruned_translator_says_which_heads_are_left(tmp_path):
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
    assert "AutoModelForSeq2SeqLM.from_pretrained" in loaded.text
    assert "Voita" in loaded.text
    assert "Deshpande" not in loaded.text
    assert "pruned-attention-heads" in loaded.data.tags


def test_the_card_of_a_plain_model_cites_nothing(tmp_path):
    loaded = card(tmp_path, config={"guidance": None})
    assert "Citation" not in loaded.text
    assert "attention-guidance" not in loaded.data.tags


def test_a_task_that_no_class_is_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task must be one of fill-mask, .*, got 'summarization'"):
        card(tmp_path, task="summarization")


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
