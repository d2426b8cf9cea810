# Licensed under the Apache License, Version 2.0.
"""How well heads play roles: accuracies, the best heads, and how many of them a pruned model keeps."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..head_scores import BestHead, HeadScores
from ..notebook import html_table
from ..results import Result


if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARGIN = 0.1  # by which the accuracy of a head with a role exceeds the baseline
SAME = 0.005  # difference of accuracies that is no difference


@dataclass(frozen=True, eq=False)
class RoleScores(Result):
    """Accuracy of each head in each role, beside a baseline. All fields are keyed by the name of the role.

    Args:
        accuracy (`dict[str, HeadScores]`): Fraction of cases in which the largest weight of a head is on a target;
            NaN for removed heads.
        baselines (`dict[str, dict[str, float]]`): The accuracy of a baseline by kind of site, see the observer; NaN
            without cases.
        counts (`dict[str, dict[str, int]]`): Number of cases by kind of site.
        skipped (`dict[str, int]`): Number of skipped items by reason.
        offsets (`dict[str, int]`): The offset of a fixed-offset baseline, in words from the query.
    """

    accuracy: dict[str, HeadScores]
    baselines: dict[str, dict[str, float]]
    counts: dict[str, dict[str, int]]
    skipped: dict[str, int] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)

    def best(self, role: str) -> BestHead:
        """The head with the highest accuracy in a role.

        Raises:
            ValueError: if there is no such role.
        """
        if role not in self.accuracy:
            raise ValueError(f"role must be one of {', '.join(map(repr, self.accuracy))}, got {role!r}.")
        return self.accuracy[role].best()

    def roles(self, margin: float = MARGIN) -> dict[str, list[BestHead]]:
        """Heads that play each role: their accuracy exceeds the baseline by at least `margin`.

        Args:
            margin (`float`): Difference of fractions; Voita et al. (2019) use 0.1, ten percentage points.

        Returns:
            `dict[str, list[BestHead]]`: the heads of each role, the best first; a head may have several roles.

        Raises:
            ValueError: if `margin` is not between 0 and 1.
        """
        if not 0 <= margin <= 1:
            raise ValueError(f"margin must be between 0 and 1, as a difference of fractions, got {margin}.")
        return {
            role: [head for head in top_heads(scores) if head.score >= self.baselines[role][head.site] + margin]
            for role, scores in self.accuracy.items()
        }

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws the accuracy of each head in each role, beside the baseline.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
        """
        from ..plots.heads import plot_roles

        return plot_roles(self, path, title)

    def _repr_html_(self) -> str:
        """The best head of each role beside the baseline, for notebooks."""
        rows = []
        for role, scores in self.accuracy.items():
            if not (ranked := scores.ranked()):
                rows.append([role, None, None, None, None, "no head has a score"])
                continue
            best = ranked[0]
            baseline = self.baselines[role][best.site]
            # As in pictures: a difference below half a percentage point is none.
            verdict = "" if best.score > baseline + SAME else "no better than the baseline"
            count = self.counts.get(role, {}).get(best.site)
            rows.append([role, f"{best.site} {best.layer}.{best.head}", best.score, baseline, count, verdict])
        header = ["role", "best head (layer.head)", "accuracy", "baseline", "cases", ""]
        return html_table(header, rows, "Accuracy of the best head in each role")

    def head_scores(self) -> dict[str, HeadScores]:
        """One number per head, by name: the accuracies."""
        return dict(self.accuracy)

    columns = ["role", "site", "layer", "head", "accuracy", "baseline"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for role, scores in self.accuracy.items():
            for site, *rest in scores.records():
                yield role, site, *rest, self.baselines[role][site]


def top_heads(scores: HeadScores, count: int | None = None) -> list[BestHead]:
    """Heads in descending order of their scores.

    Args:
        scores ([`HeadScores`]): Any scores, such as importance; heads with NaN are left out.
        count (`int`, *optional*): Number of heads; all by default.

    Raises:
        ValueError: if `count` is not from 0 to the number of heads that have a score.

    Example:
        >>> top_heads(HeadScores({"encoder": [[0.1, 0.4], [0.3, 0.2]]}), 2)
        [BestHead(site='encoder', layer=0, head=1, score=0.4), BestHead(site='encoder', layer=1, head=0, score=0.3)]
    """
    ranked = scores.ranked()
    if count is not None and not 0 <= count <= len(ranked):
        raise ValueError(f"count must be from 0 to {len(ranked)}, the number of heads with a score, got {count}.")
    return ranked[:count]


def role_overlap(roles: Mapping[str, Iterable[tuple]], kept: Iterable[tuple]) -> dict[str, int]:
    """Number of kept heads that play each role (Voita et al. 2019, Figure 8).

    The roles of the dense model and the heads of a pruned model tell which functions survive pruning; the roles
    measured on each pruned model tell whether other heads take them over.

    Args:
        roles (`dict[str, list[BestHead]]`): Heads of each role from `RoleScores.roles`, or any tuples that begin with
            site, layer and head.
        kept (list of `tuple`): The kept heads, as such tuples: `top_heads(importance, 10)`, or `top_heads` of scores
            measured on a pruned model.

    Returns:
        `dict[str, int]`: number of heads by role (a head counts in each of its roles), and of heads without a role as
        `"none"`.

    Example:
        >>> roles = {"obj to head": [("encoder", 2, 0)], "rarest": [("encoder", 0, 1), ("encoder", 2, 0)]}
        >>> role_overlap(roles, [("encoder", 2, 0), ("encoder", 2, 3)])
        {'obj to head': 1, 'rarest': 1, 'none': 1}
    """
    heads = {tuple(head[:3]) for head in kept}
    playing = {role: heads & {tuple(head[:3]) for head in players} for role, players in roles.items()}
    without = heads.difference(*playing.values())
    return {**{role: len(found) for role, found in playing.items()}, "none": len(without)}
