# Licensed under the Apache License, Version 2.0.
"""Model cards: what a model is, how it was made, and what it reached."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from ._files import write_text
from .models.head_sites import HeadSite, kinds_of
from .runs import format_table


TEMPLATE = Path(__file__).parent / "model_card_template.md"

PAPERS = {
    "guidance": {
        "method": "Attention guidance",
        "title": "Guiding Attention for Self-Supervised Learning with Transformers",
        "bibtex": """@inproceedings{deshpande-narasimhan-2020-guiding,
    title = "Guiding Attention for Self-Supervised Learning with Transformers",
    author = "Deshpande, Ameet and Narasimhan, Karthik",
    booktitle = "Findings of the Association for Computational Linguistics: EMNLP 2020",
    year = "2020",
    pages = "4676--4686"
}""",
    },
    "hard_coded": {
        "method": "Hard-coded attention",
        "title": "Hard-Coded Gaussian Attention for Neural Machine Translation",
        "bibtex": """@inproceedings{you-etal-2020-hard,
    title = "Hard-Coded {G}aussian Attention for Neural Machine Translation",
    author = "You, Weiqiu and Sun, Simeng and Iyyer, Mohit",
    booktitle = "Proceedings of the 58th Annual Meeting of the Association for Computational Linguistics",
    year = "2020",
    pages = "7689--7700"
}""",
    },
    "gates": {
        "method": "Choosing heads by gates",
        "title": "Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can Be Pruned",
        "bibtex": """@inproceedings{voita-etal-2019-analyzing,
    title = "Analyzing Multi-Head Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can Be Pruned",
    author = "Voita, Elena and Talbot, David and Moiseev, Fedor and Sennrich, Rico and Titov, Ivan",
    booktitle = "Proceedings of the 57th Annual Meeting of the Association for Computational Linguistics",
    year = "2019",
    pages = "5797--5808"
}""",
    },
    "importance": {
        "method": "Choosing heads by importance",
        "title": "Are Sixteen Heads Really Better than One?",
        "bibtex": """@inproceedings{michel-etal-2019-sixteen,
    title = "Are Sixteen Heads Really Better than One?",
    author = "Michel, Paul and Levy, Omer and Neubig, Graham",
    booktitle = "Advances in Neural Information Processing Systems 32",
    year = "2019"
}""",
    },
}
# What the Hub calls a task -> the Auto class that loads a model for it.
AUTO_CLASSES = {
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "feature-extraction": "AutoModel",
    "translation": "AutoModelForSeq2SeqLM",
}


class Metric(NamedTuple):
    """A result for the Hub's table.

    Args:
        type (`str`): What the Hub calls the metric: `loss`, `accuracy`, `bleu`.
        name (`str`): What it is, for people.
        value (`float`): What was reached.
    """

    type: str
    name: str
    value: float


def write_model_card(
    folder: str | Path,
    name: str,
    description: str,
    config: PreTrainedConfig,
    task: str,
    figures: dict[str, float | None],
    metric: Metric,
    dataset: str,
    provenance: dict[str, Any],
    methods: Iterable[str] = (),
    language: str | list[str] | None = "en",
    license: str | None = None,
) -> Path:
    """Write the `README.md` of a model: its card, with metadata that the Hub reads.

    Args:
        folder (`str` or `Path`): Folder of the saved model.
        name (`str`): Name of the model.
        description (`str`): What it is, in a paragraph.
        config (`PreTrainedConfig`): Its configuration, headwise: the card says which heads are guided and which left.
        task (`str`): `fill-mask`, `text-classification`, `token-classification`, `translation` or
            `feature-extraction`.
        figures (`dict[str, float]`): What it reached, by the names of the run's summary; `None` values are left out.
        metric (`Metric`): The result among these that the Hub shows.
        dataset (`str`): Data it was trained on.
        provenance (`dict`): See [`provenance`]; has the command, seed and versions.
        methods (iterable of `str`): Keys of `PAPERS` to cite; `guidance` is cited wherever heads are guided,
            `hard_coded` wherever attention is fixed.
        language (`str` or `list[str]`, *optional*): Language codes of the data.
        license (`str`, *optional*): Licence of the weights; left open if not given.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: if `task` is none of these.
    """
    if task not in AUTO_CLASSES:
        raise ValueError(f"task must be one of {', '.join(AUTO_CLASSES)}, got {task!r}.")
    methods = [*(name for name in ("guidance", "hard_coded") if getattr(config, name)), *methods]
    tags = {
        "attention-guidance": config.guidance,
        "hard-coded-attention": config.hard_coded,
        "pruned-attention-heads": config.pruned_heads,
    }
    data = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        tags=["hf_attn_dynamics", "attention-heads", *(tag for tag, value in tags.items() if value)],
        pipeline_tag=task,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type="text",
                dataset_name=dataset,
                metric_type=metric.type,
                metric_name=metric.name,
                metric_value=round(metric.value, 4),
            )
        ],
    )
    reached = [[key, value] for key, value in figures.items() if value is not None]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        description=description,
        auto_class=AUTO_CLASSES[task],
        dataset=dataset,
        figures=format_table(["figure", "value"], reached),
        guided_heads=_guided_heads_table(config),
        hard_coded=_hard_coded_table(config),
        kept_heads=_kept_heads_table(config),
        command=provenance["command"],
        seed=provenance["seed"],
        versions=", ".join(
            f"{key.removesuffix('_version')} {value}" for key, value in provenance.items() if key.endswith("_version")
        ),
        papers=[PAPERS[method] for method in methods],
    )
    path = Path(folder) / "README.md"
    write_text(path, str(card).rstrip() + "\n")
    return path


def _guided_heads_table(config: PreTrainedConfig) -> str:
    several = len(kinds_of(config.attention_sites())) > 1
    rows = {
        _site_name(HeadSite(kind, layer), several): "; ".join(
            f"{pattern}: {', '.join(map(str, heads))}" for pattern, heads in layout.items()
        )
        for kind in config.guidance_settings()
        for layer, layout in config.guided_heads(kind).items()
    }
    return _layers_table(rows, "heads of each pattern")


def _hard_coded_table(config: PreTrainedConfig) -> str:
    rows = [
        [kind, ", ".join(map(str, settings["offsets"])), settings["std"]]
        for kind, settings in config.hard_coded_settings().items()
    ]
    return format_table(["self-attention", "centres, in tokens from each", "standard deviation"], rows) if rows else ""


def _kept_heads_table(config: PreTrainedConfig) -> str:
    if not config.pruned_heads:
        return ""
    kept = config.kept_heads()
    several = len(kinds_of(kept)) > 1
    rows = {_site_name(site, several): ", ".join(map(str, heads)) or "none" for site, heads in kept.items()}
    return _layers_table(rows, f"heads left, of {max(config.attention_sites().values())}")


def _site_name(site: HeadSite, several_kinds: bool) -> int | str:
    return f"{site.kind} {site.layer}" if several_kinds else site.layer


def _layers_table(texts: dict[int | str, str], header: str) -> str:
    """Layers with the same text in one row."""
    layers: dict[str, list] = {}
    for layer, text in texts.items():
        layers.setdefault(text, []).append(layer)
    return format_table(["layers", header], [[_span(same), text] for text, same in layers.items()]) if layers else ""


def _span(layers: list) -> str:
    numbers = all(isinstance(layer, int) for layer in layers)
    if numbers and len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}–{layers[-1]}"
    return ", ".join(map(str, layers))
