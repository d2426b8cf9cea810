# Licensed under the Apache License, Version 2.0.
"""Chooses which heads or units a model keeps, by their scores."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from .head_sites import SITE_KINDS, HeadSite, by_kind, kinds_of
from .number_checks import is_integer


def lowest_scored(
    keep: int | Mapping[str, int],
    scores: Any,
    groups: Mapping[HeadSite, list[list[int]]],
    counts: Mapping[HeadSite, int],
    part: str,
) -> dict[HeadSite, list[int]]:
    """Heads or units to remove, so that those with the largest scores remain.

    Groups are kept or removed as a whole, by the sum of their scores; with groups of different sizes, one that exceeds
    the rest of the budget is removed. Ties are broken by kind (encoder, decoder, cross), then by the lower layer, then
    by the lower index.

    Args:
        keep (`int` or `dict[str, int]`): Number of heads or units to keep, over all layers and kinds; or by kind,
            where other kinds keep all.
        scores (array of shape `(layers, heads)`, or `dict` of them by kind): In the original numbering.
        groups (`dict[HeadSite, list[list[int]]]`): Remaining heads or units at each site, in groups.
        counts (`dict[HeadSite, int]`): Original number of heads or units.
        part (`str`): `head` or `unit`, for messages.

    Returns:
        `dict[HeadSite, list[int]]`: without empty sites.

    Raises:
        ValueError: if `keep` is not an integer from 1 to the number of heads or units, or not a multiple of the group
            size; if scores are missing, have the wrong shape or are NaN.
    """
    kinds = kinds_of(counts)
    sites = sorted(groups, key=lambda site: (SITE_KINDS.index(site.kind), site.layer))
    budgets = by_kind(keep, kinds, "keep", part) if isinstance(keep, Mapping) else {None: keep}
    if not budgets:
        raise ValueError(f"keep must be a number of {part}s, or a non-empty dictionary by kind, got {keep!r}.")
    needed = kinds if None in budgets else list(budgets)
    values = _scores_by_site(scores, {site: groups[site] for site in sites}, counts, kinds, needed, part)
    chosen: dict[HeadSite, list[int]] = {}
    for kind, budget in budgets.items():
        candidates = [
            (-sum(values[site][index] for index in group), site, group)
            for site in sites
            if kind in (None, site.kind)
            for group in groups[site]
        ]
        sizes = {len(group) for _, _, group in candidates} or {1}
        present = sum(len(group) for _, _, group in candidates)
        where = "" if kind is None else f" ({kind})"
        if not is_integer(budget) or not 1 <= budget <= present:
            raise ValueError(
                f"keep{where} must be an integer from 1 to the number of {part}s, {present}, got {budget!r}."
            )
        if budget % math.gcd(*sizes):
            raise ValueError(
                f"keep{where} must be a multiple of {math.gcd(*sizes)}, the number of query heads per key/value head, "
                f"got {budget}."
            )
        left = int(budget)
        # Sorting is stable: the first of equal candidates are kept.
        for _, site, group in sorted(candidates, key=lambda candidate: candidate[0]):
            if len(group) <= left:
                left -= len(group)
            else:
                chosen.setdefault(site, []).extend(group)
        if left:
            raise ValueError(
                f"keep{where}={budget} cannot be reached with groups of {' and '.join(map(str, sorted(sizes)))} heads "
                f"that share key/value heads: keep {budget - left}, or give a number for each kind."
            )
    return chosen


def _scores_by_site(
    scores: Any,
    groups: Mapping[HeadSite, list[list[int]]],
    counts: Mapping[HeadSite, int],
    kinds: list[str],
    needed: list[str],
    part: str,
) -> dict[HeadSite, list[float]]:
    """Scores of the needed kinds, checked for what is left."""
    if not isinstance(scores, Mapping):
        if len(kinds) > 1:
            raise ValueError(
                f"scores must be a dictionary with the keys {', '.join(kinds)}, got {type(scores).__name__}."
            )
        scores = {kinds[0]: scores}
    given = by_kind(scores, kinds, "scores", part)
    found = {}
    for kind in needed:
        if kind not in given:
            raise ValueError(f"scores of the {part}s of {kind} are missing.")
        own = [site for site in groups if site.kind == kind]
        shape = (len(own), counts[own[0]])
        try:
            table = torch.as_tensor(given[kind], dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"scores of {kind} must be numbers of shape {shape}: {error}") from error
        if tuple(table.shape) != shape:
            raise ValueError(f"scores of {kind} must have shape (layers, {part}s) {shape}, got {tuple(table.shape)}.")
        for site, row in zip(own, table.tolist()):
            for index in (index for group in groups[site] for index in group):
                if math.isnan(row[index]):
                    raise ValueError(f"scores must not be NaN, but the score of {site}, {part} {index} is.")
            found[site] = row
    return found
