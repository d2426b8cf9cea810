# Licensed under the Apache License, Version 2.0.
"""Publishing: the card of a model (what it is, how it was made, what it reached), and the push of a finished one.

    python -m hf_attn_dynamics.hub runs/prune_heads/model-8 USER/NAME [--private]

pushes what a recipe has left in a folder, now or again.
"""

import argparse
import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    parse_local_safetensors_file_metadata,
)
from huggingface_hub.errors import HfHubHTTPError, HTTPError, SafetensorsParsingError
from huggingface_hub.utils import get_session, validate_repo_id
from transformers import PreTrainedConfig, TrainingArguments
from yaml import YAMLError

from ._files import write_text
from .analysis.plots import plot_heads_per_layer
from .models.head_sites import HeadSite, kinds_of
from .runs import RunArguments, format_table, refuse_bad_input


TEMPLATE = Path(__file__).parent / "model_card_template.md"
CARD = "README.md"
HEADS_PICTURE = "heads.png"
REPOSITORY = "PATH_OR_NAME_OF_THIS_MODEL"  # in a card, until the model is pushed

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


@dataclass
class PublishArguments(RunArguments):
    """[`RunArguments`] of a recipe that makes a model."""

    license: str | None = field(
        default=None, metadata={"help": "Licence of the weights, for the card, such as apache-2.0."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise ValueError(f"license must be an identifier of the Hub such as apache-2.0, got {self.license!r}.")


# ---------------------------------------------------------------------------------------------------------------------
# Cards
# ---------------------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """A result for the Hub's table.

    Args:
        type (`str`): What the Hub calls the metric: `loss`, `accuracy`, `bleu`.
        name (`str`): What it is, for people.
        value (`float`): What was reached.
        split (`str`): Part of the data that it was reached on.
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
    language: str | list[str] | None = "en",
    license: str | None = None,
) -> Path:
    """Write the `README.md` of a model: its card, with metadata that the Hub reads.

    Beside it goes a picture of the heads that each layer has left, `heads.png`, if any were removed.

    Args:
        folder (`str` or `Path`): Folder of the saved model, whose weights are counted.
        name (`str`): Name of the model.
        description (`str`): What it is, in a paragraph.
        config (`PreTrainedConfig`): Its configuration; of a headwise one, the card says which heads are guided and
            which left.
        task (`str`): `fill-mask`, `text-classification`, `token-classification`, `translation` or
            `feature-extraction`.
        figures (`dict[str, float]`): What it reached, by the names of the run's summary; `None` values are left out.
        metric (`Metric` or a list of these): The results among these that the Hub shows, with data and seed.
        dataset (`str`): Data it was trained on.
        provenance (`dict`): See [`provenance`]; has the command, seed and versions.
        methods (iterable of `str`): Keys of `PAPERS` to cite; `guidance` is cited wherever heads are guided,
            `hard_coded` wherever attention is fixed.
        language (`str` or `list[str]`, *optional*): Language codes of the data.
        license (`str`, *optional*): Licence of the weights; the card says so if none is given.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: if `task` is none of these, or the folder holds no safetensors file that can be read.
    """
    if task not in AUTO_CLASSES:
        raise ValueError(f"task must be one of {', '.join(AUTO_CLASSES)}, got {task!r}.")
    folder = Path(folder)
    parameters = sum(count_parameters(folder).values())
    name, dataset = _one_line(name), _one_line(dataset)
    of_heads = {name: getattr(config, name, None) for name in ("guidance", "hard_coded", "pruned_heads")}
    methods = [*(name for name in ("guidance", "hard_coded") if of_heads[name]), *methods]
    tags = {
        "attention-guidance": of_heads["guidance"],
        "hard-coded-attention": of_heads["hard_coded"],
        "pruned-attention-heads": of_heads["pruned_heads"],
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
        description=_one_line(description),
        parameters=f"{parameters:,}",
        repository=REPOSITORY,
        auto_class=AUTO_CLASSES[task],
        dataset=dataset,
        license=license,
        figures=format_table(["figure", "value"], reached),
        **(_tables_of_heads(config) if hasattr(config, "attention_sites") else {}),
        heads_picture=HEADS_PICTURE,
        command=provenance["command"],
        seed=provenance["seed"],
        versions=", ".join(
            f"{key.removesuffix('_version')} {value}" for key, value in provenance.items() if key.endswith("_version")
        ),
        papers=[PAPERS[method] for method in methods],
    )
    if of_heads["pruned_heads"]:
        _draw_kept_heads(config, folder / HEADS_PICTURE)
    path = folder / CARD
    write_text(path, str(card).rstrip() + "\n")
    return path


def count_parameters(folder: str | Path) -> dict[str, int]:
    """Numbers stored in the safetensors files of a folder, as the Hub counts them: from their headers.

    Args:
        folder (`str` or `Path`): Folder of a saved model, in one file or in shards.

    Returns:
        `dict[str, int]`: by type, such as `F32`. Weights that are tied are stored once; buffers are counted if they
        are stored.

    Raises:
        ValueError: if there is no such file, or one cannot be read.
    """
    counts: dict[str, int] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors file; save the model there with save_pretrained().")
    for file in files:
        try:
            of_file = parse_local_safetensors_file_metadata(file).parameter_count
        except SafetensorsParsingError as error:
            raise ValueError(f"{file} cannot be read as safetensors, save it again: {_one_line(error)}") from error
        for dtype, count in of_file.items():
            counts[dtype] = counts.get(dtype, 0) + count
    return counts


def title_of(checkpoint: str | Path) -> str:
    """What to call a checkpoint: its name on the Hub, or its folder; of a run's folder `model`, the run.

    Example:
        >>> title_of("google/electra-small"), title_of("runs/classifier/model")
        ('electra-small', 'classifier')
    """
    path = Path(checkpoint)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def _one_line(text: Any) -> str:
    """Without the line breaks that would end a heading or an entry of a list."""
    return " ".join(str(text).split())


def _draw_kept_heads(config: PreTrainedConfig, path: Path) -> None:
    kept: dict[str, list[int]] = {}
    for site, heads in config.kept_heads().items():
        kept.setdefault(site.kind, []).append(len(heads))
    built = {site.kind: heads for site, heads in config.attention_sites().items()}
    plot_heads_per_layer(kept, path, total=built)


def _tables_of_heads(config: PreTrainedConfig) -> dict[str, str]:
    """Values of the template; those of an architecture that is not headwise are all missing."""
    return {
        "guided_heads": _guided_heads_table(config),
        "hard_coded": _hard_coded_table(config),
        "kept_heads": _kept_heads_table(config),
    }


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


# ---------------------------------------------------------------------------------------------------------------------
# Pushing
# ---------------------------------------------------------------------------------------------------------------------

SILENCE = 120  # seconds after which a server that says nothing has failed
COMMAND = ("python", "-m", "hf_attn_dynamics.hub")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # may run code where they are loaded
_PUSH_SETTINGS = ("push_to_hub", "hub_model_id", "hub_private_repo")
_NO_EFFECT = ("hub_strategy", "hub_always_push", "hub_revision", "hub_token")


class PushError(OSError):
    """A model did not get to the Hub, or not all of it. It lies on disk as before, and can be pushed again."""


class Push(NamedTuple):
    """Where a finished model is to go.

    Args:
        repo_id (`str`): Repository on the Hub, `USER/NAME`, or `NAME` for one of one's own.
        private (`bool`, *optional*): Whether a new repository is private; as its owner has it by default.
    """

    repo_id: str
    private: bool | None = None


def push_model(folder: str | Path, repo_id: str, private: bool | None = None) -> str:
    """Pushes a saved model with its card to the Hub, in one commit.

    Takes the files that lie directly in the folder, without hidden ones and without any that is pickled, such as
    `training_args.bin`. The card on the Hub names the repository where that on disk leaves room for it; otherwise the
    folder is only read.

    Args:
        folder (`str` or `Path`): Folder of the model: `config.json`, safetensors and `README.md`.
        repo_id (`str`): Repository, made if it does not exist. Who may write there is found as everywhere in
            `huggingface_hub`: from `HF_TOKEN`, or from `hf auth login`.
        private (`bool`, *optional*): Whether a new repository is private; as its owner has it by default.

    Returns:
        `str`: address of the commit.

    Raises:
        ValueError: if the folder is not a model with a card, or `repo_id` is not possible; nothing is sent then.
        PushError: if the Hub cannot be reached, refuses or breaks off. There is no commit then; the message has the
            command that tries again, which does not send anew what has arrived.
    """
    validate_repo_id(repo_id)
    files = model_files(folder)
    card = (Path(folder) / CARD).read_text(encoding="utf-8")
    api = HfApi()
    try:
        with _patience():
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            contents = {file.name: file for file in files} | {CARD: card.replace(REPOSITORY, repo_id).encode()}
            operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
            return api.create_commit(repo_id, operations, commit_message="Model and card").commit_url
    # What fails while several files are on their way is a RuntimeError.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        retry = [*COMMAND, str(folder), repo_id, *(["--private"] if private else [])]
        raise PushError(
            f"{folder} was not pushed to {repo_id}: {_reason(error)} It lies on disk as before; try again with: "
            f"{shlex.join(retry)}"
        ) from error


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Has requests of `huggingface_hub` end some time: by default they wait for ever for a server that is silent."""
    session = get_session()
    before, session.timeout = session.timeout, SILENCE
    try:
        yield
    finally:
        session.timeout = before


def _reason(error: Exception) -> str:
    """What went wrong, as a sentence, with what to do about it."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    text = _one_line(error) or type(error).__name__
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    advice = " Log in with `hf auth login`, or set HF_TOKEN to a token that may write there." * (status in (401, 403))
    return text.rstrip(".") + "." + advice


def model_files(folder: str | Path) -> list[Path]:
    """Files of a saved model that may be published, see [`push_model`].

    Args:
        folder (`str` or `Path`): Its folder.

    Returns:
        `list[Path]`: sorted by name.

    Raises:
        ValueError: if there is no `config.json`, no card with metadata, or there are no weights; if an index names
            weights that are not there; or if a file is a link to another folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name the one that holds the model.")
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and not file.name.startswith(".") and file.suffix not in PICKLED
    ]
    names = {file.name for file in files}
    for file in files:
        if file.resolve().parent != folder.resolve():
            raise ValueError(f"{file} is a link to {file.resolve()}, outside of the folder; copy the file there.")
    for name, way_out in (("config.json", "save_pretrained()"), (CARD, "write_model_card()")):
        if name not in names:
            raise ValueError(f"{folder} holds no {name}; {way_out} writes it.")
    count_parameters(folder)
    for index in (file for file in files if file.name.endswith(".safetensors.index.json")):
        for shard in _shards(index):
            if shard not in names:
                raise ValueError(f"{index} names {shard!r}, which is not in the folder; save the model again.")
    _check_card(folder / CARD)
    return files


def _check_card(path: Path) -> None:
    """Refuses a card whose metadata `huggingface_hub` cannot read, or that has none."""
    try:
        metadata = ModelCard(path.read_text(encoding="utf-8")).data.to_dict()
    except (ValueError, YAMLError) as error:
        raise ValueError(f"{path} has no metadata that can be read: {_one_line(error)}") from error
    if not metadata:
        raise ValueError(f"{path} is no card: it has no metadata; write_model_card() writes some.")


def _shards(index: Path) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights; save the model again.") from error


def take_push(training_args: TrainingArguments) -> Push | None:
    """Takes the wish to push out of a trainer's arguments, for after the run: a trainer would push amid training.

    Args:
        training_args (`TrainingArguments`): Arguments of a recipe; push settings are at their defaults afterwards.

    Returns:
        [`Push`], *optional*: to `hub_model_id`, or a repository called as the output folder; `None` without
        `push_to_hub`.

    Raises:
        ValueError: if settings are given that would have no effect, or a token: the command that a run is made with
            is written into its summary and card.
    """
    default = {one.name: one.default for one in fields(TrainingArguments)}
    values = {name: getattr(training_args, name) for name in (*_PUSH_SETTINGS, *_NO_EFFECT)}
    given = {name: value for name, value in values.items() if value != default[name]}
    if "hub_token" in given:
        raise ValueError("hub_token would be written into the run's summary; set HF_TOKEN, or use `hf auth login`.")
    for name in _NO_EFFECT:
        if name in given:
            raise ValueError(f"{name}={given[name]} has no effect: the finished model is pushed once; leave it out.")
    if given and "push_to_hub" not in given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} has no effect without push_to_hub; set that to true, or leave it out.")
    for name in given:
        setattr(training_args, name, default[name])
    if not given:
        return None
    repo_id = given.get("hub_model_id") or Path(training_args.output_dir).absolute().name
    validate_repo_id(repo_id)
    return Push(repo_id, given.get("hub_private_repo"))


def push_finished(folder: str | Path, push: Push | None) -> None:
    """The last step of a recipe: pushes its model if that was asked for, and says where it is or how to try again.

    Args:
        folder (`str` or `Path`): Folder of the model.
        push ([`Push`], *optional*): Where it is to go.

    Raises:
        SystemExit: with status 2 and one line on standard error, if it did not get there.
    """
    if push is not None:
        with refuse_bad_input():
            address = push_model(folder, *push)
        sys.stdout.write(f"Pushed: {address}\n")


def main(argv: list[str] | None = None) -> None:
    """The command `python -m hf_attn_dynamics.hub`."""
    parser = argparse.ArgumentParser(prog=shlex.join(COMMAND), description="Push a finished model to the Hub.")
    parser.add_argument("folder", help="folder of the model, with its card")
    parser.add_argument("repo_id", help="repository on the Hub: USER/NAME")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    args = parser.parse_args(argv)
    push_finished(args.folder, Push(args.repo_id, args.private))


if __name__ == "__main__":
    main()
