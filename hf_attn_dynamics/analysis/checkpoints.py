# Licensed under the Apache License, Version 2.0.
"""Heads over the checkpoints of a run, or the revisions of a repository on the Hub."""

import gc
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .head_scores import HeadScores
from .head_timeline import HeadTimeline
from .observers.base import Observer, check_observers
from .observers.measured_scores import measured_scores, probe_batches


logger = logging.get_logger(__name__)


def checkpoint_timeline(
    model: str | Path,
    observers: Iterable[Observer],
    probe_data: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    revisions: Iterable[str] | Mapping[str, int] | None = None,
    *,
    auto_class: str | type = "AutoModel",
    path: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    **loading: Any,
) -> HeadTimeline:
    """Measures all heads at each checkpoint of a run, or at each revision of a repository (Pythia, OLMo).

    Each checkpoint reads the same probe data under fresh copies of the observers. One model is in memory at a time.
    Checkpoints that cannot be loaded or measured, or have other numbers of layers or heads, are left out, with a
    warning that names them.

    Args:
        model (`str` or `Path`): Folder with `checkpoint-N` folders, or the name of a repository whose `revisions` are
            given.
        observers (iterable of [`Observer`]): See [`HeadDynamicsCallback`].
        probe_data (`dict` or iterable of `dict`): Batches of tensors for the model, or a single one.
        revisions (iterable of `str`, or `dict[str, int]`, *optional*): Revisions, whose number after `step` is their
            step (`stage1-step1000-tokens5B`), or else their first number; or the step of each revision.
        auto_class (`str` or class): Class that loads the checkpoints, such as `AutoModelForCausalLM`.
        path (`str` or `Path`, *optional*): CSV file that is written after each checkpoint. If it exists, steps in it
            are not measured again; it must have the same statistics.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): See [`observe`].
        progress (`bool`): Whether to show a progress bar.
        loading: Further arguments of `from_pretrained`, such as `dtype`.

    Returns:
        [`HeadTimeline`]

    Raises:
        ValueError: if there are no observers, no probe data or data that are no batches, no checkpoints, or two with
            one step; a revision has no number; the file at `path` has other statistics; or no checkpoint could be
            measured.

    Example:
        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertModel
        >>> from hf_attn_dynamics import HeadEntropy
        >>> folder = tempfile.mkdtemp()
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> for step in (10, 20):
        ...     BertModel(config).save_pretrained(f"{folder}/checkpoint-{step}")
        >>> probe = [{"input_ids": torch.tensor([[5, 7, 8]])}]
        >>> list(checkpoint_timeline(folder, [HeadEntropy()], probe, progress=False).of("entropy"))
        [10, 20]
    """
    observers, batches = tuple(observers), probe_batches(probe_data)
    check_observers(observers, "checkpoint_timeline(folder, [HeadConfidence()], probe_data)")
    steps = _steps_of(Path(model) if revisions is None else None, revisions)
    loader = getattr(transformers, auto_class) if isinstance(auto_class, str) else auto_class
    timeline = HeadTimeline.load(path) if path is not None and Path(path).is_file() else HeadTimeline()
    shapes = _shapes(next(iter(timeline.measurements.values()))) if timeline.measurements else None
    # Statistics are named OBSERVER or OBSERVER/NAME.
    known, wanted = {name.partition("/")[0] for name in shapes or ()}, {observer.name for observer in observers}
    if shapes and known != wanted:
        raise ValueError(
            f"{path} has statistics of {', '.join(sorted(known))}, but the observers are {', '.join(sorted(wanted))}; "
            "name another file."
        )
    failures = {}
    for step, name in tqdm(steps.items(), desc="checkpoints", disable=not progress):
        if step in timeline.measurements:
            continue
        place = {"revision": name} if revisions is not None else {}
        source = model if revisions is not None else Path(model) / name
        try:
            measured = _measure(loader, source, observers, batches, tokenizer, {**place, **loading})
            shapes = shapes or _shapes(measured)
            if _shapes(measured) != shapes:
                raise ValueError("it has other numbers of layers or heads than the first one")
        except (OSError, RuntimeError, ValueError, KeyError, AttributeError) as error:
            reason = next(iter(str(error).strip().splitlines()), "no reason given")
            failures[name] = f"{type(error).__name__}: {reason}"
            logger.warning(f"{name} is left out of the timeline: {failures[name]}")
            continue
        for statistic, scores in measured.items():
            timeline.record(step, statistic, scores)
        if path is not None:
            timeline.save(path)
    if not timeline.measurements:
        reasons = "; ".join(f"{name}: {why}" for name, why in failures.items())
        raise ValueError(f"none of the {len(steps)} checkpoints of {model} could be measured: {reasons}.")
    return timeline


def _steps_of(folder: Path | None, revisions: Iterable[str] | Mapping[str, int] | None) -> dict[int, str]:
    """Names of checkpoints by step, in ascending order."""
    if folder is not None:
        names = [one.name for one in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", one.name)]
        if not names:
            raise ValueError(f"{folder} has no folders checkpoint-N; name the folder of a run, or pass revisions.")
    else:
        names = list(revisions or ())
        if not names:
            raise ValueError("revisions are empty: pass at least one.")
    steps: dict[int, str] = {}
    for name in names:
        number = revisions[name] if isinstance(revisions, Mapping) else _first_number(name)
        if number in steps:
            raise ValueError(f"{steps[number]} and {name} both have the step {number}; pass {{revision: step}}.")
        steps[number] = name
    return dict(sorted(steps.items()))


def _first_number(name: str) -> int:
    found = re.search(r"step[_-]?(\d+)", name) or re.search(r"(\d+)", name)
    if found is None:
        raise ValueError(f"revision {name!r} has no number, which would be its step; pass {{revision: step}}.")
    return int(found[1])


def _measure(
    loader: Any,
    source: str | Path,
    observers: Iterable[Observer],
    batches: list[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    loading: Mapping[str, Any],
) -> dict[str, HeadScores]:
    """Scores of one checkpoint, whose memory is free afterwards."""
    model: PreTrainedModel | None = loader.from_pretrained(source, **loading)
    try:
        return measured_scores(model, observers, batches, tokenizer)
    finally:
        model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _shapes(measured: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Numbers of layers and heads, by statistic and kind of site."""
    return {
        statistic: {kind: tuple(table.shape) for kind, table in scores.items()}
        for statistic, scores in measured.items()
        if isinstance(scores, HeadScores)
    }
