# Licensed under the Apache License, Version 2.0.
"""What `attribute_heads.py` has to say of what it measured: findings, claims, pictures, and a page to read."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import HeadScores, MapCorrelation, RelativeAttention
from ..analysis.attribution.statistics import MAP_TYPES
from ..analysis.page import HtmlPage
from ..analysis.plots.attribution import (
    MapExample,
    plot_centers_of_mass,
    plot_map_correlation,
    plot_map_examples,
    plot_map_types,
    plot_relative_maps,
)
from .reading import end_page
from .run import write_json


MAPS = ("attention", "local", "global")
# What is correlated with what, by the name of the result.
COMPARED = {
    "local": ("attention", "local"),
    "global": ("attention", "global"),
    "value_weighted": ("value_weighted", "local"),
}
LINES = [MAP_TYPES.index(name) for name in ("vertical", "diagonal", "vertical+diagonal")]
BLOCK = MAP_TYPES.index("block")
CLAIMS = {
    "local_is_attention": "Within a layer, contributions are nearly attention.",
    "past_before_future": "Early layers attend to the past, late ones to the future.",
    "global_is_uniform": "Seen from the input, deep heads look nearly everywhere.",
    "global_parts_from_attention": "The deeper, the less attention tells of the input.",
    "lines_fade_blocks_stay": "Vertical and diagonal maps fade; blocks stay, in early layers only.",
}
DEFINITIONS = {
    "contribution": "‖∂o/∂x‖ of what a head gives out at a position by each input, as a share of the sum over inputs; "
    "in the layer: by the layer's own inputs, of the input: by the embeddings that the first layer reads",
    "early, deep, late": "the first third of the layers, all others, the last third; upper: from a quarter upward",
    "by relative position": "mean over the tokens that have a token at this offset",
    "center of mass": "Σ offset · value / Σ value over these means, in tokens",
    "distance to even": "total variation between these means and equal ones, from 0 to 1",
    "types": "most mass in two columns (vertical), next to the query (diagonal), in its sentence (block), or in none "
    "of these (heterogeneous), in excess of what even rows have there",
}

Sums = dict[str, torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """What sums come to.

    Args:
        kind: Kind of site whose heads were looked at.
        correlations: By the names of `COMPARED`.
        positions: Histograms by relative position, by the names of `MAPS`.
        types: Numbers of maps by their types as attention and as global contribution, of shape
            `(layers, heads, types, types)`.
    """

    kind: str
    correlations: dict[str, MapCorrelation]
    positions: dict[str, RelativeAttention]
    types: torch.Tensor

    @classmethod
    def of(cls, sums: Sums, kind: str) -> "Findings":
        correlations, positions = {}, {}
        for name in COMPARED:
            rows = sums[f"{name}.rows"]
            tables = sums[f"{name}.pearson"] / rows, sums[f"{name}.spearman"] / rows, rows, sums[f"{name}.constant"]
            correlations[name] = MapCorrelation(*(HeadScores({kind: table}) for table in tables))
        for name in MAPS:
            positions[name] = RelativeAttention(
                {kind: sums[f"{name}.attention"] / sums["occurrences"]},
                {kind: sums[f"{name}.largest"] / sums["tokens"]},
            )
        return cls(kind, correlations, positions, sums["types"])

    def center(self, name: str) -> torch.Tensor:
        """Center of mass by relative position of each head, `(layers, heads)`."""
        return self.positions[name].center_of_mass()[self.kind]

    def distance_to_uniform(self, name: str) -> torch.Tensor:
        """Total variation between each head's histogram by relative position and an even one, `(layers, heads)`."""
        histogram = self.positions[name].attention[self.kind]
        even = 1 / (~histogram.isnan()).sum(-1, keepdim=True)
        shares = histogram / histogram.nansum(-1, keepdim=True)
        # Removed heads have no offset at all: 0 / 0.
        return (shares - even).abs().nansum(-1) / shares.nansum(-1) / 2

    def type_counts(self, name: str) -> torch.Tensor:
        """Numbers of maps of each type, of `attention` or `global` contributions, `(layers, heads, types)`."""
        return self.types.sum(-1 if name == "attention" else -2)

    def save(self, folder: Path) -> None:
        """Writes a file for each result."""
        for name, correlation in self.correlations.items():
            correlation.save(folder / f"correlation_{name}.json")
        for name, positions in self.positions.items():
            positions.save(folder / f"positions_{name}.json")
        write_json(folder / "map_types.json", {"types": MAP_TYPES, "attention_and_global": self.types.int().tolist()})


def claims_of(findings: Findings) -> dict[str, dict[str, Any]]:
    """The five claims: figures, and whether each holds by the criterion that `attribute_heads.py` states."""
    kind = findings.kind
    there = findings.types.flatten(1).any(-1).nonzero().flatten()  # layers that have heads
    depth = len(there)
    third = math.ceil(depth / 3)
    # A single layer is early, deep and late.
    early, deep, late = there[:third], there[min(third, depth - 1) :], there[-third:]
    upper = there[math.ceil(depth / 4) - 1 :]

    pearson, spearman = findings.correlations["local"].pearson[kind], findings.correlations["local"].spearman[kind]
    agreement = {
        "pearson_above_0.7": share(pearson > 0.7, pearson),
        "pearson_above_0.85": share(pearson > 0.85, pearson),
        "spearman_above_0.9": share(spearman > 0.9, spearman),
        "spearman_above_0.95": share(spearman > 0.95, spearman),
    }
    shares_of_bert = (142 / 144, 0.9, 140 / 144, 0.75)

    centers = findings.center("attention").nanmean(1)
    direction = {"early_center": centers[early].mean().item(), "late_center": centers[late].mean().item()}

    attended, contributed = (findings.distance_to_uniform(name).nanmean(1)[deep] for name in ("attention", "global"))
    evenness = {"attention": attended.mean().item(), "global": contributed.mean().item()}

    pearson, spearman = findings.correlations["global"].pearson[kind], findings.correlations["global"].spearman[kind]
    medians = spearman.nanquantile(0.5, dim=1)
    mismatch = {
        "deep_pearson_below_0.5": share(pearson[deep] < 0.5, pearson[deep]),
        "late_pearson_median": pearson[late].nanquantile(0.5, dim=1).max().item(),
        "upper_spearman_median": medians[upper].max().item(),
        "last_spearman_median": medians[late[-1]].item(),
    }

    types = findings.types.sum(1)  # (layers, attention, contribution)
    lines, blocks = types[deep][:, LINES], types[early][:, BLOCK]
    fading = {
        "lines_that_stay": ratio(lines[..., LINES], lines),
        "early_blocks_that_stay": ratio(blocks[:, BLOCK], blocks),
        "deep_contributions_that_are_blocks": ratio(types[deep][..., BLOCK], types[deep]),
    }
    holds = {
        "local_is_attention": all(found >= bert for found, bert in zip(agreement.values(), shares_of_bert)),
        "past_before_future": direction["early_center"] < 0 < direction["late_center"],
        "global_is_uniform": bool((contributed < attended).all()) and evenness["global"] <= evenness["attention"] / 2,
        "global_parts_from_attention": mismatch["deep_pearson_below_0.5"] > 0.5
        and mismatch["late_pearson_median"] < 0.25
        and mismatch["upper_spearman_median"] < 0.7
        and mismatch["last_spearman_median"] < 0.25,
        "lines_fade_blocks_stay": None
        if None in fading.values()
        else fading["lines_that_stay"] < 0.5
        and fading["early_blocks_that_stay"] > 0.5
        and fading["deep_contributions_that_are_blocks"] <= 0.05,
    }
    figures = (agreement, direction, evenness, mismatch, fading)
    return {name: {"holds": holds[name], **found} for name, found in zip(CLAIMS, figures)}


def share(which: torch.Tensor, scores: torch.Tensor) -> float:
    """Share of heads that a condition holds of, among those that have a score."""
    return which.sum().item() / (~scores.isnan()).sum().item()


def ratio(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    """Share of maps, from their numbers; None where there are none."""
    return (part.sum() / whole.sum()).item() if whole.any() else None


def rows_of(findings: Findings) -> list[dict[str, Any]]:
    """A row for each head."""
    kind = findings.kind
    tables = {
        f"{measure}_{name}": getattr(correlation, measure)[kind]
        for name, correlation in findings.correlations.items()
        for measure in ("pearson", "spearman")
    }
    tables |= {f"center_{name}": findings.center(name) for name in MAPS}
    tables |= {f"distance_to_uniform_{name}": findings.distance_to_uniform(name) for name in MAPS}
    types = {f"type_{name}": findings.type_counts(name) for name in ("attention", "global")}
    rows = []
    for layer, head in itertools.product(*map(range, findings.types.shape[:2])):
        counts = {name: table[layer, head] for name, table in types.items()}
        rows.append(
            {
                "site": kind,
                "layer": layer,
                "head": head,
                **{name: table[layer, head].item() for name, table in tables.items()},
                **{name: MAP_TYPES[count.argmax()] if count.any() else "" for name, count in counts.items()},
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and the page
# ---------------------------------------------------------------------------------------------------------------------


def draw(findings: Findings, examples: list[MapExample], folder: Path) -> dict[str, Path]:
    """Draws everything; returns the files by name."""
    names = {"attention": "attention", "local": "contribution in the layer", "global": "contribution of the input"}
    positions = {names[name]: findings.positions[name] for name in MAPS}
    counts = {names[name]: findings.type_counts(name).sum(1) for name in ("attention", "global")}
    outer = {name: one for name, one in positions.items() if name != names["local"]}
    return {
        "local": plot_map_correlation(findings.correlations["local"], folder / "local.png"),
        "positions": plot_relative_maps(outer, folder / "positions.png"),
        "centers": plot_centers_of_mass(positions, folder / "centers.png"),
        "global": plot_map_correlation(findings.correlations["global"], folder / "global.png"),
        "types": plot_map_types(counts, folder / "types.png"),
        "examples": plot_map_examples(examples, folder / "examples.png"),
    }


def write_report(summary: dict[str, Any], pictures: dict[str, Path], path: Path) -> None:
    """The page: the claims, and the pictures that they come from."""
    page = HtmlPage(f"What reaches the attention heads of {summary['model']}")
    page.heading("What was measured")
    page.paragraph(
        f"{summary['sentences']:,} texts of {summary['tokens']:,} tokens; {summary['too_short']:,} more were too "
        f"short and {summary['too_long']:,} too long. {summary['identifiable']:,} have no more tokens than a head has "
        f"dimensions, so that attention can be told from what heads give out. Contributions of the input: "
        f"{summary['method']}. {summary['seconds']:.1f} seconds on {summary['device']}."
    )
    page.heading("Claims of the paper")
    page.table(*claim_table(summary))
    page.heading("Attention and contributions in the layer")
    page.picture(
        pictures["local"], "Mean correlation of attention with contributions of the layer's inputs; a dot a head."
    )
    page.paragraph(
        f"As a check, attention times the length of values has a correlation of "
        f"{summary['pearson']['value_weighted']:.3f} with them, attention alone {summary['pearson']['local']:.3f}."
    )
    page.heading("Where heads look, and what they see")
    page.picture(pictures["positions"], "By relative position: attention above, contributions of the input below.")
    page.picture(pictures["centers"], "Centers of mass by relative position; below zero is the past.")
    page.heading("Attention and contributions of the input")
    page.picture(pictures["global"], "Correlation of attention with contributions of the model's input; a dot a head.")
    page.heading("Types of maps")
    page.picture(pictures["types"], "Shares of types in each layer, of attention and of contributions of the input.")
    page.picture(pictures["examples"], "Heads whose attention is most often of a type, in one sentence each.")
    end_page(page, DEFINITIONS, summary, path)


def claim_table(summary: dict[str, Any]) -> tuple[list[str], list[list]]:
    """Header and rows: what the paper says, whether it holds, and the figures."""
    answers = {True: "yes", False: "no", None: "cannot be told"}
    rows = [
        [
            CLAIMS[name],
            answers[claim["holds"]],
            "; ".join(
                f"{key.replace('_', ' ')}: {'–' if value is None else format(value, '.2f')}"
                for key, value in claim.items()
                if key != "holds"
            ),
        ]
        for name, claim in summary["claims"].items()
    ]
    return ["claim", "holds", "figures"], rows
