"""Cards of small models."""

from huggingface_hub import ModelCard

from hf_attn_dynamics.model_card import Metric, write_model_card
from hf_attn_dynamics.runs import provenance


def write_card(folder, config, **changes):
    arguments = {
        "name": "guided RoBERTa",
        "description": "A small model.",
        "config": config,
        "task": "fill-mask",
        "figures": {"mlm_loss_eval": 5.25, "guidance_weight_initial": None},
        "metric": Metric("loss", "masked-language-model loss", 5.25),
        "dataset": "some text",
        "provenance": provenance(7, "cpu"),
    }
    return ModelCard.load(write_model_card(folder, **{**arguments, **changes}))
