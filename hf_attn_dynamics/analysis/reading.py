# Licensed under the Apache License, Version 2.0.
"""All measurements of the attention heads of a model in one pass: [`read_heads`] returns a [`HeadReading`]."""

import itertools
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..models.head_roles import locate_heads
from ..models.token_mask import labels_of_tokens
from .contribution_names import check_contributions
from .head_scores import Head, HeadScores
from .heads.importance import head_importance
from .observers.base import Observer
from .observers.confidence import HeadConfidence, HeadEntropy
from .observers.delimiters import DELIMITER_THRESHOLD, DelimiterAttention
from .observers.distances import HeadDistance, HeadDistances
from .observers.observation import observe
from .observers.positions import RelativeAttention, RelativePositions
from .observers.roles import RoleScores, role_overlap, top_heads
from .observers.syntactic_roles import SyntacticRoles
from .observers.token_roles import DuplicateTokens, RareWords
from .reading_examples import AttentionExample, find_examples
from .relevance.heads import head_relevance
from .results import Result, to_json
from .running import arguments_of, is_seq2seq, on_device, reader_of
from .sentence_maps import (
    Measures,
    SentenceMaps,
    chosen_sentences,
    collect_maps,
    contribution_weights,
    measured_weights,
    probe_settings,
)
from .sentences import Sentences


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Measurements, and the class of their results.
RESULTS = {
    "confidence": HeadScores,
    "entropy": HeadScores,
    "distance": HeadDistances,
    "relative_positions": RelativeAttention,
    "syntactic_roles": RoleScores,
    "rare_words": RoleScores,
    "duplicate_tokens": RoleScores,
    "delimiter_attention": HeadScores,
    "importance": HeadScores,
    "relevance": HeadScores,
}
ROLES = tuple(name for name, kind in RESULTS.items() if kind is RoleScores)
# Functions of heads: the key of their number in a summary, and the result that they are read from.
FUNCTIONS = {
    "positional": ("positional_heads", "relative_positions"),
    "syntactic": ("syntactic_heads", "syntactic_roles"),
    "rare words": ("rare_word_heads", "rare_words"),
    "duplicate tokens": ("duplicate_token_heads", "duplicate_tokens"),
    "delimiters": ("delimiter_heads", "delimiter_attention"),
}
ROLE_OF_FUNCTION = {"rare words": "rarest", "duplicate tokens": "duplicate"}  # syntactic heads may play any role
WORTH_KNOWING = 10  # heads with examples on the page
NOT_ASKED_FOR = "not requested."


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
    contributions: Sequence[str] = (),
    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> "HeadReading":
    """Measures the confidence, positions and functions of all attention heads in one pass over some sentences.

    Confidence, entropy, distances between heads and relative positions are always measured. Duplicate tokens need a
    tokenizer, rare words need enough different tokens, and syntactic roles need parsed sentences. `not_measured` of
    the result gives the reason for each missing measurement. The model also reads up to 220 short sentences one by
    one, to find examples of attention. It runs in evaluation mode and is not changed. Of an encoder–decoder model,
    only the encoder is measured.

    Args:
        model (`PreTrainedModel`): Any model that [`observe`] accepts, including pruned models.
        sentences (iterable): Texts, pairs of texts, parsed sentences (`load_conllu`), or lists of token ids. Sentences
            with more tokens than the model has positions for are counted and left out; none is truncated.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of the model; loaded from the model's checkpoint
            by default.
        relations (`list[str]`, *optional*): Dependency relations for syntactic roles; the defaults of
            [`SyntacticRoles`] if not given.
        token_counts (array of shape `(vocab_size,)`, *optional*): Token frequencies, for rare words; counted in the
            sentences by default.
        frequent (`int`): Number of tokens that count as frequent, for rare words.
        importance_sentences (`int`): Number of sentences for [`head_importance`]; 0 skips it.
        relevance_sentences (`int`): Number of sentences for [`head_relevance`]; 0 skips it.
        contributions (`list[str]`): Contributions to show beside attention in the example sentences of the page: some
            of `value_weighted`, `local` and `global`, see [`show_contributions`]. The page then has fewer sentences.
        collator (callable, *optional*): Data collator that adds labels to examples with `input_ids`, for importance.
            Masked language models need `MaskedLanguageModelCollator(tokenizer)`; causal models need none.
        batch_size (`int`): Sentences per batch.
        progress (`bool`): Whether to show progress bars.

    Returns:
        [`HeadReading`]

    Raises:
        ValueError: if no sentence fits, the model cannot be observed or no head computes attention, no parsed sentence
            has one of the `relations`, texts are given without a tokenizer, a number of sentences is negative, or
            `contributions` names something else.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> config.sep_token_id = 3
        >>> reading = read_heads(BertModel(config), [[2, 5, 7, 5, 3], [2, 9, 8, 3]])
        >>> reading["confidence"]["encoder"].shape, reading.functions()["syntactic"] is None
        (torch.Size([2, 4]), True)
    """
    for name, count in (("importance", importance_sentences), ("relevance", relevance_sentences)):
        if count < 0:
            raise ValueError(f"{name}_sentences must be at least 0, got {count}.")
    check_contributions(contributions)
    if is_seq2seq(model):
        model = model.get_encoder()
    check_readable(model)
    if not isinstance(sentences, Sentences):
        sentences = Sentences(sentences, model, tokenizer)
    not_measured: dict[str, str] = {}
    observers = _observers(sentences, relations, token_counts, frequent, not_measured)
    batches = list(sentences.batches(batch_size))
    start = time.perf_counter()
    # Without the logits, which may need more memory than all attention.
    reader = reader_of(model)
    with torch.no_grad(), observe(reader, *observers.values()) as seen:
        for batch in tqdm(batches, desc="heads", disable=not progress):
            reader(**arguments_of(reader, batch))
    results = _successful({name: partial(_with_cases, seen, name) for name in observers}, not_measured)
    seconds = time.perf_counter() - start

    def importance() -> HeadScores:
        if not importance_sentences:
            raise ValueError(NOT_ASKED_FOR)
        data = _labelled(model, sentences, batch_size, importance_sentences, collator)
        return head_importance(model, data, normalize="l2", progress=progress)

    def relevance() -> HeadScores:
        if not relevance_sentences:
            raise ValueError(NOT_ASKED_FOR)
        data = sentences.batches(batch_size, relevance_sentences)
        return head_relevance(model, data, rule="alpha_beta", progress=progress)

    results |= _successful({"importance": importance, "relevance": relevance}, not_measured)
    maps = collect_maps(model, sentences, _weights_with(model, sentences, contributions, not_measured))
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
    roles = {head: finding.role for head, finding in reading.worth_knowing().items()}
    return replace(reading, examples=find_examples(model, sentences, roles), sentence_maps=maps)


def _weights_with(
    model: PreTrainedModel, sentences: Sentences, contributions: Sequence[str], not_measured: dict[str, str]
) -> Callable[[list[int]], Measures]:
    """Returns a function for attention and contributions in a sentence; adds those that fail to `not_measured`."""

    def batch(ids: list[int]) -> dict[str, torch.Tensor]:
        return on_device(sentences.padded([ids]), model)

    settings = probe_settings(model) if "global" in contributions else {}
    # The longest sentence shows which contributions the model supports, and which fit into memory.
    chosen = [sentences.ids[number] for number in chosen_sentences(sentences)] or [min(sentences.ids, key=len)]
    longest = batch(max(chosen, key=len))
    attempts = {
        f"{name}_contribution": partial(contribution_weights, model, longest, name, **settings)
        for name in contributions
    }
    supported = _successful(attempts, not_measured)
    names = [name for name in contributions if f"{name}_contribution" in supported]
    return lambda ids: measured_weights(model, batch(ids), names, **settings)


def check_readable(model: PreTrainedModel) -> None:
    """Checks that a model has attention that can be observed.

    Raises:
        ValueError: if no head of the model computes attention.
    """
    with observe(model, HeadEntropy()):
        pass
    if not any(layer.heads and getattr(layer.module, "hard_coded", None) is None for layer in locate_heads(model)):
        raise ValueError(f"the {type(model).__name__} has no head left that computes attention; name another model.")


def _observers(
    sentences: Sentences,
    relations: Sequence[str] | None,
    token_counts: Any,
    frequent: int,
    not_measured: dict[str, str],
) -> dict[str, Observer]:
    """All observers that these sentences allow, by name."""
    tokenizer = sentences.tokenizer
    ends = special = None
    if tokenizer is not None:
        special = tokenizer.all_special_ids
        ends = sorted({token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None})

    def special_tokens() -> list[int]:
        if special is None:
            raise ValueError("there is no tokenizer to tell which tokens are special.")
        return special

    def syntactic_roles() -> SyntacticRoles:
        if not sentences.trees:
            raise ValueError("these sentences have no trees; .conllu files do.")
        return SyntacticRoles(sentences.trees, tokenizer, **({"relations": relations} if relations else {}))

    def rare_words() -> RareWords:
        counts = sentences.counts if token_counts is None else token_counts
        return RareWords(counts, special_tokens(), frequent)

    required = syntactic_roles() if relations else None  # an error if the user's relations do not occur
    makers: dict[str, Callable[[], Observer]] = {
        "confidence": lambda: HeadConfidence(ends),
        "entropy": HeadEntropy,
        "distance": HeadDistance,
        "relative_positions": lambda: RelativePositions(excluded_ids=ends),
        "syntactic_roles": lambda: required or syntactic_roles(),
        "rare_words": rare_words,
        "duplicate_tokens": lambda: DuplicateTokens(special_tokens()),
        "delimiter_attention": lambda: DelimiterAttention(special_tokens()),
    }
    return _successful(makers, not_measured)


def _successful(functions: Mapping[str, Callable[[], Any]], not_measured: dict[str, str]) -> dict[str, Any]:
    """Calls functions and returns their results by name; adds the error messages of the others to `not_measured`."""
    results = {}
    for name, function in functions.items():
        try:
            results[name] = function()
        except (ValueError, torch.OutOfMemoryError) as error:
            not_measured[name] = str(error)
    return results


def _with_cases(seen: Any, name: str) -> Any:
    """The result of an observer, without roles that had no case."""
    result = getattr(seen, name)
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
    """Batches of the first `limit` sentences with labels, for importance."""
    if collator is not None:
        return (collator([{"input_ids": ids} for ids in some]) for some in sentences.lists(batch_size, limit))
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        batches = sentences.batches(batch_size, limit)
        return ({**one, "labels": labels_of_tokens(one["input_ids"], one["attention_mask"])} for one in batches)
    if name.endswith("ForMaskedLM"):
        raise ValueError("a masked language model needs collator=MaskedLanguageModelCollator(tokenizer).")
    raise ValueError(f"needs a masked or causal language model, not {name}.")


class Finding(NamedTuple):
    """Why a head is worth knowing, and its syntactic role, if that is the reason."""

    reason: str
    role: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class HeadReading(Result):
    """Results of [`read_heads`] by name: `reading["confidence"]["encoder"][layer, head]`.

    Args:
        model (`str`): Name of the model.
        results (`dict`): [`HeadScores`] `confidence`, `entropy`, `delimiter_attention`, `importance` and `relevance`;
            [`HeadDistances`] `distance`; [`RelativeAttention`] `relative_positions`; [`RoleScores`] `syntactic_roles`,
            `rare_words` and `duplicate_tokens`.
        not_measured (`dict[str, str]`): The reason for each of these that is missing.
        sentences, tokens (`int`): Number of sentences and tokens that the model read.
        too_long (`int`): Number of sentences that were left out.
        sentences_with_trees (`int`): Number of parsed sentences among those that the model read.
        seconds (`float`): Duration of the pass.
        device (`str`): Device of the model.
        versions (`dict[str, str]`): Versions of Python and libraries.
        examples (`dict`): Attention of the heads of [`worth_knowing`] in one or two sentences each.
        sentence_maps (`list[SentenceMaps]`): Attention of all heads in some sentences, for the page; empty in files of
            earlier versions.
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
    sentence_maps: list[SentenceMaps] = field(default_factory=list)

    def __repr__(self) -> str:
        # Without the tensors, which fill pages.
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
        """Heads with each function, as tuples that begin with site, layer and head; `None` if it was not measured.

        A positional head has its largest weight at one offset for at least 90 % of the tokens. Heads for delimiters
        have at least half of their attention on special tokens, see [`DelimiterAttention`]. Heads with the other
        functions exceed the baseline of a role by 10 percentage points, see [`RoleScores`] (Voita et al. 2019).
        """
        players: dict[str, list[tuple] | None] = dict.fromkeys(FUNCTIONS)
        for function, (_, name) in FUNCTIONS.items():
            if name not in self.results:
                continue
            if function == "positional":
                heads = self[name].positional()
            elif function == "delimiters":
                heads = [head for head in top_heads(self[name]) if head.score >= DELIMITER_THRESHOLD]
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
        """The best head of each role (site, layer, head, score), the baseline, and the number of cases."""
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

    def worth_knowing(self) -> dict[Head, Finding]:
        """Ten heads, and why: from each role and each measurement in turn, the best head that is not yet chosen."""
        results = self.results
        positional = sorted(self.functions()["positional"], key=lambda head: -head.share)
        rankings = [
            [
                (head, Finding(f"largest weight at offset {head.offset:+d} for {head.share:.0%} of the tokens"))
                for head in positional
            ]
        ]
        for name in (name for name in ROLES if name in results):
            for role, heads in results[name].roles().items():
                baseline, syntactic = results[name].baselines[role], role if name == "syntactic_roles" else None
                text = f"{role}: accuracy {{:.0%}}, baseline {{:.0%}}"
                rankings.append(
                    [(head, Finding(text.format(head.score, baseline[head.site]), syntactic)) for head in heads]
                )
        for name, text in (
            ("importance", "importance {:.2f}"),
            ("relevance", "relevance {:.2f} in its layer"),
            ("confidence", "confidence {:.2f}"),
        ):
            if name in results:
                rankings.append([(head, Finding(text.format(head.score))) for head in top_heads(results[name])])
        chosen: dict[Head, Finding] = {}
        queues = [iter(ranking) for ranking in rankings]
        while queues and len(chosen) < WORTH_KNOWING:
            for queue in queues.copy():
                head, finding = next((one for one in queue if one[0][:3] not in chosen), (None, None))
                if head is None:
                    queues.remove(queue)
                elif len(chosen) < WORTH_KNOWING:
                    chosen[head[:3]] = finding
        return chosen

    def functions_kept(self, kept: Mapping[str, Iterable[Head]] | None = None) -> dict[str, dict[str, int | None]]:
        """Number of heads with each function among subsets of the heads.

        Args:
            kept (`dict[str, list]`, *optional*): Subsets by name, such as the heads of pruned versions of the model.

        Returns:
            `dict[str, dict[str, int | None]]`: for all heads, the more important half, and each of `kept`, the number
            of `heads` and of those with each function; `None` for functions that were not measured.
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
        """The main metrics; `None` for those that were not measured."""
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
        """All scores of the heads, by name."""
        tables = {}
        for name, result in self.results.items():
            if isinstance(result, HeadScores):
                tables[name] = result
            else:
                for part, scores in result.head_scores().items():
                    tables[part if isinstance(result, RoleScores) else f"{name}_{part}"] = scores
        return tables

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        return ["site", "layer", "head", "functions", *self.tables()]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, one per head, see `columns`; `None` where a kind of site has no such score."""
        tables = self.tables()
        players = {name: {head[:3] for head in heads} for name, heads in self.functions().items() if heads is not None}
        for kind, layer, head, _ in self["confidence"].records():
            own = [name for name, heads in players.items() if (kind, layer, head) in heads]
            values = (scores[kind][layer, head].item() if kind in scores else None for scores in tables.values())
            yield kind, layer, head, ", ".join(own), *values

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table as dictionaries."""
        return [dict(zip(self.columns, record)) for record in self.records()]

    def pictures(self) -> "dict[str, Callable[..., Figure]]":
        """`functions`, `positions`, `distances`, and the names of results; see [`Result`]."""
        from .pages.reading_page import reading_drawings

        return reading_drawings(self)

    def save_page(
        self,
        path: str | Path,
        kept: Mapping[str, Iterable[Head]] | None = None,
        facts: Mapping[str, Any] | None = None,
        pictures: str | Path | None = None,
        compare: "HeadReading | None" = None,
    ) -> None:
        """Writes an interactive HTML page with all results, in one file that needs no network.

        With `compare`, the page shows two models side by side: the functions of their heads, what moved, both values
        of each head, and both attention maps of the sentences that they split into the same tokens.

        Args:
            path (`str` or `Path`): The file.
            kept (`dict[str, list]`, *optional*): See `functions_kept`; the page then compares these subsets.
            facts (`dict[str, Any]`, *optional*): Additional rows for the page's section about how it was made.
            pictures (`str` or `Path`, *optional*): Folder to save the pictures to, in addition.
            compare ([`HeadReading`], *optional*): The reading of another version of the model: pruned, guided, or at
                another step of training. Models are named by `HeadReading.model`; `dataclasses.replace(reading,
                model="step 100")` renames one.

        Raises:
            ValueError: if the model of `compare` has other numbers of layers or heads.
        """
        from .pages.reading_page import reading_page

        reading_page(self, kept, facts, pictures, compare).save(path)

    def _repr_html_(self) -> str:
        """The numbers of heads with each function, and their picture, for notebooks."""
        from .pages.reading_page import overview

        return overview(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        examples = [[*head, some] for head, some in self.examples.items()]
        maps = [one._asdict() for one in self.sentence_maps]
        return to_json({**vars(self), "examples": examples, "sentence_maps": maps})

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "HeadReading":
        results = {name: RESULTS[name].from_dict(result) for name, result in values["results"].items()}
        examples = {
            (site, layer, head): [AttentionExample(*one) for one in some]
            for site, layer, head, some in values["examples"]
        }
        maps = [SentenceMaps.from_dict(one) for one in values.get("sentence_maps", [])]
        return cls(**{**values, "results": results, "examples": examples, "sentence_maps": maps})
