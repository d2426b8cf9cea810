# Licensed under the Apache License, Version 2.0.
"""What a [`HeadReading`] shows: its pictures, the heads that are worth knowing, and a page to read."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .heads.maps import attention_maps
from .observers.roles import top_heads
from .page import AttentionExample, HtmlPage, drawn
from .sentences import Sentences


if TYPE_CHECKING:
    from .reading import HeadReading

Head = tuple[str, int, int]  # site, layer and head
ROLES = ("syntactic_roles", "rare_words", "duplicate_tokens")
# Functions of heads: the name of their number in a summary, and the result that they come from.
FUNCTIONS = {
    "positional": ("positional_heads", "relative_positions"),
    "syntactic": ("syntactic_heads", "syntactic_roles"),
    "rare words": ("rare_word_heads", "rare_words"),
    "duplicate tokens": ("duplicate_token_heads", "duplicate_tokens"),
}


DEFINITIONS = {
    "confidence": "mean over tokens of the largest attention weight, from 0 to 1; the end of sentence does not count "
    "as a target",
    "entropy": "mean over tokens of the entropy of their attention weights, in nats; 0 where all attention is on one",
    "positional": "the largest weight is at the same offset for 90 % of the tokens or more",
    "syntactic": "of the dependencies of a relation, the head finds 10 percentage points more than the best fixed "
    "offset does; attention to a word is the sum over its tokens, from a word the mean; special tokens do not compete",
    "rare words": "the largest weight, special tokens apart, is on the rarest token of the sentence, in 10 percentage "
    "points more cases than by chance",
    "duplicate tokens": "the largest weight, special tokens and itself apart, is on another occurrence of the token, "
    "in 10 percentage points more cases than by chance",
    "distance": "mean Jensen–Shannon divergence between the attention of two heads, in nats",
    "importance": "mean over tokens of |⟨output of the head, gradient of the loss by it⟩| for masked tokens, or with "
    "a causal model for all next ones, divided by the norm over the layer (Michel et al. 2019)",
    "relevance": "fraction of the top-1 logit that layer-wise relevance propagation gives the head, of the heads of "
    "its layer (Voita et al. 2019)",
}
WORTH_KNOWING = 10
CAPTION_OF_FUNCTIONS = "Functions of each head; several share a cell. Crosses: removed heads."
NOT_MEASURED = "not measured"


class Finding(NamedTuple):
    """Why a head is worth knowing, and the syntactic role that it plays, if that is why."""

    reason: str
    role: str | None = None


def worth_knowing(reading: "HeadReading") -> dict[Head, Finding]:
    """Ten heads and why: of each role and measure in turn, the best head that is not there yet."""
    results = reading.results
    positional = sorted(reading.functions()["positional"], key=lambda head: -head.share)
    rankings = [
        [(head[:3], Finding(f"{head.share:.0%} of its tokens look at offset {head.offset:+d}")) for head in positional]
    ]
    for name, role, heads in reading.players():
        baseline, syntactic = results[name].baselines[role], role if name == "syntactic_roles" else None
        text = f"{role}: right in {{:.0%}}, where not looking gives {{:.0%}}"
        rankings.append(
            [(head[:3], Finding(text.format(head.score, baseline[head.site]), syntactic)) for head in heads]
        )
    for name, text in (
        ("importance", "importance {:.2f}"),
        ("relevance", "relevance {:.2f} of its layer"),
        ("confidence", "confidence {:.2f}"),
    ):
        if name in results:
            rankings.append([(head[:3], Finding(text.format(head.score))) for head in top_heads(results[name])])
    chosen: dict[Head, Finding] = {}
    queues = [iter(ranking) for ranking in rankings]
    while queues and len(chosen) < WORTH_KNOWING:
        for queue in queues.copy():
            head, finding = next((one for one in queue if one[0] not in chosen), (None, None))
            if head is None:
                queues.remove(queue)
            elif len(chosen) < WORTH_KNOWING:
                chosen[head] = finding
    return chosen


class Example(NamedTuple):
    """A sentence to draw attention in: its tokens, the word of each, and its tree if it has one."""

    ids: list[int]
    words: list[int | None]
    tree: Any = None


def examples_of(
    reading: "HeadReading", model: PreTrainedModel, sentences: Sentences
) -> dict[Head, list[AttentionExample]]:
    """For each head worth knowing two short sentences: those of the first 200 in which it is surest.

    A head that is worth knowing for a role is surest where it plays it.
    """
    findings = worth_knowing(reading)
    numbers = [number for number, ids in enumerate(sentences.ids) if 8 <= len(ids) <= 16][:200]
    numbers = numbers or [min(range(len(sentences.ids)), key=lambda number: len(sentences.ids[number]))]
    found: dict[Head, list[tuple[float, AttentionExample]]] = {head: [] for head in findings}
    special = set() if sentences.tokenizer is None else set(sentences.tokenizer.all_special_ids)
    for sentence in (_example(sentences, number) for number in numbers):
        maps = attention_maps(model, {"input_ids": torch.tensor([sentence.ids], device=model.device)})
        words = [_written(token, sentences) for token in sentence.ids]
        ordinary = [place for place, token in enumerate(sentence.ids) if token not in special]
        for (kind, layer, head), finding in findings.items():
            weights = maps[kind][layer, 0, head].cpu()
            sureness = weights[ordinary][:, ordinary].amax(-1).mean().item() if ordinary else 0.0
            if finding.role is not None:
                sureness = _weight_of_role(finding.role, weights, sentence)
            example = AttentionExample(words, words, weights.tolist(), "")
            found[kind, layer, head].append((sureness, example))
    return {head: [one for _, one in sorted(some, key=lambda pair: -pair[0])[:2]] for head, some in found.items()}


def _example(sentences: Sentences, number: int) -> Example:
    item = sentences.items[number]
    if not hasattr(item, "relations"):
        return Example(sentences.ids[number], [])
    # Reading data takes libraries that not everyone has who passes tokens.
    from ..data.words import encode_words

    return Example(*encode_words(item, sentences.tokenizer), item)


def _written(token: int, sentences: Sentences) -> str:
    tokenizer = sentences.tokenizer
    if tokenizer is None:
        return str(token)
    return tokenizer.decode([token]).strip() or tokenizer.convert_ids_to_tokens(token)


def _weight_of_role(role: str, weights: torch.Tensor, sentence: Example) -> float:
    """Mean attention along the dependencies of a relation in a sentence, times the square root of their number."""
    relation, _, direction = role.partition(" ")
    along = []
    tree = sentence.tree
    for dependent, head in enumerate(tree.heads if tree else ()):
        if tree.relations[dependent] == relation and head is not None:
            ends = [[place for place, word in enumerate(sentence.words) if word == one] for one in (dependent, head)]
            queries, keys = ends if direction == "to head" else ends[::-1]
            if queries and keys:
                along.append(weights[queries][:, keys].sum(-1).mean().item())
    return sum(along) / len(along) ** 0.5 if along else 0.0


def drawings(reading: "HeadReading", kept: Mapping[str, Iterable[Head]] | None = None) -> dict[str, Callable]:
    """What draws each picture, by name: a function of the path, if it is to be saved, that returns the figure."""
    # Not above: who reads heads need not draw them.
    from .plots.base import plot_head_maps
    from .plots.heads import (
        plot_functions_kept,
        plot_head_distances,
        plot_head_functions,
        plot_relative_attention,
        plot_roles,
    )

    results = reading.results
    pictures = {"functions": partial(plot_head_functions, reading.functions(), results["confidence"])}
    for name in ("confidence", "entropy", "importance", "relevance"):
        if name in results:
            tables = results[name]
            highest = 1.0 if name == "confidence" else max(t.nan_to_num(0).max().item() for t in tables.values())
            pictures[name] = partial(plot_head_maps, {name: dict(tables)}, name, limits=(0, highest))
    for name in ROLES:
        if name in results:
            pictures[name] = partial(plot_roles, results[name])
    if len(counts := reading.functions_kept(kept)) > 1:
        pictures["kept"] = partial(plot_functions_kept, counts)
    attention = results["relative_positions"]
    heads = top_heads(attention.best_offset_share())[:8]
    if heads:
        pictures["positions"] = partial(plot_relative_attention, attention, heads, window=min(6, attention.limit))
    if all(len(heads) > 1 for heads in results["distance"].heads.values()):
        pictures["distances"] = partial(plot_head_distances, results["distance"])
    return pictures


def overview(reading: "HeadReading") -> str:
    """What was measured, and the picture of functions, as a part of a page."""
    page = HtmlPage(f"Attention heads of {reading.model}")
    _what_was_measured(page, reading)
    page.picture(reading.plot(), CAPTION_OF_FUNCTIONS)
    return page.body()


def page_of(
    reading: "HeadReading",
    kept: Mapping[str, Iterable[Head]] | None = None,
    facts: Mapping[str, Any] | None = None,
    pictures: str | Path | None = None,
) -> HtmlPage:
    """The page: what was measured on what, maps, roles, heads worth knowing with examples, definitions."""
    figures = drawn(drawings(reading, kept), pictures)
    page = HtmlPage(f"Attention heads of {reading.model}")
    page.heading("What was measured")
    _what_was_measured(page, reading)
    page.heading("What heads do")
    page.picture(figures["functions"], CAPTION_OF_FUNCTIONS)
    if "kept" in figures:
        page.subheading("What is left of them")
        page.table(*kept_table(reading.functions_kept(kept)))
        page.picture(figures["kept"], "Fractions of the heads of each function that are among fewer heads.")
    page.heading("How sure they are")
    page.picture(figures["confidence"], "Confidence: mean of the largest weight.")
    page.picture(figures["entropy"], "Entropy of attention, in nats.")
    if "positions" in figures:
        page.heading("Where they look")
        page.picture(figures["positions"], "The eight most positional heads, layer.head: mean attention by offset.")
    page.heading("Roles")
    if roles := reading.roles():
        page.table(*role_table(roles))
    for name, caption in (
        ("syntactic_roles", "Dependencies that each head finds; baseline: the best fixed offset."),
        ("rare_words", "The rarest tokens of a sentence; baseline: chance."),
        ("duplicate_tokens", "Other occurrences of the token that attends; baseline: chance."),
    ):
        _picture_or_reason(page, reading, figures, name, caption)
    page.heading("Which ones matter")
    for name in ("importance", "relevance"):
        _picture_or_reason(page, reading, figures, name, f"{name.capitalize()}: {DEFINITIONS[name]}.")
    if "distances" in figures:
        page.heading("Which ones are alike")
        page.picture(figures["distances"], "Heads that attend alike are near each other; layer.head.")
    findings = worth_knowing(reading)
    page.heading(f"{len(findings)} heads worth knowing")
    page.paragraph(
        "Of each role and measure in turn, the best head that is not named yet. Examples are the sentences in which "
        "it is surest, of its role if it has one; lines go from a token to what it attends to."
    )
    several_sites = len(reading["confidence"]) > 1
    for (kind, layer, head), finding in findings.items():
        page.subheading(f"Layer {layer}, head {head}{f' of the {kind}' if several_sites else ''}")
        page.paragraph(f"{finding.reason[0].upper()}{finding.reason[1:]}.")
        page.attentions(reading.examples.get((kind, layer, head), []))
    page.end(DEFINITIONS, {**reading.versions, **(facts or {})})
    return page


def _what_was_measured(page: HtmlPage, reading: "HeadReading") -> None:
    """Adds what was read, and the number of heads with each function."""
    summary = reading.summary()
    trees = f", {reading.sentences_with_trees:,} of them with trees" if reading.sentences_with_trees else ""
    page.paragraph(
        f"{reading.sentences:,} sentences of {reading.tokens:,} tokens{trees}; {reading.too_long:,} more "
        f"were too long for the model and left out. One pass, {reading.seconds:.1f} seconds on {reading.device}."
    )
    page.paragraph("Number of heads with each function:")
    rows = []
    for kind, layers in summary["layers"].items():
        counts = [summary[key][kind] for key, _ in FUNCTIONS.values()]
        rows.append([kind, layers, summary["heads"][kind], *(NOT_MEASURED if n is None else n for n in counts)])
    page.table(["site", "layers", "heads", *FUNCTIONS], rows)
    if reading.not_measured:
        page.paragraph("Not measured:")
        page.table(["what", "why"], [[name.replace("_", " "), why] for name, why in reading.not_measured.items()])


def _picture_or_reason(
    page: HtmlPage, reading: "HeadReading", figures: dict[str, Any], name: str, caption: str
) -> None:
    if name in figures:
        page.picture(figures[name], caption)
    else:
        readable = name.replace("_", " ")
        page.paragraph(f"{readable.capitalize()}: {NOT_MEASURED}; {reading.not_measured.get(name, '')}")


def role_table(roles: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list]]:
    """Header and rows: the best head of each role."""
    several = len({one["site"] for one in roles.values()}) > 1
    rows = [
        [
            role,
            f"{one['site']} {one['layer']}.{one['head']}" if several else f"{one['layer']}.{one['head']}",
            one["score"],
            one["baseline"],
            one["count"],
        ]
        for role, one in roles.items()
    ]
    return ["role", "best head", "right", "baseline", "cases"], rows


def kept_table(kept: Mapping[str, Mapping[str, int | None]]) -> tuple[list[str], list[list]]:
    """Header and rows: heads of each function that are among fewer heads."""
    return ["of", *next(iter(kept.values()))], [[name, *counts.values()] for name, counts in kept.items()]
