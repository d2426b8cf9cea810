# Licensed under the Apache License, Version 2.0.
"""How well heads play roles, whatever these are: results, the best heads, and which of them are left elsewhere."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..head_scores import BestHead, HeadScores
from ..results import Result


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class RoleScores(Result):
    """How well each head plays each role, and how well one does that knows nothing. All by name of the role.

    Args:
        accuracy (`dict[str, HeadScores]`): Share of cases in which the largest weight of a head is on a target, from 0
            to 1; NaN where a head is removed.
        baselines (`dict[str, dict[str, float]]`): The same share without looking, by kind of site: see the observer;
            NaN where there is no case.
        counts (`dict[str, dict[str, int]]`): Number of cases, by kind of site.
        skipped (`dict[str, int]`): What was not looked at, by reason.
        offsets (`dict[str, int]`): Where the baseline looks if it is a fixed offset, in words from that which attends.
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

    def roles(self, margin: float = 0.1) -> dict[str, list[BestHead]]:
        """Heads that play each role: their accuracy is higher than the baseline by `margin` or more.

        Args:
            margin (`float`): Difference of shares; Voita et al. (2019) have 0.1, ten percentage points.

        Returns:
            `dict[str, list[BestHead]]`: for each role its heads, the best first; a head may have several.

        Raises:
            ValueError: if `margin` is not between 0 and 1.
        """
        if not 0 <= margin <= 1:
            raise ValueError(f"margin must be between 0 and 1, as a difference of shares, got {margin}.")
        return {
            role: [head for head in top_heads(scores) if head.score >= self.baselines[role][head.site] + margin]
            for role, scores in self.accuracy.items()
        }

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws how well each head plays each role beside the baseline, and saves it if there is a path.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Title of the picture.
        """
        from ..plots.heads import plot_roles

        return plot_roles(self, path, title)

    def head_scores(self) -> dict[str, HeadScores]:
        """One number for each head, by name: the accuracies."""
        return dict(self.accuracy)

    columns = ["role", "site", "layer", "head", "accuracy", "baseline"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        for role, scores in self.accuracy.items():
            for site, *rest in scores.records():
                yield role, site, *rest, self.baselines[role][site]


def top_heads(scores: HeadScores, count: int | None = None) -> list[BestHead]:
    """Heads by their scores, the highest first.

    Args:
        scores ([`HeadScores`]): Of any kind, such as importance; those without a score are left out.
        count (`int`, *optional*): How many; all if `None`.

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
    """How many of the heads that are kept play each role (Voita et al. 2019, Figure 8).

    With the roles of the whole model and the heads that a pruned one has left, or the most important ones, it tells
    which functions survive; with those of each pruned model, how they move to other heads.

    Args:
        roles (`dict[str, list[BestHead]]`): Heads of each role, as `RoleScores.roles` gives them; anything that begins
            with site, layer and head.
        kept (list of `tuple`): The heads that are kept, in the same way: `top_heads(importance, 10)`, or `top_heads`
            of anything that was measured on a pruned model.

    Returns:
        `dict[str, int]`: number of heads for each role, those with several roles in each; and for `"none"` the number
        of heads without any.

    Example:
        >>> roles = {"obj to head": [("encoder", 2, 0)], "rarest": [("encoder", 0, 1), ("encoder", 2, 0)]}
        >>> role_overlap(roles, [("encoder", 2, 0), ("encoder", 2, 3)])
        {'obj to head': 1, 'rarest': 1, 'none': 1}
    """
    heads = {tuple(head[:3]) for head in kept}
    playing = {role: heads & {tuple(head[:3]) for head in players} for role, players in roles.items()}
    without = heads.difference(*playing.values())
    return {**{role: len(found) for role, found in playing.items()}, "none": len(without)}
