# Licensed under the Apache License, Version 2.0.
"""What `analyze_heads.py` has to say of what it measured: figures, pictures, and a page to read."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import HeadScores, attention_maps
from ..analysis.observers.roles import RoleScores, role_overlap, top_heads
from ..analysis.page import AttentionExample, HtmlPage
from ..analysis.plots.base import plot_head_maps
from ..analysis.plots.heads import (
    plot_functions_kept,
    plot_head_distances,
    plot_head_functions,
    plot_relative_attention,
    plot_roles,
)
from ..data import Tree
from .reading import end_page


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
    "relevance": "share of the top-1 logit that layer-wise relevance propagation gives the head, of the heads of its "
    "layer (Voita et al. 2019)",
}
WORTH_KNOWING = 10
ROLES = ("syntactic_roles", "rare_words", "duplicate_tokens")  # observers whose results are RoleScores
FUNCTION_KEYS = {
    "positional": "positional_heads",
    "syntactic": "syntactic_heads",
    "rare words": "rare_word_heads",
    "duplicate tokens": "duplicate_token_heads",
}

Head = tuple[str, int, int]  # site, layer and head


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


def functions_of(results: dict[str, Any]) -> dict[str, list[tuple]]:
    """Heads by function, as tuples that begin with site, layer and head."""
    functions: dict[str, list[tuple]] = {name: [] for name in FUNCTION_KEYS}
    functions["positional"] = results["relative_positions"].positional()
    for name, role, heads in _players(results):
        if name == "syntactic_roles":
            functions["syntactic"] += heads
        elif role in ("rarest", "duplicate"):
            functions["rare words" if role == "rarest" else "duplicate tokens"] = heads
    return {name: list({head[:3]: head for head in heads}.values()) for name, heads in functions.items()}


def _players(results: dict[str, Any]) -> Iterator[tuple[str, str, list]]:
    """Observer, role, and heads that play it."""
    for name in ROLES:
        if name in results:
            for role, heads in results[name].roles().items():
                yield name, role, heads


def tables_of(results: dict[str, Any]) -> dict[str, HeadScores]:
    """Every number there is for each head, by name."""
    tables = {}
    for name, result in results.items():
        if isinstance(result, HeadScores):
            tables[name] = result
        else:
            for part, scores in result.head_scores().items():
                tables[part if isinstance(result, RoleScores) else f"{name}_{part}"] = scores
    return tables


def rows_of(tables: dict[str, HeadScores], functions: dict[str, list[tuple]]) -> list[dict[str, Any]]:
    """A row for each head."""
    rows = []
    for kind, table in tables["confidence"].items():
        for layer, head in itertools.product(*map(range, table.shape)):
            place = (kind, layer, head)
            own = [name for name, heads in functions.items() if place in {one[:3] for one in heads}]
            values = {name: scores[kind][layer, head].item() for name, scores in tables.items() if kind in scores}
            rows.append({"site": kind, "layer": layer, "head": head, "functions": ", ".join(own), **values})
    return rows


def role_figures(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The best head of each role beside the baseline."""
    figures = {}
    for scores in (results[name] for name in ROLES if name in results):
        for role in scores.accuracy:
            best = scores.best(role)
            figures[role] = {
                **best._asdict(),
                "baseline": scores.baselines[role][best.site],
                "count": scores.counts[role][best.site],
            }
    return figures


class Finding(NamedTuple):
    """Why a head is worth knowing, and the syntactic role that it plays, if that is why."""

    reason: str
    role: str | None = None


def functions_kept(
    functions: dict[str, list[tuple]], results: dict[str, Any], kept: dict[str, list[Head]]
) -> dict[str, dict[str, int]]:
    """Number of heads with each function among some heads: all, the more important half, and those that are kept."""
    ranked = top_heads(results["confidence"])
    some = {"all": [head[:3] for head in ranked]}
    if "importance" in results:
        some["more important half"] = [head[:3] for head in top_heads(results["importance"])[: len(ranked) // 2]]
    return {name: {"heads": len(heads), **role_overlap(functions, heads)} for name, heads in {**some, **kept}.items()}


def worth_knowing(results: dict[str, Any], functions: dict[str, list[tuple]]) -> dict[Head, Finding]:
    """Ten heads and why: of each role and measure in turn, the best head that is not there yet."""
    positional = sorted(functions["positional"], key=lambda head: -head.share)
    rankings = [
        [(head[:3], Finding(f"{head.share:.0%} of its tokens look at offset {head.offset:+d}")) for head in positional]
    ]
    for name, role, heads in _players(results):
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
    tree: Tree | None


def examples_of(
    findings: dict[Head, Finding], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[Example]
) -> dict[Head, list[AttentionExample]]:
    """For each head two short sentences of the first 200: those in which it is surest, of its role if it has one."""
    short = [one for one in sentences if 8 <= len(one.ids) <= 16][:200]
    short = short or [min(sentences, key=lambda one: len(one.ids))]
    found: dict[Head, list[tuple[float, AttentionExample]]] = {head: [] for head in findings}
    for sentence in short:
        maps = attention_maps(model, {"input_ids": torch.tensor([sentence.ids], device=model.device)})
        words = [tokenizer.decode([token]).strip() or tokenizer.convert_ids_to_tokens(token) for token in sentence.ids]
        ordinary = [place for place, token in enumerate(sentence.ids) if token not in tokenizer.all_special_ids]
        for (kind, layer, head), finding in findings.items():
            weights = maps[kind][layer, 0, head].cpu()
            sureness = weights[ordinary][:, ordinary].amax(-1).mean().item() if ordinary else 0.0
            if finding.role is not None:
                sureness = _weight_of_role(finding.role, weights, sentence)
            example = AttentionExample(words, words, weights.tolist(), "")
            found[kind, layer, head].append((sureness, example))
    return {head: [one for _, one in sorted(some, key=lambda pair: -pair[0])[:2]] for head, some in found.items()}


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


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and the page
# ---------------------------------------------------------------------------------------------------------------------


def draw(
    results: dict[str, Any], functions: dict[str, list[tuple]], kept: dict[str, dict[str, int]], folder: Path
) -> dict[str, Path]:
    """All pictures by name."""
    pictures = {"functions": plot_head_functions(functions, results["confidence"], folder / "functions.png")}
    for name in ("confidence", "entropy", "importance", "relevance"):
        if name in results:
            tables = results[name]
            highest = 1.0 if name == "confidence" else max(t.nan_to_num(0).max().item() for t in tables.values())
            pictures[name] = plot_head_maps({name: dict(tables)}, name, folder / f"{name}.png", (0, highest))
    for name in ROLES:
        if name in results:
            pictures[name] = plot_roles(results[name], folder / f"{name}.png")
    if len(kept) > 1:
        pictures["kept"] = plot_functions_kept(kept, folder / "kept.png")
    attention = results["relative_positions"]
    shares = top_heads(attention.best_offset_share())[:8]
    pictures["positions"] = plot_relative_attention(
        attention, shares, folder / "positions.png", min(6, attention.limit)
    )
    if all(len(heads) > 1 for heads in results["distance"].heads.values()):
        pictures["distances"] = plot_head_distances(results["distance"], folder / "distances.png")
    return pictures


def write_report(
    summary: dict[str, Any],
    pictures: dict[str, Path],
    findings: dict[Head, Finding],
    examples: dict[Head, list[AttentionExample]],
    path: Path,
) -> None:
    """The page: what was measured on what, maps, roles, heads worth knowing with examples, definitions."""
    page = HtmlPage(f"Attention heads of {summary['model']}")
    page.heading("What was measured")
    trees = f", {summary['sentences_with_trees']:,} of them with trees" if summary["sentences_with_trees"] else ""
    page.paragraph(
        f"{summary['sentences']:,} sentences of {summary['tokens']:,} tokens{trees}; {summary['too_long']:,} more "
        f"were too long for the model and left out. One pass, {summary['seconds']:.1f} seconds on {summary['device']}."
    )
    page.paragraph("Numbers of heads with each function:")
    page.table(
        ["site", "layers", "heads", *FUNCTION_KEYS],
        [
            [kind, layers, summary["heads"][kind], *(summary[key][kind] for key in FUNCTION_KEYS.values())]
            for kind, layers in summary["layers"].items()
        ],
    )
    if summary["not_measured"]:
        page.paragraph("Not measured:")
        page.table(["what", "why"], list(summary["not_measured"].items()))
    page.heading("What heads do")
    page.picture(pictures["functions"], "Functions of each head; several share a cell. Crosses: removed heads.")
    if "kept" in pictures:
        page.subheading("What is left of them")
        page.table(*kept_table(summary))
        page.picture(pictures["kept"], "Shares of the heads of each function that are among fewer heads.")
    page.heading("How sure they are")
    page.picture(pictures["confidence"], "Confidence: mean of the largest weight.")
    page.picture(pictures["entropy"], "Entropy of attention, in nats.")
    page.heading("Where they look")
    page.picture(pictures["positions"], "The eight most positional heads, layer.head: mean attention by offset.")
    if summary["roles"]:
        page.heading("Roles")
        page.table(*role_table(summary))
        for name, caption in (
            ("syntactic_roles", "Dependencies that each head finds; baseline: the best fixed offset."),
            ("rare_words", "The rarest tokens of a sentence; baseline: chance."),
            ("duplicate_tokens", "Other occurrences of the token that attends; baseline: chance."),
        ):
            if name in pictures:
                page.picture(pictures[name], caption)
    matter = [name for name in ("importance", "relevance") if name in pictures]
    if matter:
        page.heading("Which ones matter")
        for name in matter:
            page.picture(pictures[name], f"{name.capitalize()}: {DEFINITIONS[name]}.")
    if "distances" in pictures:
        page.heading("Which ones are alike")
        page.picture(pictures["distances"], "Heads that attend alike are near each other; layer.head.")
    page.heading(f"{len(findings)} heads worth knowing")
    page.paragraph(
        "Of each role and measure in turn, the best head that is not named yet. Examples are the sentences in which "
        "it is surest, of its role if it has one; lines go from a token to what it attends to."
    )
    for (kind, layer, head), finding in findings.items():
        site = "" if len(summary["layers"]) == 1 else f" of the {kind}"
        page.subheading(f"Layer {layer}, head {head}{site}")
        page.paragraph(f"{finding.reason[0].upper()}{finding.reason[1:]}.")
        page.attentions(examples[kind, layer, head])
    end_page(page, DEFINITIONS, summary, path)


def role_table(summary: dict[str, Any]) -> tuple[list[str], list[list]]:
    """Header and rows: the best head of each role."""
    several = len(summary["layers"]) > 1
    rows = [
        [
            role,
            f"{one['site']} {one['layer']}.{one['head']}" if several else f"{one['layer']}.{one['head']}",
            one["score"],
            one["baseline"],
            one["count"],
        ]
        for role, one in summary["roles"].items()
    ]
    return ["role", "best head", "right", "baseline", "cases"], rows


def kept_table(summary: dict[str, Any]) -> tuple[list[str], list[list]]:
    """Header and rows: heads of each function that are among fewer heads."""
    rows = [[name, *counts.values()] for name, counts in summary["functions_kept"].items()]
    return ["of", *next(iter(summary["functions_kept"].values()))], rows
