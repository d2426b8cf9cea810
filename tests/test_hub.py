from huggingface_hub import ModelCard

from hf_attn_dynamics.hub import write_model_card
from hf_attn_dynamics.runs import provenance


def card(folder, **changes):
    arguments = {
        "name": "guided RoBERTa",
        "description": "A small model.",
        "architecture": "HeadwiseRobertaForMaskedLM",
        "figures": {"mlm_loss_eval": 5.25, "guidance_weight_initial": None},
        "dataset": "some text",
        "provenance": provenance(7, "cpu"),
        "guided_heads": {0: {"next": [0]}, 1: {"next": [0]}, 3: {"first": [1, 2]}},
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


def test_the_card_of_an_unguided_model_cites_no_guidance(tmp_path):
    loaded = card(tmp_path, guided_heads=None)
    assert "Deshpande" not in loaded.text
    assert "attention-guidance" not in loaded.data.tags
