# Licensed under the Apache License, Version 2.0.
"""Model cards: description, provenance and results."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from .._files import write_text
from .._tables import format_table
from ..analysis.plots.base import plot_heads_per_layer
from ..analysis.plots.parts import plot_parts_per_layer
from ..models.head_roles import HeadLayer
from ..models.head_sites import HeadSite, kinds_of
from ..models.loaded_weights import stored_numbers
from ..models.pruned_checkpoints import saved_heads, saved_units
from ..models.unit_roles import UnitLayer


TEMPLATE = Path(__file__).parent / "model_card_template.md"
CARD = "README.md"
HEADS_PICTURE = "heads.png"
REPOSITORY = "PATH_OR_NAME_OF_THIS_MODEL"  # placeholder in a card, replaced when the model is pushed

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
    "speedup_gates": {
        "method": "Gates of heads and feed-forward units",
        "title": "Structured Pruning Learns Compact and Accurate Models",
        "bibtex": """@inproceedings{xia-etal-2022-structured,
    title = "Structured Pruning Learns Compact and Accurate Models",
    author = "Xia, Mengzhou and Zhong, Zexuan and Chen, Danqi",
    booktitle = "Proceedings of the 60th Annual Meeting of the Association for Computational Linguistics",
    year = "2022",
    pages = "1513--1528"
}""",
    },
    "fisher": {
        "method": "Selecting heads and feed-forward units for a speed-up",
        "title": "A Fast Post-Training Pruning Framework for Transformers",
        "bibtex": """@inproceedings{kwon-etal-2022-fast,
    title = "A Fast Post-Training Pruning Framework for Transformers",
    author = "Kwon, Woosuk and Kim, Sehoon and Mahoney, Michael W. and Hassoun, Joseph and
        Keutzer, Kurt and Gholami, Amir",
    booktitle = "Advances in Neural Information Processing Systems 35",
    year = "2022"
}""",
    },
    "lexical": {
        "method": "How attention is learnt",
        "title": "Approximating How Single Head Attention Learns",
        "bibtex": """@article{snell-etal-2021-approximating,
    title = "Approximating How Single Head Attention Learns",
    author = "Snell, Charlie and Zhong, Ruiqi and Klein, Dan and Steinhardt, Jacob",
    journal = "arXiv preprint arXiv:2103.07601",
    year = "2021"
}""",
    },
    "score_norm": {
        "method": "Scores and embedding norms",
        "title": "On the Dynamics of Training Attention Models",
        "bibtex": """@inproceedings{lu-etal-2021-dynamics,
    title = "On the Dynamics of Training Attention Models",
    author = "Lu, Haoye and Mao, Yongyi and Nayak, Amiya",
    booktitle = "International Conference on Learning Representations",
    year = "2021"
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
# Auto class of each task of the Hub.
AUTO_CLASSES = {
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "feature-extraction": "AutoModel",
    "translation": "AutoModelForSeq2SeqLM",
    "summarization": "AutoModelForSeq2SeqLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
}
# Type of the data of tasks without text.
DATASET_TYPES = {"image-classification": "image", "automatic-speech-recognition": "audio"}


class Metric(NamedTuple):
    """A result in the metadata of a card.

    Args:
        type (`str`): Metric id on the Hub: `loss`, `accuracy`, `bleu`.
        name (`str`): Display name.
        value (`float`): Value of the metric.
        split (`str`): Evaluated split of the data.
    """

    type: str
    name: str
    value: float
    split: str = "validation"


def write_model_card(
    folder: str | Path,
    name: str,
    description: str,
    config: PreTrainedConfig,
    task: str,
    figures: dict[str, float | None],
    metric: Metric | Sequence[Metric],
    dataset: str,
    provenance: dict[str, Any],
    methods: Iterable[str] = (),
    language: str | list[str] | None = None,
    license: str | None = None,
    base_model: str | Path | None = None,
    hub_dataset: str | None = None,
) -> Path:
    """Writes the model card `README.md`, with metadata for the Hub, and `heads.png` if heads or units were removed.

    Args:
        folder (`str` or `Path`): Folder of the saved model, whose parameters are counted.
        name (`str`): Name of the model.
        description (`str`): Description, one paragraph.
        config (`PreTrainedConfig`): Configuration of the model, from which the card lists guided, hard-coded and
            remaining heads, and remaining feed-forward units.
        task (`str`): Task of the Hub, a key of `AUTO_CLASSES`, such as `fill-mask`.
        figures (`dict[str, float]`): Metrics of the run's summary by name; `None` values are left out.
        metric (`Metric` or a list of these): Metrics for the metadata, with data and seed.
        dataset (`str`): Training data.
        provenance (`dict`): See [`provenance`]; has the command, seed and versions.
        methods (iterable of `str`): Keys of `PAPERS` to cite; `guidance` and `hard_coded` are added if the
            configuration has them.
        language (`str` or `list[str]`, *optional*): Language codes of the data, if known.
        license (`str`, *optional*): License of the weights; the card states if there is none.
        base_model (`str` or `Path`, *optional*): Checkpoint that training started from; linked if it is on the Hub.
        hub_dataset (`str`, *optional*): Name of the training data on the Hub, which is linked.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: if `task` is unknown, or the folder has no readable safetensors file.
    """
    if task not in AUTO_CLASSES:
        raise ValueError(f"task must be one of {', '.join(AUTO_CLASSES)}, got {task!r}.")
    folder = Path(folder)
    parameters = sum(count_parameters(folder).values())
    name, dataset = one_line(name), one_line(dataset)
    settings = {
        name: getattr(config, name, None) for name in ("guidance", "hard_coded", "pruned_heads", "pruned_units")
    }
    methods = [*(name for name in ("guidance", "hard_coded") if settings[name]), *methods]
    tags = {
        "attention-guidance": settings["guidance"],
        "hard-coded-attention": settings["hard_coded"],
        "pruned-attention-heads": settings["pruned_heads"],
        "pruned-feed-forward-units": settings["pruned_units"],
    }
    units = saved_units(folder) if settings["pruned_units"] else []
    heads = saved_heads(folder) if settings["pruned_heads"] or units else []
    is_local = base_model is None or Path(base_model).exists()
    data = ModelCardData(
        language=language,
        base_model=None if is_local else str(base_model),
        datasets=[hub_dataset] if hub_dataset and not Path(hub_dataset).exists() else None,
        license=license,
        library_name="transformers",
        tags=["hf_attn_dynamics", "attention-heads", *(tag for tag, value in tags.items() if value)],
        pipeline_tag=task,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=DATASET_TYPES.get(task, "text"),
                dataset_name=dataset,
                dataset_split=one.split,
                metric_type=one.type,
                metric_name=one.name,
                metric_value=round(one.value, 4),
                metric_args={"seed": provenance["seed"]},
            )
            for one in ([metric] if isinstance(metric, Metric) else metric)
        ],
    )
    reached = [[key, value] for key, value in figures.items() if value is not None]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=name,
        description=one_line(description),
        parameters=f"{parameters:,}",
        base_model=base_model and title_of(base_model) if is_local else base_model,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        repository=REPOSITORY,
        auto_class=AUTO_CLASSES[task],
        dataset=dataset,
        license=license,
        figures=format_table(["metric", "value"], reached),
        **(_tables_of_settings(config) if hasattr(config, "attention_sites") else {}),
        kept_parts=_kept_parts_table(heads, units),
        has_fewer_units=bool(units),
        # Stock classes with a headwise counterpart are saved with its configuration.
        is_stock_and_pruned=bool(heads) and not config.model_type.startswith("headwise-"),
        heads_picture=HEADS_PICTURE,
        command=provenance["command"],
        seed=provenance["seed"],
        versions=", ".join(
            f"{key.removesuffix('_version')} {value}" for key, value in provenance.items() if key.endswith("_version")
        ),
        papers=[PAPERS[method] for method in methods],
    )
    if heads:
        _draw_kept_parts(heads, units, folder / HEADS_PICTURE)
    path = folder / CARD
    write_text(path, str(card).rstrip() + "\n")
    return path


def count_parameters(folder: str | Path) -> dict[str, int]:
    """Counts the elements in the safetensors files of a folder from their headers, as the Hub does.

    Args:
        folder (`str` or `Path`): Folder of a saved model, in one file or in shards.

    Returns:
        `dict[str, int]`: number of elements by dtype, such as `F32`, with tied weights once and saved buffers.

    Raises:
        ValueError: if there is no such file, or one cannot be read.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors file; save the model there with save_pretrained().")
    return dict(sum(map(stored_numbers, files), Counter()))


def language_of(args: Any) -> str | None:
    """Language of the text of a run: English for built-in data, unknown (`None`) for other data.

    Args:
        args (dataclass): Arguments of a recipe, with `train_file` and `dataset_name`.
    """
    return None if args.train_file or args.dataset_name else "en"


def title_of(checkpoint: str | Path) -> str:
    """Display name of a checkpoint: its name on the Hub, its folder, or the run whose folder `model` it is.

    Example:
        >>> title_of("google/electra-small"), title_of("runs/classifier/model"), title_of("runs/pruned/model-8")
        ('electra-small', 'classifier', 'pruned/model-8')
    """
    path = Path(checkpoint)
    run = path.parent.name
    if run and path.name == "model":
        return run
    # Generic folder names are prefixed with the run.
    return f"{run}/{path.name}" if run and re.fullmatch(r"dense|model[-_].+", path.name) else path.name


def one_line(text: Any) -> str:
    """Replaces line breaks, which would end a heading or a list item, by spaces."""
    return " ".join(str(text).split())


def _draw_kept_parts(heads: list[HeadLayer], units: list[UnitLayer], path: Path) -> None:
    kept, built = _by_kind("heads", heads)
    if units:
        kept_units, built_units = _by_kind("units", units)
        left = {"": {"heads": kept, "units": kept_units}}
        plot_parts_per_layer(left, path, built, built_units)
    else:
        plot_heads_per_layer(kept, path, total={kind: max(numbers) for kind, numbers in built.items()})


def _by_kind(part: str, layers: Sequence[HeadLayer | UnitLayer]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Numbers of remaining and of original heads or units in each layer, by kind of site."""
    kept: dict[str, list[int]] = {}
    built: dict[str, list[int]] = {}
    for layer in layers:
        kept.setdefault(layer.site.kind, []).append(len(getattr(layer, part)))
        built.setdefault(layer.site.kind, []).append(getattr(layer, f"num_{part}"))
    return kept, built


def _tables_of_settings(config: PreTrainedConfig) -> dict[str, str]:
    """Values of the template for a headwise configuration."""
    return {"guided_heads": _guided_heads_table(config), "hard_coded": _hard_coded_table(config)}


def _guided_heads_table(config: PreTrainedConfig) -> str:
    several = len(kinds_of(config.attention_sites())) > 1
    rows: dict[int | str, list[str]] = {}
    for kind, settings in config.head_settings().guidance.items():
        for layer, layout in config.guided_heads(kind).items():
            found = rows.setdefault(_site_name(HeadSite(kind, layer), several), [])
            found += [f"{pattern}: {', '.join(map(str, heads))}" for pattern, heads in layout.items()]
        for layer, learned in (settings.taught.layers if settings.taught else {}).items():
            heads = settings.taught.taught.get(layer, {})
            what = ", ".join([*map(str, heads), *(f"relation {name}" for name in settings.taught.relations or ())])
            found = rows.setdefault(_site_name(HeadSite(kind, layer), several), [])
            found.append(f"teacher's layer {learned}: {what}")
    return _layers_table({site: ["; ".join(texts)] for site, texts in rows.items()}, ["heads of each pattern"])


def _hard_coded_table(config: PreTrainedConfig) -> str:
    rows = [
        [kind, ", ".join(map(str, settings["offsets"])), settings["std"]]
        for kind, settings in config.hard_coded_settings().items()
    ]
    return format_table(["self-attention", "offsets in tokens", "standard deviation"], rows) if rows else ""


def _kept_parts_table(heads: list[HeadLayer], units: list[UnitLayer]) -> str:
    several = len({layer.site.kind for layer in heads}) > 1
    header = [f"remaining of {max((layer.num_heads for layer in heads), default=0)} heads"]
    rows = {_site_name(layer.site, several): [", ".join(map(str, layer.heads)) or "none"] for layer in heads}
    if units:
        header.append(f"remaining of {max(layer.num_units for layer in units):,} feed-forward units")
        numbers = {_site_name(layer.site, several): f"{len(layer.units):,}" for layer in units}
        # Cross-attention has no units.
        rows = {name: [*texts, numbers.get(name, "")] for name, texts in rows.items()}
    return _layers_table(rows, header)


def _site_name(site: HeadSite, several_kinds: bool) -> int | str:
    return f"{site.kind} {site.layer}" if several_kinds else site.layer


def _layers_table(texts: dict[int | str, list[str]], header: list[str]) -> str:
    """Formats a table with one row for all layers with the same texts."""
    layers: dict[tuple[str, ...], list] = {}
    for layer, of_layer in texts.items():
        layers.setdefault(tuple(of_layer), []).append(layer)
    rows = [[_span(same), *of_layer] for of_layer, same in layers.items()]
    return format_table(["layers", *header], rows) if rows else ""


def _span(layers: list) -> str:
    numbers = all(isinstance(layer, int) for layer in layers)
    if numbers and len(layers) > 1 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}–{layers[-1]}"
    return ", ".join(map(str, layers))
