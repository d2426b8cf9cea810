# Licensed under the Apache License, Version 2.0.
"""Model cards: what a model is, how it was made, and what it reached."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ._files import write_text
from .runs import format_table


TEMPLATE = Path(__file__).parent / "model_card_template.md"

PAPERS = {
    "guidance": {
        "title": "Guiding Attention for Self-Supervised Learning with Transformers",
        "bibtex": """@inproceedings{deshpande-narasimhan-2020-guiding,
    title = "Guiding Attention for Self-Supervised Learning with Transformers",
    author = "Deshpande, Ameet and Narasimhan, Karthik",
    booktitle = "Findings of the Association for Computational Linguistics: EMNLP 2020",
    year = "2020",
    pages = "4676--4686"
}""",
    }
}


def write_model_card(
    folder: str | Path,
    name: str,
    description: str,
    architecture: str,
    figures: dict[str, float | None],
    dataset: str,
    provenance: dict[str, Any],
    guided_heads: dict[int, dict[str, list[int]]] | None = None,
    language: str = "en",
    license: str | None = None,
) -> Path:
    """Write the `README.md` of a model: its card, with metadata that the Hub reads.

    Args:
        folder (`str` or `Path`): Folder of the saved model.
        name (`str`): Name of the model.
        description (`str`): What it is, in a paragraph.
        architecture (`str`): Class of the model.
        figures (`dict[str, float]`): What it reached, by the names of the run's summary; `None` values are left out.
        dataset (`str`): Data it was trained on.
        provenance (`dict`): See [`provenance`]; has the command, seed and versions.
        guided_heads (`dict`, *optional*): Heads of each pattern in each layer, see `config.guided_heads()`.
        language (`str`): Language code of the data.
        license (`str`, *optional*): Licence of the weights; left open if not given.

    Returns:
        `Path`: the file.
    """
    figures = {key: value for key, value in figures.items() if value is not None}
    data = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        tags=["hf_attn_dynamics", "attention-heads", *(["attention-guidance"] if guided_heads else [])],
        pipeline_tag="fill-mask",
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="fill-mask",
                dataset_type="text",
                dataset_name=dataset,
                metric_type="loss",
                metric_name="masked-language-model loss (nats, mean over masked tokens)",
                metric_value=round(figures["mlm_loss_eval"], 4),
            )
        ]
        if "mlm_loss_eval" in figures
        else None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        description=description,
        architecture=architecture,
        dataset=dataset,
        figures=format_table(["figure", "value"], [[key, value] for key, value in figures.items()]),
        guided_heads=_guided_heads_table(guided_heads),
        command=provenance["command"],
        seed=provenance["seed"],
        versions=", ".join(
            f"{key.removesuffix('_version')} {value}" for key, value in provenance.items() if key.endswith("_version")
        ),
        paper=PAPERS["guidance"] if guided_heads else None,
    )
    path = Path(folder) / "README.md"
    write_text(path, str(card).rstrip() + "\n")
    return path


def _guided_heads_table(guided_heads: dict[int, dict[str, list[int]]] | None) -> str:
    """Layers with the same assignment in one row."""
    rows: dict[str, list[int]] = {}
    for layer, layout in (guided_heads or {}).items():
        rows.setdefault(json.dumps(layout), []).append(layer)
    body = [
        [
            f"{layers[0]}–{layers[-1]}" if layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 1
            else ", ".join(map(str, layers)),
            "; ".join(f"{pattern}: {', '.join(map(str, heads))}" for pattern, heads in json.loads(layout).items()),
        ]
        for layout, layers in rows.items()
    ]  # fmt: skip
    return format_table(["layers", "heads of each pattern"], body) if body else ""
