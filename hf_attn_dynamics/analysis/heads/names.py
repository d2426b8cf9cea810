# Licensed under the Apache License, Version 2.0.
"""What each head of a checkpoint is known as: [`name_heads`] runs observers on built-in probes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...models.head_roles import locate_heads
from ...models.number_checks import is_finite
from ..head_scores import BestHead, Head, HeadScores
from ..notebook import html_table
from ..observers.base import AttentionCall, Observer
from ..observers.excluded_tokens import SpecialTokens
from ..observers.observation import observe
from ..observers.roles import RoleScores
from ..observers.sinks import AttentionSink, SinkAttention
from ..observers.token_relations import (
    InductionScore,
    LocalAttention,
    PreviousToken,
    TargetAttention,
    TargetWeights,
)
from ..observers.token_roles import DuplicateTokens, RetrievalScore
from ..results import Result
from ..running import arguments_of, is_seq2seq, reader_of
from .copying import copying_scores
from .probes import ANSWER, Probes


if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 0.1  # by which the score of a head with a name exceeds chance
REPEATS, TEXTS, NEEDLES = "random tokens, repeated", "text", "needles in text"


class _Name(NamedTuple):
    """A name: its probe, the least score of heads that have it, and what the score is."""

    probe: str
    threshold: float
    meaning: str


NAMES = {
    "induction": _Name(
        REPEATS, 0.3, "mean attention to the token after the earlier occurrence of the same token (prefix matching)"
    ),
    "copying": _Name(
        REPEATS,
        0.9,
        "fraction of the vocabulary with a lower logit than the attended token, in the output of the head",
    ),
    "previous token": _Name(REPEATS, 0.4, "mean attention to the token before"),
    "duplicate tokens": _Name(
        REPEATS, 0.4, "fraction of the tokens whose largest weight is on another occurrence of the token"
    ),
    "retrieval": _Name(
        NEEDLES, 0.3, "fraction of the tokens of an answer whose largest weight is on the token to copy"
    ),
    "sink": _Name(TEXTS, 0.5, "mean attention to the first token"),
    "streaming": _Name(TEXTS, 0.9, "mean attention to the first four and the last sixteen tokens"),
    "delimiters": _Name(TEXTS, 0.5, "mean attention to special tokens"),
}
WINDOW, SINKS = 16, 4


@dataclass(frozen=True, eq=False)
class HeadNames(Result):
    """Scores of the heads for each name, see [`name_heads`].

    Args:
        scores (`dict[str, HeadScores]`): Scores by name, from 0 to 1.
        chance (`dict[str, dict[str, float]]`): What uniform attention, or chance, reaches, by name and kind of site.
        thresholds (`dict[str, float]`): The least score of heads that have the name.
        not_measured (`dict[str, str]`): Reason for each name that was not measured.
        model (`str`): Name of the model.
    """

    scores: dict[str, HeadScores]
    chance: dict[str, dict[str, float]]
    thresholds: dict[str, float]
    not_measured: dict[str, str]
    model: str = ""

    columns = ["site", "layer", "head", "name", "score", "chance", "named"]

    def heads(self, name: str) -> list[BestHead]:
        """The heads that have a name, the best first: their score reaches the threshold, and chance plus 0.1.

        Raises:
            ValueError: if the name was not measured.
        """
        if name not in self.scores:
            why = f": {self.not_measured[name]}" if name in self.not_measured else ""
            raise ValueError(f"name must be one of {', '.join(map(repr, self.scores))}, got {name!r}{why}.")
        return [head for head in self.scores[name].ranked() if self._reaches(name, head.site, head.score)]

    def names(self) -> dict[Head, list[str]]:
        """Names of each head that has one; a head may have several."""
        found: dict[Head, list[str]] = {}
        for name in self.scores:
            for head in self.heads(name):
                found.setdefault(tuple(head[:3]), []).append(name)
        return dict(sorted(found.items()))

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head, by name."""
        return dict(self.scores)

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for name, scores in self.scores.items():
            for site, layer, head, score in scores.records():
                yield site, layer, head, name, score, self.chance[name][site], self._reaches(name, site, score)

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws a cell per head, with a colour for each of its names.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): What the model is, if not its name.
        """
        from ..plots.heads import plot_head_functions

        functions = {name: self.heads(name) if name in self.scores else None for name in NAMES}
        return plot_head_functions(functions, next(iter(self.scores.values())), path, title or self.model)

    def save_page(self, path: str | Path) -> None:
        """Writes an HTML page with all scores, in one file that needs no network.

        Args:
            path (`str` or `Path`): The file.
        """
        from ..pages.names_page import names_page

        names_page(self).save(path)

    def _repr_html_(self) -> str:
        """The best head of each name, for notebooks."""
        rows = []
        for name, scores in self.scores.items():
            best = scores.best()
            named = f"{best.site} {best.layer}.{best.head}"
            rows.append([name, len(self.heads(name)), named, best.score, self.chance[name][best.site]])
        header = ["name", "heads", "best head (layer.head)", "score", "chance"]
        return html_table(header, rows, "What the heads are known as")

    def _reaches(self, name: str, site: str, score: float) -> bool:
        return score >= max(self.thresholds[name], self.chance[name][site] + MARGIN)


def name_heads(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    texts: Sequence[str] | None = None,
    *,
    thresholds: Mapping[str, float] | None = None,
    sequences: int = 16,
    length: int = 48,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> HeadNames:
    """What each head of a model is known as: induction, copying, previous-token, duplicate-token, retrieval, sink,
    streaming and delimiter heads.

    The model reads three probes: random tokens that are repeated once; text; and text with a needle, a code of random
    tokens that is asked for at the end. Each name has its own score, see [`InductionScore`], [`copying_scores`],
    [`PreviousToken`], [`DuplicateTokens`], [`RetrievalScore`], [`AttentionSink`] and [`LocalAttention`]; that of
    delimiters is the attention to special tokens. Without a tokenizer, only random tokens are read. Copying and
    retrieval are measured in causal language models only. Of an encoder–decoder model, only the encoder is measured.
    The model runs in evaluation mode and is not changed.

    Args:
        model (`PreTrainedModel`): Any model that [`observe`] accepts; a causal language model for all names.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the model.
        texts (`list[str]`, *optional*): Text to read with the tokenizer, also around the needles; by default some
            English sentences.
        thresholds (`dict[str, float]`, *optional*): The least score of heads that have a name, where it differs from
            the default.
        sequences (`int`): Number of random sequences, and of needles.
        length (`int`): Number of random tokens before they are repeated; fewer if the model reads fewer.
        batch_size (`int`): Sequences per batch.
        seed (`int`): Random seed of the probes.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadNames`]

    Raises:
        ValueError: if a threshold is given for an unknown name or is not from 0 to 1, `texts` are given without a
            tokenizer, a number is too small, the vocabulary or the model is too small for random sequences, or the
            model cannot be observed.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=64))
        >>> names = name_heads(model, sequences=2)
        >>> list(names.scores), names.not_measured["sink"]
        (['induction', 'copying', 'previous token', 'duplicate tokens'], 'text needs a tokenizer.')
    """
    unknown = [name for name in thresholds or () if name not in NAMES]
    if unknown:
        raise ValueError(f"thresholds name {unknown[0]!r}, which is not one of {', '.join(map(repr, NAMES))}.")
    for name, value in (thresholds or {}).items():
        if not is_finite(value) or not 0 <= value <= 1:
            raise ValueError(f"thresholds must be numbers from 0 to 1, got {value!r} for {name!r}.")
    if texts is not None and tokenizer is None:
        raise ValueError("texts are read with the tokenizer of the model; pass it, too.")
    for argument, value in (("sequences", sequences), ("length", length), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}.")
    probes = Probes(model, tokenizer, texts, sequences, length, batch_size, seed)
    found: dict[str, tuple[HeadScores, dict[str, float]]] = {}
    not_measured: dict[str, str] = {}
    measurements: tuple[Callable[[], dict], ...] = (
        partial(_of_repeats, model, probes),
        partial(_of_needles, model, probes),
        partial(_of_text, model, probes),
    )
    with tqdm(total=len(measurements), desc="probes", disable=not progress) as bar:
        for measure in measurements:
            for name, result in measure().items():
                if isinstance(result, str):
                    not_measured[name] = result
                elif all(table.isnan().all() for table in result[0].values()):
                    not_measured[name] = "no token of the probe counts."
                else:
                    found[name] = result
            bar.update()
    ordered = [name for name in NAMES if name in found]
    limits = {name: NAMES[name].threshold for name in ordered} | {
        name: float(value) for name, value in (thresholds or {}).items() if name in found
    }
    return HeadNames(
        {name: found[name][0] for name in ordered},
        {name: found[name][1] for name in ordered},
        limits,
        {name: not_measured[name] for name in NAMES if name in not_measured},
        getattr(model.config, "name_or_path", "") or type(model).__name__,
    )


def _seen(model: PreTrainedModel, probes: Probes, sequences: list[list[int]], *observers: Observer) -> dict[str, Any]:
    """Results of observers on some sequences."""
    reader = reader_of(model)
    with torch.no_grad(), observe(reader, *observers, tokenizer=probes.tokenizer) as seen:
        for batch in probes.batches(sequences):
            reader(**arguments_of(reader, batch))
    return seen.results()


def _of_repeats(model: PreTrainedModel, probes: Probes) -> dict[str, Any]:
    sequences = probes.repeats()
    results = _seen(model, probes, sequences, InductionScore([]), PreviousToken(), DuplicateTokens([]))
    found = {
        "induction": _scores_of(results["induction"]),
        "previous token": _scores_of(results["previous_token"]),
        "duplicate tokens": _scores_of(results["duplicate_tokens"]),
    }
    if not _is_causal(model):
        return {**found, "copying": "only causal language models are measured."}
    if model.get_output_embeddings() is None:
        return {**found, "copying": f"{type(model).__name__} has no language-modelling head."}
    try:
        copying = copying_scores(model, next(probes.batches(sequences)))
    except ValueError as error:
        return {**found, "copying": str(error)}
    return {**found, "copying": (copying, dict.fromkeys(copying, 0.5))}


def _of_needles(model: PreTrainedModel, probes: Probes) -> dict[str, Any]:
    if not _is_causal(model):
        return {"retrieval": "only causal language models are measured."}
    if probes.tokenizer is None:
        return {"retrieval": "text needs a tokenizer."}
    try:
        sequences = probes.needles()
    except ValueError as error:
        return {"retrieval": str(error)}
    return {"retrieval": _scores_of(_seen(model, probes, sequences, RetrievalScore(ANSWER))["retrieval"])}


def _of_text(model: PreTrainedModel, probes: Probes) -> dict[str, Any]:
    names = ("sink", "streaming", "delimiters")
    if probes.tokenizer is None:
        return dict.fromkeys(names, "text needs a tokenizer.")
    try:
        paragraphs = probes.paragraphs
    except ValueError as error:
        return dict.fromkeys(names, str(error))
    results = _seen(
        model, probes, paragraphs, AttentionSink(), LocalAttention(WINDOW, SINKS), _Delimiters("delimiters")
    )
    found = dict(zip(names, (_scores_of(results[name]) for name in ("sink", "local_attention", "delimiters"))))
    special = set(probes.tokenizer.all_special_ids)
    if not any(token in special for tokens in paragraphs for token in tokens):
        found["delimiters"] = "the texts have no special tokens."
    return found


class _Delimiters(TargetWeights):
    """Mean attention to the special tokens of the tokenizer, which all queries count for."""

    def __init__(self, name: str):
        super().__init__(name)
        self.special = SpecialTokens(None, type(self).__name__)

    def targets(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.special.among(call.key_ids)[:, None].expand_as(call.visible_keys)
        return targets, torch.ones_like(call.real_queries)


def _scores_of(result: Any) -> tuple[HeadScores, dict[str, float]]:
    """Scores of a result, and chance by kind of site."""
    if isinstance(result, TargetAttention):
        return result.attention, result.chance
    if isinstance(result, SinkAttention):
        return result.first, result.chance
    assert isinstance(result, RoleScores)
    [role] = result.accuracy
    return result.accuracy[role], result.baselines[role]


def _is_causal(model: PreTrainedModel) -> bool:
    """Whether the model is a causal language model, or its base."""
    return not is_seq2seq(model) and all(layer.site.kind == "decoder" for layer in locate_heads(reader_of(model)))
