"""Cards of small models."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from hf_attn_dynamics.hub.card import CARD, REPOSITORY, Metric, write_model_card
from hf_attn_dynamics.hub.push import model_files
from hf_attn_dynamics.recipes.run import provenance


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


def loaded_as_its_card_says(folder: Path) -> dict[str, Any]:
    """What the lines of code in the card of a model define; the folder is one that can be pushed."""
    assert model_files(folder)
    code = (folder / CARD).read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code.replace(REPOSITORY, str(folder)), names)
    return names
