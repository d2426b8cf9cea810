# Licensed under the Apache License, Version 2.0.
"""Everything about the heads of a model in one pass: [`read_heads`] returns a [`HeadReading`]."""

import itertools
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..models.head_roles import locate_heads
from ..models.token_mask import labels_of_tokens
from .head_scores import BestHead, HeadScores
from .heads.importance import head_importance
from .observers.base import Observer
from .observers.confidence import HeadConfidence, HeadEntropy
from .observers.distances import HeadDistance, HeadDistances
from .observers.observation import observe
from .observers.positions import RelativeAttention, RelativePositions
from .observers.roles import RoleScores, role_overlap, top_heads
from .observers.syntactic_roles import SyntacticRoles
from .observers.token_roles import DuplicateTokens, RareWords
from .page import AttentionExample
from .reading_page import FUNCTIONS, ROLES, Head, drawings, examples_of, overview, page_of
from .relevance.heads import head_relevance
from .results import Result
from .running import on_device
from .sentences import Sentences


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is measured, and the class of its result.
RESULTS = {
    "confidence": HeadScores,
    "entropy": HeadScores,
    "distance": HeadDistances,
    "relative_positions": RelativeAttention,
    "syntactic_roles": RoleScores,
    "rare_words": RoleScores,
    "duplicate_tokens": RoleScores,
    "importance": HeadScores,
    "relevance": HeadScores,
}
ROLE_OF_FUNCTION = {"rare words": "rarest", "duplicate tokens": "duplicate"}  # syntactic heads may play any role
NOT_ASKED_FOR = "not asked for."


def read_heads(
    model: PreTrainedModel,
    sentences: Iterable[Any] | Sentences,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    relations: Sequence[str] | None = None,
    token_counts: Any = None,
    frequent: int = 500,
    importance_sentences: int = 0,
    relevance_sentences: int = 0,
    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> "HeadReading":
    """Measures how sure the heads of a model are, where they look, and what they do, in one pass over some sentences.

    Confidence, entropy, distances between heads and relative positions are always measured; duplicate tokens with a
    tokenizer; rare words if enough different tokens occur; syntactic roles if there are parsed sentences. What is not
    measured is named in `not_measured` of the result, with the reason. Up to 200 short sentences are read once more,
    one by one, for examples of what heads attend to. The model runs in evaluation mode and stays as it is; of
    encoder–decoder models, the encoder is read.

    Args:
        model (`PreTrainedModel`): Any model that [`observe`] takes, also one that is pruned.
        sentences (iterable): Texts, pairs of texts that are read as one, parsed sentences (`load_conllu`), or lists of
            token ids. Those with more tokens than the model takes are counted and left out, never cut.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer; by default the one of the checkpoint that the
            model was loaded from.
        relations (`list[str]`, *optional*): Dependency relations for syntactic roles; by default those of
            [`SyntacticRoles`].
        token_counts (array of shape `(vocab_size,)`, *optional*): Frequencies of tokens, for rare words; by default
            those in the sentences.
        frequent (`int`): Number of tokens that are called frequent, for rare words.
        importance_sentences (`int`): Sentences for [`head_importance`], from the first; 0: not measured.
        relevance_sentences (`int`): Sentences for [`head_relevance`], from the first; 0: not measured.
        collator (callable, *optional*): Makes a batch with labels of examples with `input_ids`, for importance; masked
            language models need `MaskedLanguageModelCollator(tokenizer)`, causal ones none.
        batch_size (`int`): Sentences of a batch.
        progress (`bool`): Whether to show progress bars.

    Returns:
        [`HeadReading`]

    Raises:
        ValueError: if no sentence fits, the model cannot be observed or has no head left that computes attention, no
            parsed sentence has the relations that are named, texts are given and there is no tokenizer, or a number of
            sentences is negative.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        ...     sep_token_id=3,
        ... )
        >>> reading = read_heads(BertModel(config), [[2, 5, 7, 5, 3], [2, 9, 8, 3]])
        >>> reading["confidence"]["encoder"].shape, reading.functions()["syntactic"] is None
        (torch.Size([2, 4]), True)
    """
    for name, count in (("importance", importance_sentences), ("relevance", relevance_sentences)):
        if count < 0:
            raise ValueError(f"{name}_sentences must be at least 0, got {count}.")
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    check_readable(model)
    if not isinstance(sentences, Sentences):
        sentences = Sentences(sentences, model, tokenizer)
    not_measured: dict[str, str] = {}
    observers = _observers(sentences, relations, token_counts, frequent, not_measured)
    batches = list(sentences.batches(batch_size))
    start = time.perf_counter()
    results = _observe(model, observers, batches, not_measured, progress)
    seconds = time.perf_counter() - start
    slower = {
        "importance": (
            importance_sentences,
            lambda n: head_importance(
                model, _labelled(model, sentences, batch_size, n, collator), normalize="l2", progress=progress
            ),
        ),
        "relevance": (
            relevance_sentences,
            lambda n: head_relevance(model, sentences.batches(batch_size, n), rule="alpha_beta", progress=progress),
        ),
    }
    for name, (count, scores_of) in slower.items():
        try:
            if not count:
                raise ValueError(NOT_ASKED_FOR)
            results[name] = scores_of(count)
        except (ValueError, torch.OutOfMemoryError) as error:
            not_measured[name] = str(error)
    reading = HeadReading(
        model=getattr(model.config, "name_or_path", "") or type(model).__name__,
        results=results,
        not_measured=not_measured,
        sentences=len(sentences.ids),
        tokens=sentences.num_tokens,
        too_long=sentences.too_long,
        sentences_with_trees=len(sentences.trees),
        seconds=seconds,
        device=torch.cuda.get_device_name() if model.device.type == "cuda" else model.device.type,
        versions={
            "python_version": platform.python_version(),
            "hf_attn_dynamics_version": __version__,
            **{f"{name}_version": version(name) for name in ("transformers", "torch")},
        },
    )
    return replace(reading, examples=examples_of(reading, model, sentences))


def check_readable(model: PreTrainedModel) -> None:
    """Checks that a model has attention that can be observed.

    Raises:
        ValueError: if it has none.
    """
    with observe(model, HeadEntropy()):
        pass
    if not any(layer.heads and getattr(layer.module, "hard_coded", None) is None for layer in locate_heads(model)):
        raise ValueError(f"the {type(model).__name__} has no head left that computes attention; name another model.")


@dataclass(frozen=True, eq=False, repr=False)
class HeadReading(Result):
    """What [`read_heads`] has measured, by name: `reading["confidence"]["encoder"][layer, head]`.

    Args:
        model (`str`): Name of the model.
        results (`dict`): [`HeadScores`] `confidence` and `entropy`, and as far as asked for `importance` and
            `relevance`; [`HeadDistances`] `distance`; [`RelativeAttention`] `relative_positions`; [`RoleScores`]
            `syntactic_roles`, `rare_words` and `duplicate_tokens`.
        not_measured (`dict[str, str]`): What of these is missing, and why.
        sentences, tokens (`int`): What was read.
        too_long (`int`): Sentences that were left out.
        sentences_with_trees (`int`): Parsed sentences among those that were read.
        seconds (`float`): Duration of the pass.
        device (`str`): Where the model was.
        versions (`dict[str, str]`): Of Python and libraries.
        examples (`dict`): For heads that are worth knowing (site, layer, head) attention in one or two sentences.
    """

    model: str
    results: dict[str, Any]
    not_measured: dict[str, str]
    sentences: int
    tokens: int
    too_long: int
    sentences_with_trees: int
    seconds: float
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    examples: dict[Head, list[AttentionExample]] = field(default_factory=dict)

    def __repr__(self) -> str:
        # Not the numbers themselves, which fill pages.
        return (
            f"HeadReading(model={self.model!r}, sentences={self.sentences}, tokens={self.tokens}, "
            f"results={list(self.results)}, not_measured={list(self.not_measured)})"
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self.results:
            if name in self.not_measured:
                raise KeyError(f"{name} was not measured: {self.not_measured[name]}")
            raise KeyError(f"there is no result {name!r}, but {', '.join(self.results)}.")
        return self.results[name]

    def functions(self) -> dict[str, list[tuple] | None]:
        """Heads with each function, as tuples that begin with site, layer and head; None if it was not measured.

        Positional heads put their largest weight at one offset for 90 % of the tokens or more. Heads with the other
        functions play a role 10 percentage points better than its baseline, see [`RoleScores`] (Voita et al. 2019).
        """
        players: dict[str, list[tuple] | None] = dict.fromkeys(FUNCTIONS)
        for function, (_, name) in FUNCTIONS.items():
            if name not in self.results:
                continue
            if function == "positional":
                heads = self[name].positional()
            else:
                roles = self[name].roles()
                own = ROLE_OF_FUNCTION.get(function)
                if own is not None and own not in roles:
                    continue
                heads = roles[own] if own is not None else itertools.chain(*roles.values())
            # A head that plays several roles is named once.
            players[function] = list({tuple(head[:3]): head for head in heads}.values())
        return players

    def roles(self) -> dict[str, dict[str, Any]]:
        """For each role its best head (site, layer, head, score), the baseline, and the number of cases."""
        found = {}
        for scores in (self.results[name] for name in ROLES if name in self.results):
            for role in scores.accuracy:
                best = scores.best(role)
                found[role] = {
                    **best._asdict(),
                    "baseline": scores.baselines[role][best.site],
                    "count": scores.counts[role][best.site],
                }
        return found

    def players(self) -> Iterator[tuple[str, str, list[BestHead]]]:
        """For each role: the result that it belongs to, its name, and the heads that play it."""
        for name in ROLES:
            if name in self.results:
                for role, heads in self[name].roles().items():
                    yield name, role, heads

    def functions_kept(self, kept: Mapping[str, Iterable[Head]] | None = None) -> dict[str, dict[str, int | None]]:
        """How many heads with each function are among fewer heads.

        Args:
            kept (`dict[str, list]`, *optional*): Heads that are kept, by name, as of pruned versions of the model.

        Returns:
            `dict[str, dict[str, int | None]]`: for all heads, the more important half, and each of `kept`, the number
            of `heads` and of those with each function; None for functions that were not measured.
        """
        ranked = top_heads(self["confidence"])
        some = {"all": [head[:3] for head in ranked]}
        if "importance" in self.results:
            some["more important half"] = [head[:3] for head in top_heads(self["importance"])[: len(ranked) // 2]]
        functions = self.functions()
        measured = {name: heads for name, heads in functions.items() if heads is not None}
        return {
            name: {"heads": len(heads), **dict.fromkeys(functions), **role_overlap(measured, heads)}
            for name, heads in {**some, **(kept or {})}.items()
        }

    def summary(self) -> dict[str, Any]:
        """The main numbers; None for what was not measured."""
        confidence, functions = self["confidence"], self.functions()
        counts = {
            key: {
                kind: None if functions[name] is None else sum(head[0] == kind for head in functions[name])
                for kind in confidence
            }
            for name, (key, _) in FUNCTIONS.items()
        }
        return {
            "model": self.model,
            "sentences": self.sentences,
            "tokens": self.tokens,
            "too_long": self.too_long,
            "sentences_with_trees": self.sentences_with_trees,
            "layers": {kind: table.shape[0] for kind, table in confidence.items()},
            "heads": {kind: int((~table.isnan()).sum()) for kind, table in confidence.items()},
            "mean_confidence": confidence.mean(),
            "mean_entropy": self["entropy"].mean(),
            **counts,
            "roles": self.roles(),
            "not_measured": self.not_measured,
            "seconds": self.seconds,
        }

    def tables(self) -> dict[str, HeadScores]:
        """All numbers that there are for each head, by name."""
        tables = {}
        for name, result in self.results.items():
            if isinstance(result, HeadScores):
                tables[name] = result
            else:
                for part, scores in result.head_scores().items():
                    tables[part if isinstance(result, RoleScores) else f"{name}_{part}"] = scores
        return tables

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head: site, layer, head, its functions, and all its numbers."""
        tables = self.tables()
        players = {name: {head[:3] for head in heads} for name, heads in self.functions().items() if heads is not None}
        rows = []
        for kind, table in self["confidence"].items():
            for layer, head in itertools.product(*map(range, table.shape)):
                own = [name for name, heads in players.items() if (kind, layer, head) in heads]
                values = {name: scores[kind][layer, head].item() for name, scores in tables.items() if kind in scores}
                rows.append({"site": kind, "layer": layer, "head": head, "functions": ", ".join(own), **values})
        return rows

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        return ["site", "layer", "head", "functions", *self.tables()]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`; None where a kind of site has no such number."""
        for row in self.rows():
            yield tuple(map(row.get, self.columns))

    def plot(self, path: str | Path | None = None, what: str = "functions") -> "Figure":
        """Draws a picture, and saves it if there is a path.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            what (`str`): `functions`, `positions`, `distances`, or the name of a result.

        Returns:
            `matplotlib.figure.Figure`

        Raises:
            ValueError: if there is no such picture.
        """
        available = drawings(self)
        if what not in available:
            raise ValueError(f"what must be one of {', '.join(available)}, got {what!r}.")
        return available[what](path=path)

    def save_page(
        self,
        path: str | Path,
        kept: Mapping[str, Iterable[Head]] | None = None,
        facts: Mapping[str, Any] | None = None,
        pictures: str | Path | None = None,
    ) -> None:
        """Writes a page to read in a browser, with everything in the file.

        Args:
            path (`str` or `Path`): The file.
            kept (`dict[str, list]`, *optional*): As for `functions_kept`; the page then shows what is left.
            facts (`dict[str, Any]`, *optional*): More to say about how the page was made.
            pictures (`str` or `Path`, *optional*): A folder that the pictures are written to as well.
        """
        page_of(self, kept, facts, pictures).save(path)

    def _repr_html_(self) -> str:
        """The picture of functions, and what was measured, for notebooks."""
        return overview(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything in a form that JSON can hold."""
        return {
            **vars(self),
            "results": {name: result.to_dict() for name, result in self.results.items()},
            "examples": [[*head, [[*map(list, one[:3]), one.caption] for one in some]]
                         for head, some in self.examples.items()],
        }  # fmt: skip

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "HeadReading":
        results = {name: RESULTS[name].from_dict(result) for name, result in values["results"].items()}
        examples = {
            (site, layer, head): [AttentionExample(*one) for one in some]
            for site, layer, head, some in values["examples"]
        }
        return cls(**{**values, "results": results, "examples": examples})


def _observers(
    sentences: Sentences,
    relations: Sequence[str] | None,
    token_counts: Any,
    frequent: int,
    not_measured: dict[str, str],
) -> dict[str, Observer]:
    """All observers that have something to see, by name."""
    tokenizer = sentences.tokenizer
    special = ends = None
    if tokenizer is not None:
        special = tokenizer.all_special_ids
        ends = sorted({token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None})

    def known_special() -> list[int]:
        if special is None:
            raise ValueError("there is no tokenizer to tell which tokens are special.")
        return special

    def syntactic_roles() -> SyntacticRoles:
        if not sentences.trees:
            raise ValueError("these sentences have no trees; .conllu files do.")
        return SyntacticRoles(sentences.trees, tokenizer, **({"relations": relations} if relations else {}))

    def rare_words() -> RareWords:
        counts = sentences.counts if token_counts is None else token_counts
        return RareWords(counts, known_special(), frequent)

    makers: dict[str, Callable[[], Observer]] = {
        "confidence": lambda: HeadConfidence(ends),
        "entropy": HeadEntropy,
        "distance": HeadDistance,
        "relative_positions": lambda: RelativePositions(excluded_ids=ends),
        "syntactic_roles": syntactic_roles,
        "rare_words": rare_words,
        "duplicate_tokens": lambda: DuplicateTokens(known_special()),
    }
    observers = {}
    for name, make in makers.items():
        try:
            observers[name] = make()
        except ValueError as error:
            if name == "syntactic_roles" and relations:
                raise  # they were asked for
            not_measured[name] = str(error)
    return observers


def _observe(
    model: PreTrainedModel,
    observers: dict[str, Observer],
    batches: list[dict[str, torch.Tensor]],
    not_measured: dict[str, str],
    progress: bool,
) -> dict[str, Any]:
    """Results of the observers by name."""
    with torch.no_grad(), observe(model, *observers.values()) as seen:
        for batch in tqdm(batches, desc="heads", disable=not progress):
            model(**on_device(batch, model))
    results = {}
    for name in observers:
        try:
            results[name] = _with_cases(getattr(seen, name))
        except ValueError as error:
            not_measured[name] = str(error)
    return results


def _with_cases(result: Any) -> Any:
    """A result without the roles that never had a case."""
    if isinstance(result, RoleScores):
        roles = [role for role, counts in result.counts.items() if any(counts.values())]
        if not roles:
            raise ValueError("there is no case in these sentences.")
        by_role = ("accuracy", "baselines", "counts")
        result = replace(result, **{name: {role: getattr(result, name)[role] for role in roles} for name in by_role})
    return result


def _labelled(
    model: PreTrainedModel, sentences: Sentences, batch_size: int, limit: int, collator: Callable | None
) -> Iterable[dict[str, torch.Tensor]]:
    """Batches of the first sentences with labels, for importance."""
    if collator is not None:
        return (collator([{"input_ids": ids} for ids in some]) for some in sentences.lists(batch_size, limit))
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        batches = sentences.batches(batch_size, limit)
        return ({**one, "labels": labels_of_tokens(one["input_ids"], one["attention_mask"])} for one in batches)
    if name.endswith("ForMaskedLM"):
        raise ValueError("a masked language model needs collator=MaskedLanguageModelCollator(tokenizer).")
    raise ValueError(f"needs a masked or causal language model, not {name}.")
