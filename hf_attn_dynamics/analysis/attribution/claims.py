# Licensed under the Apache License, Version 2.0.
"""Attention and contributions over many texts, and the claims of Pascal et al. (2021) about them."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..._files import write_text
from ..head_scores import HeadScores
from ..notebook import html_table
from ..observers.positions import RelativeAttention
from ..results import Result
from .resampling import Sums, TextGroups
from .statistics import MAP_TYPES, MapCorrelation


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..plots.attribution import MapExample

MAPS = ("attention", "local", "global")
# Attention between tokens that are not special, with rows that sum to 1 over these tokens.
BETWEEN_WORDS = "attention_between_words"
# Names of maps in pictures and pages.
MAP_LABELS = {
    "attention": "attention",
    "local": "contribution in the layer",
    "global": "contribution of the input",
    BETWEEN_WORDS: "attention between words",
}
# Pairs of maps to correlate, by name of the result.
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
# Claims are not judged on fewer texts, and fewer texts are not resampled: intervals would be too narrow.
FEWEST_TEXTS = 20
# A claim is judged if at least this fraction of the resamples of the texts agree.
AGREEMENT = 0.95
# Keys of `AttributionFindings.claims` beside the metrics.
NOT_METRICS = ("holds", "holds_in", "intervals")
ANSWERS = {True: "yes", False: "no"}
# Sums that the claims are about, see `AttributionFindings.of`.
CLAIM_SUMS = (
    *(f"{name}.{table}" for name in ("local", "global") for table in ("rows", "pearson", "spearman", "constant")),
    *("attention.attention", "global.attention", "occurrences", "types"),
    *(f"{BETWEEN_WORDS}.{table}" for table in ("attention", "occurrences")),
)


@dataclass(frozen=True, eq=False)
class AttributionFindings(Result):
    """Attention and contributions of all heads over many texts.

    Args:
        kind (`str`): Kind of site of the heads.
        correlations (`dict[str, MapCorrelation]`): By the names of `COMPARED`.
        positions (`dict[str, RelativeAttention]`): Histograms by relative position, by the names of `MAPS`, and that
            of attention between tokens that are not special, `BETWEEN_WORDS`.
        types (`torch.Tensor` of shape `(layers, heads, types, types)`): Number of maps by type of the attention and
            type of the global contributions.
        resampled (`dict[str, dict[str, torch.Tensor]]`): By claim, its metrics in each bootstrap resample of the
            texts, NaN where there are no maps of their types, and `holds`: 1, 0, or NaN. Empty if the texts were not
            resampled.
    """

    kind: str
    correlations: dict[str, MapCorrelation]
    positions: dict[str, RelativeAttention]
    types: torch.Tensor
    resampled: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: Sums, kind: str, groups: TextGroups | None = None) -> "AttributionFindings":
        """Findings from sums over batches.

        Args:
            sums (`dict[str, torch.Tensor]`): For each of `COMPARED` the sums `NAME.rows`, `NAME.pearson`,
                `NAME.spearman` (both times rows) and `NAME.constant`; for each of `MAPS` `NAME.attention` (times
                `occurrences`) and `NAME.largest` (times `tokens`); `occurrences`, `tokens` and `types`; for
                `BETWEEN_WORDS`, which has fewer pairs of tokens, `NAME.attention` and `NAME.occurrences`. Correlations
                and maps without sums are left out; fractions of largest weights without sums are NaN.
            kind (`str`): Kind of site of the heads.
            groups ([`TextGroups`], *optional*): The sums `CLAIM_SUMS` of each text, to resample the texts if there are
                at least `FEWEST_TEXTS`.
        """
        correlations, positions = {}, {}
        for name in COMPARED:
            if f"{name}.rows" in sums:
                rows, constant = sums[f"{name}.rows"], sums[f"{name}.constant"]
                tables = sums[f"{name}.pearson"] / rows, sums[f"{name}.spearman"] / rows, rows, constant
                correlations[name] = MapCorrelation(*(HeadScores({kind: table}) for table in tables))
        for name in (*MAPS, BETWEEN_WORDS):
            if f"{name}.attention" in sums:
                attention = sums[f"{name}.attention"] / sums.get(f"{name}.occurrences", sums["occurrences"])
                largest = sums.get(f"{name}.largest", torch.full_like(attention, math.nan)) / sums.get("tokens", 1)
                positions[name] = RelativeAttention({kind: attention}, {kind: largest})
        findings = cls(kind, correlations, positions, sums["types"])
        if groups is None or findings.texts < FEWEST_TEXTS:
            return findings
        found = [cls.of(resample, kind)._answers() for resample in groups.resamples()]
        return replace(findings, resampled=_as_tensors(found))

    def center(self, name: str) -> torch.Tensor:
        """Center of mass by relative position of each head, `(layers, heads)`."""
        return self.positions[name].center_of_mass()[self.kind]

    def distance_to_uniform(self, name: str) -> torch.Tensor:
        """Total variation distance of each head's histogram by relative position to uniform, `(layers, heads)`."""
        histogram = self.positions[name].attention[self.kind]
        uniform = 1 / (~histogram.isnan()).sum(-1, keepdim=True)
        fractions = histogram / histogram.nansum(-1, keepdim=True)
        # 0 / 0 for removed heads, which have no offsets.
        return (fractions - uniform).abs().nansum(-1) / fractions.nansum(-1) / 2

    def type_counts(self, name: str) -> torch.Tensor:
        """Number of maps of each type, for `attention` or `global` contributions, `(layers, heads, types)`."""
        return self.types.sum(-1 if name == "attention" else -2)

    @property
    def texts(self) -> int:
        """Number of texts."""
        return int(self.types.sum((-1, -2)).max())

    def claims(self) -> dict[str, dict[str, Any]]:
        """The five claims: metrics, whether each `holds`, and their uncertainty.

        "Early" layers are the first third, "deep" layers all others, "late" layers the last third.

        local_is_attention: the Pearson correlation of attention and local contributions is above 0.7 for 142 of 144
            heads and above 0.85 for 90 %; the Spearman correlation is above 0.9 for 140 of 144 and above 0.95 for
            75 %.
        past_before_future: the center of mass of attention by relative position, averaged over heads and layers, is
            negative in early and positive in late layers. The centers without special tokens (`…_between_words`) do
            not count: they show what attention to these tokens hides.
        global_is_uniform: by relative position, global contributions are closer to uniform than attention in every
            deep layer, and their mean distance is at most half as large. The distance is the total variation distance,
            averaged over heads.
        global_parts_from_attention: the Pearson correlation of attention and global contributions is below 0.5 for
            most heads of deep layers, and its median is below 0.25 in each late layer; the median of the Spearman
            correlation is below 0.7 in all but the first quarter of the layers, and below 0.25 in the last layer.
        lines_fade_blocks_stay: most deep maps whose attention is vertical, diagonal or both have global contributions
            of other types; most early maps whose attention is a block have contributions that are a block; at most 5 %
            of deep contributions are blocks.

        Returns:
            `dict[str, dict[str, Any]]`: by name of the claim, its metrics and

            - `holds`: `None` if the claim is not judged, see [`not_judged`];
            - `holds_in`: fraction of the bootstrap resamples of the texts in which it holds; `None` if none has maps
              of its types;
            - `intervals`: a pair of numbers for each metric, the 2.5 % and 97.5 % quantiles over the resamples that
              have the metric, `None` if none has.

            The last two are left out if the texts were not resampled. Else a claim is judged only if at least 95 % of
            the resamples give the same answer as all texts.
        """
        found = {}
        for name, (answer, metrics) in self._answers().items():
            found[name] = {"holds": self._verdict(name, answer)[0], **metrics}
            if self.resampled:
                of_resamples = dict(self.resampled[name])
                answers = of_resamples.pop("holds")
                found[name]["holds_in"] = None if answers.isnan().all() else _fraction(answers == 1)
                found[name]["intervals"] = {metric: interval(values) for metric, values in of_resamples.items()}
        return found

    def not_judged(self) -> dict[str, str]:
        """The claims that are not judged, with the reason."""
        verdicts = {name: self._verdict(name, answer) for name, (answer, _) in self._answers().items()}
        return {name: reason for name, (holds, reason) in verdicts.items() if holds is None}

    def _verdict(self, name: str, answer: bool | None) -> tuple[bool | None, str]:
        """Whether a claim holds, given the answer of all texts; `None` and the reason if it is not judged."""
        if self.texts < FEWEST_TEXTS:
            return None, f"{self.texts} texts are too few; at least {FEWEST_TEXTS} are needed."
        if answer is None:
            return None, "there are no maps of the types that it is about."
        if not self.resampled:
            return answer, ""
        agreement = _fraction(self.resampled[name]["holds"] == float(answer))
        if agreement >= AGREEMENT:
            return answer, ""
        return None, (
            f"undecided at {self.texts} texts: it {'holds' if answer else 'does not hold'} for them, but only "
            f"{agreement:.1%} of their resamples agree; {AGREEMENT:.0%} are needed."
        )

    def _answers(self) -> dict[str, tuple[bool | None, dict[str, float | None]]]:
        """Whether each claim holds for these texts, `None` if there are no maps of its types, and its metrics."""
        kind = self.kind
        present = self.types.flatten(1).any(-1).nonzero().flatten()  # layers that have heads
        depth = len(present)
        third = math.ceil(depth / 3)
        # A single layer is early, deep and late.
        early, deep, late = present[:third], present[min(third, depth - 1) :], present[-third:]
        upper = present[math.ceil(depth / 4) - 1 :]

        pearson, spearman = self.correlations["local"].pearson[kind], self.correlations["local"].spearman[kind]
        agreement = {
            "pearson_above_0.7": fraction_of_heads(pearson > 0.7, pearson),
            "pearson_above_0.85": fraction_of_heads(pearson > 0.85, pearson),
            "spearman_above_0.9": fraction_of_heads(spearman > 0.9, spearman),
            "spearman_above_0.95": fraction_of_heads(spearman > 0.95, spearman),
        }
        fractions_of_bert = (142 / 144, 0.9, 140 / 144, 0.75)

        centers = self.center("attention").nanmean(1)
        direction = {"early_center": centers[early].mean().item(), "late_center": centers[late].mean().item()}
        if BETWEEN_WORDS in self.positions:
            centers = self.center(BETWEEN_WORDS).nanmean(1)
            direction["early_center_between_words"] = centers[early].mean().item()
            direction["late_center_between_words"] = centers[late].mean().item()

        attended, contributed = (self.distance_to_uniform(name).nanmean(1)[deep] for name in ("attention", "global"))
        evenness = {"attention": attended.mean().item(), "global": contributed.mean().item()}

        pearson, spearman = self.correlations["global"].pearson[kind], self.correlations["global"].spearman[kind]
        medians = spearman.nanquantile(0.5, dim=1)
        mismatch = {
            "deep_pearson_below_0.5": fraction_of_heads(pearson[deep] < 0.5, pearson[deep]),
            "late_pearson_median": pearson[late].nanquantile(0.5, dim=1).max().item(),
            "upper_spearman_median": medians[upper].max().item(),
            "last_spearman_median": medians[late[-1]].item(),
        }

        types = self.types.sum(1)  # (layers, attention, contribution)
        lines, blocks = types[deep][:, LINES], types[early][:, BLOCK]
        fading = {
            "lines_that_stay": ratio(lines[..., LINES], lines),
            "early_blocks_that_stay": ratio(blocks[:, BLOCK], blocks),
            "deep_contributions_that_are_blocks": ratio(types[deep][..., BLOCK], types[deep]),
        }
        holds = {
            "local_is_attention": all(found >= bert for found, bert in zip(agreement.values(), fractions_of_bert)),
            "past_before_future": direction["early_center"] < 0 < direction["late_center"],
            "global_is_uniform": bool((contributed < attended).all())
            and evenness["global"] <= evenness["attention"] / 2,
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
        metrics = (agreement, direction, evenness, mismatch, fading)
        return {name: (holds[name], found) for name, found in zip(CLAIMS, metrics)}

    def _tables(self) -> dict[str, torch.Tensor]:
        """Scores of the heads by name of the column, `(layers, heads)`."""
        return {
            **{
                f"{measure}_{name}": getattr(correlation, measure)[self.kind]
                for name, correlation in self.correlations.items()
                for measure in ("pearson", "spearman")
            },
            **{f"center_{name}": self.center(name) for name in self.positions},
            **{f"distance_to_uniform_{name}": self.distance_to_uniform(name) for name in self.positions},
        }

    @property
    def columns(self) -> list[str]:
        """Columns of the table."""
        return ["site", "layer", "head", *self._tables(), "type_attention", "type_global"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, one per head: correlations, centers, distances to uniform, most frequent types."""
        tables, counts = self._tables(), [self.type_counts(name) for name in ("attention", "global")]
        for layer, head in itertools.product(*map(range, self.types.shape[:2])):
            types = (MAP_TYPES[one[layer, head].argmax()] if one[layer, head].any() else "" for one in counts)
            yield self.kind, layer, head, *(table[layer, head].item() for table in tables.values()), *types

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the table as dictionaries."""
        return [dict(zip(self.columns, record)) for record in self.records()]

    def _repr_html_(self) -> str:
        """The claims and the first rows of the table, for notebooks."""
        return html_table(*claim_table(self.claims(), self.not_judged()), "Claims") + super()._repr_html_()

    def pictures(self) -> "dict[str, Callable[..., Figure]]":
        """`global` and `local` correlation, `positions`, `centers` and `types`; see [`Result`]."""
        return attribution_drawings(self)

    def save_parts(self, folder: str | Path) -> None:
        """Saves each correlation and each histogram to a file that its class can load, and the types."""
        folder = Path(folder)
        for name, correlation in self.correlations.items():
            correlation.save(folder / f"correlation_{name}.json")
        for name, positions in self.positions.items():
            positions.save(folder / f"positions_{name}.json")
        types = {"types": MAP_TYPES, "attention_and_global": self.types.int().tolist()}
        write_text(folder / "map_types.json", json.dumps(types, indent=2) + "\n")


def fraction_of_heads(condition: torch.Tensor, scores: torch.Tensor) -> float:
    """Fraction of the heads with a score for which a condition holds; NaN if no head has a score."""
    return (condition.sum().double() / (~scores.isnan()).sum()).item()


def ratio(part: torch.Tensor, whole: torch.Tensor) -> float | None:
    """Fraction of maps, from their numbers; `None` without maps."""
    return (part.sum() / whole.sum()).item() if whole.any() else None


def interval(values: torch.Tensor) -> list[float] | None:
    """The 2.5 % and 97.5 % quantiles of the values that are not NaN; `None` if there are none."""
    values = values[~values.isnan()]
    return torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist() if len(values) else None


def _fraction(condition: torch.Tensor) -> float:
    return condition.double().mean().item()


def _as_tensors(answers: Sequence[dict[str, tuple[bool | None, dict]]]) -> dict[str, dict[str, torch.Tensor]]:
    """Answers and metrics of resamples, see `AttributionFindings.resampled`."""

    def column(values: Sequence[float | None]) -> torch.Tensor:
        return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)

    return {
        name: {
            "holds": column([one[name][0] for one in answers]),
            **{metric: column([one[name][1][metric] for one in answers]) for metric in metrics},
        }
        for name, (_, metrics) in answers[0].items()
    }


def claim_table(
    claims: Mapping[str, Mapping[str, Any]], not_judged: Mapping[str, str]
) -> tuple[list[str], list[list]]:
    """Header and rows of the claims.

    Columns: the claim; whether it holds, or why it is not judged; the fraction of resamples in which it holds; its
    metrics with their intervals.
    """
    rows = []
    for name, claim in claims.items():
        intervals = claim.get("intervals", {})
        metrics = [
            f"{key.replace('_', ' ')}: {_two_digits(value, intervals.get(key))}"
            for key, value in claim.items()
            if key not in NOT_METRICS
        ]
        answer = ANSWERS.get(claim["holds"]) or f"not judged: {not_judged[name]}"
        holds_in = claim.get("holds_in", "not measured")
        resamples = f"{holds_in:.1%}" if isinstance(holds_in, float) else holds_in
        rows.append([CLAIMS[name], answer, resamples, "; ".join(metrics)])
    return ["claim", "holds", "holds in resamples", "metrics, with 95 % intervals"], rows


def _two_digits(value: float | None, interval: Sequence[float] | None) -> str:
    """A metric, with its interval in brackets."""
    shown = "–" if value is None else f"{value:.2f}"
    return shown if interval is None else f"{shown} [{interval[0]:.2f}, {interval[1]:.2f}]"


def attribution_drawings(
    findings: AttributionFindings, examples: Sequence["MapExample"] = (), title: str = ""
) -> dict[str, Callable]:
    """Functions that draw the pictures, see [`Result`]; `examples` adds one of single maps.

    `title` names model and data.
    """
    from ..plots.attribution import (
        plot_centers_of_mass,
        plot_map_correlation,
        plot_map_examples,
        plot_map_types,
        plot_relative_maps,
    )

    positions = {MAP_LABELS[name]: one for name, one in findings.positions.items()}
    counts = {MAP_LABELS[name]: findings.type_counts(name).sum(1) for name in ("attention", "global")}
    outer = {MAP_LABELS[name]: findings.positions[name] for name in ("attention", "global")}
    compared = {
        name: ("attention", MAP_LABELS[name].replace("contribution", "contributions")) for name in ("global", "local")
    }
    pictures = {
        **{
            name: partial(plot_map_correlation, findings.correlations[name], names=pair)
            for name, pair in compared.items()
        },
        "positions": partial(plot_relative_maps, outer),
        "centers": partial(plot_centers_of_mass, {name: one.center_of_mass() for name, one in positions.items()}),
        "types": partial(plot_map_types, counts),
    }
    if examples:
        pictures["examples"] = partial(plot_map_examples, examples)
    return {name: partial(draw, title=title) for name, draw in pictures.items()}
