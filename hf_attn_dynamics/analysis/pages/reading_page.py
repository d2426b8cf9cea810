# Licensed under the Apache License, Version 2.0.
"""Pictures and HTML page of a [`HeadReading`]."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..head_scores import Head
from ..observers.roles import top_heads
from ..plots.base import plot_head_maps
from ..plots.heads import (
    plot_functions_kept,
    plot_head_distances,
    plot_head_functions,
    plot_relative_attention,
    plot_roles,
)
from ..reading import FUNCTIONS, ROLES, HeadReading
from .compared_explorer import add_compared_explorer, add_moved, functions_of_models
from .comparison import LETTERS, Comparison
from .head_explorer import add_explorer, add_head_table, verdict
from .html import HtmlPage, drawn


DEFINITIONS = {
    "confidence": "mean over tokens of the largest attention weight, from 0 to 1; the end-of-sentence token does not "
    "count as a target",
    "entropy": "mean over tokens of the entropy of their attention weights, in nats; 0 if all attention is on one "
    "token",
    "positional": "the largest weight is at the same offset for at least 90 % of the tokens",
    "syntactic": "the head finds the dependencies of a relation with an accuracy that exceeds the best fixed offset "
    "by 10 percentage points; attention to a word is the sum over its tokens, attention from a word the mean; "
    "special tokens do not compete",
    "rare words": "the largest weight, special tokens excluded, is on the rarest token of the sentence, with an "
    "accuracy that exceeds chance by 10 percentage points",
    "duplicate tokens": "the largest weight, special tokens and the token itself excluded, is on another occurrence "
    "of the token, with an accuracy that exceeds chance by 10 percentage points",
    "delimiters": "at least half of the attention, mean over all other tokens, is on special tokens such as [CLS] and "
    "[SEP]",
    "distance": "mean Jensen–Shannon divergence between the attention of two heads, in nats",
    "importance": "mean over tokens of |⟨output of the head, gradient of the loss with respect to it⟩|, for the "
    "language-modeling loss, divided by the norm over the layer (Michel et al. 2019)",
    "relevance": "relevance of the head for the top-1 logit by layer-wise relevance propagation, as a fraction of "
    "the heads of its layer (Voita et al. 2019)",
}
CAPTION_OF_FUNCTIONS = "Functions of each head; several share a cell. Crosses: removed heads."
NOT_MEASURED = "not measured"


def reading_drawings(reading: HeadReading, kept: Mapping[str, Iterable[Head]] | None = None) -> dict[str, Callable]:
    """Functions that draw the pictures, see [`Result`]."""
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
    title = f"{reading.model} on {reading.sentences:,} sentences"
    return {name: partial(draw, title=title) for name, draw in pictures.items()}


def overview(reading: HeadReading) -> str:
    """The numbers of heads with each function and their picture, to embed in another page."""
    page = HtmlPage(f"Attention heads of {reading.model}")
    _what_was_measured(page, {"": reading})
    page.picture(reading.plot(), CAPTION_OF_FUNCTIONS)
    return page.body()


def reading_page(
    reading: HeadReading,
    kept: Mapping[str, Iterable[Head]] | None = None,
    facts: Mapping[str, Any] | None = None,
    pictures: str | Path | None = None,
    compare: HeadReading | None = None,
) -> HtmlPage:
    """The page: definitions, sentences, functions, confidence, positions, roles, importance, distances, examples."""
    comparison = None if compare is None else Comparison(reading, compare)
    figures = drawn(reading_drawings(reading, kept), pictures)
    page = HtmlPage(f"Attention heads of {' and '.join(comparison.names) if comparison else reading.model}")
    page.definitions(DEFINITIONS)
    page.heading("What was measured")
    if comparison is None:
        _what_was_measured(page, {"": reading})
    else:
        page.paragraph("; ".join(f"{letter}: {name}" for letter, name in zip(LETTERS, comparison.names)))
        _what_was_measured(page, dict(zip(LETTERS, (reading, compare))))
    page.heading("Functions of heads")
    if comparison is None:
        add_explorer(page, reading)
    else:
        add_compared_explorer(page, comparison)
        page.heading("What moved")
        add_moved(page, comparison)
    page.heading("Table of heads")
    page.paragraph(
        "Best role: the role in which the head exceeds the baseline most. Offset: the most frequent offset of the "
        "largest weight, and the fraction of the tokens that have it."
    )
    if comparison is not None:
        page.paragraph(f"From here on, everything but the functions is that of {LETTERS[0]}, {comparison.names[0]}.")
    add_head_table(page, reading, comparison and functions_of_models(comparison))
    if "kept" in figures:
        page.subheading("Functions in subsets of the heads")
        page.table(*kept_table(reading.functions_kept(kept)))
        page.picture(figures["kept"], "Fractions of the heads with each function that subsets of the heads contain.")
    page.heading("Confidence and entropy")
    page.picture(figures["confidence"], "Confidence: mean of the largest weight.", heat_map=True)
    page.picture(figures["entropy"], "Entropy of attention, in nats.", heat_map=True)
    if "positions" in figures:
        page.heading("Relative positions")
        page.picture(figures["positions"], "The eight most positional heads: mean attention by offset.")
    page.heading("Roles")
    if roles := reading.roles():
        page.table(*role_table(roles))
    for name, caption in (
        ("syntactic_roles", "Accuracy on dependencies; baseline: the best fixed offset."),
        ("rare_words", "Accuracy on the rarest tokens of a sentence; baseline: chance."),
        ("duplicate_tokens", "Accuracy on other occurrences of the same token; baseline: chance."),
    ):
        _picture_or_reason(page, reading, figures, name, caption)
    page.heading("Importance and relevance")
    for name in ("importance", "relevance"):
        _picture_or_reason(page, reading, figures, name, f"{name.capitalize()}: {DEFINITIONS[name]}.", heat_map=True)
    if "distances" in figures:
        page.heading("Distances between heads")
        page.picture(figures["distances"], "Heads (layer.head) with similar attention are close to each other.")
    findings = reading.worth_knowing()
    page.heading(f"{len(findings)} heads worth knowing")
    page.paragraph(
        "From each role and each measurement in turn, the best head that is not yet listed. Examples are the "
        "sentences in which the attention of the head is largest or follows its role most; lines connect queries "
        "with keys."
    )
    several_sites = len(reading["confidence"]) > 1
    for (kind, layer, head), finding in findings.items():
        page.subheading(f"Layer {layer}, head {head}{f' of the {kind}' if several_sites else ''}")
        page.paragraph(f"{finding.reason[0].upper()}{finding.reason[1:]}.")
        page.attentions(reading.examples.get((kind, layer, head), []))
    page.facts({**reading.versions, **(facts or {})})
    page.program("common", "sentence", "table", *(["comparison"] if comparison else []), "heads")
    return page


def _what_was_measured(page: HtmlPage, readings: Mapping[str, HeadReading]) -> None:
    """Adds the numbers of sentences and of heads with each function, and what was not measured.

    Args:
        page (`HtmlPage`): The page.
        readings (`dict[str, HeadReading]`): Readings by the letter of their model; a single one by an empty text.
    """
    rows: list[list] = []
    missing: dict[tuple[str, str], list[str]] = {}
    for letter, reading in readings.items():
        summary = reading.summary()
        trees = f", {reading.sentences_with_trees:,} of them with trees" if reading.sentences_with_trees else ""
        page.paragraph(
            f"{letter and f'{letter}: '}{reading.sentences:,} sentences with {reading.tokens:,} tokens{trees}; "
            f"{reading.too_long:,} more were too long for the model and left out. One pass took {reading.seconds:.1f} "
            f"seconds on {reading.device}."
        )
        for kind, layers in summary["layers"].items():
            counts = [summary[key][kind] for key, _ in FUNCTIONS.values()]
            numbers = (NOT_MEASURED if n is None else n for n in counts)
            rows.append([letter, kind, layers, summary["heads"][kind], *numbers])
        for name, why in reading.not_measured.items():
            missing.setdefault((name.replace("_", " "), why), []).append(letter)
    first = 0 if len(readings) > 1 else 1  # a single model has no column
    page.paragraph("Number of heads with each function:")
    page.table(["model", "site", "layers", "heads", *FUNCTIONS][first:], [row[first:] for row in rows])
    if missing:
        page.paragraph("Not measured:")
        without = [[", ".join(letters), *reason] for reason, letters in missing.items()]
        page.table(["model", "what", "why"][first:], [row[first:] for row in without])


def _picture_or_reason(
    page: HtmlPage, reading: HeadReading, figures: dict[str, Any], name: str, caption: str, heat_map: bool = False
) -> None:
    if name in figures:
        page.picture(figures[name], caption, heat_map)
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
            verdict(one["score"], one["baseline"]),
        ]
        for role, one in roles.items()
    ]
    return ["role", "best head", "right", "baseline", "cases", "verdict"], rows


def kept_table(kept: Mapping[str, Mapping[str, int | None]]) -> tuple[list[str], list[list]]:
    """Header and rows: the number of heads with each function in subsets of the heads."""
    return ["of", *next(iter(kept.values()))], [[name, *counts.values()] for name, counts in kept.items()]
