# Licensed under the Apache License, Version 2.0.
"""Feed-forward units in a configuration: `"0-3,17"`, since lists of thousands of numbers would fill the file."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .head_sites import HeadSite, by_kind, config_value, heads_by_site, kinds_of


MOST_UNITS = 2**18  # of a block: twice as many as a checkpoint may have
_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def format_units(units: Iterable[int]) -> str:
    """Units as ranges.

    Example:
        >>> format_units([17, 0, 1, 2, 3])
        '0-3,17'
    """
    runs: list[list[int]] = []
    for unit in sorted(units):
        if runs and unit == runs[-1][-1] + 1:
            runs[-1][1:] = [unit]
        else:
            runs.append([unit])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_units(value: Any, where: str) -> Any:
    """The inverse of [`format_units`]; returns values that are not strings unchanged.

    Args:
        value (`str` or other): Ranges.
        where (`str`): Name of the value, for messages.

    Raises:
        ValueError: if a string does not consist of ranges, or names more units than a block can have.

    Example:
        >>> parse_units("0-3,17", "pruned_units")
        [0, 1, 2, 3, 17]
    """
    if not isinstance(value, str):
        return value
    if not _RANGES.fullmatch(value):
        raise ValueError(f"{where} must be ranges of units, such as '0-3,17', or a list, got {value!r}.")
    # Before the ranges of a damaged checkpoint are expanded.
    units = []
    for run in value.split(","):
        first, _, last = run.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"{where} has the range {run}, whose end is before its start.")
        if int(last or first) >= MOST_UNITS:
            raise ValueError(f"{where} names unit {last or first}, but a block has at most {MOST_UNITS:,} units.")
        units += range(int(first), int(last or first) + 1)
    return units


def units_by_site(
    value: Any, sites: Mapping[HeadSite, int | None], name: str, from_json: bool = False
) -> dict[HeadSite, list[int]]:
    """Units by site, each a list or ranges; otherwise as [`heads_by_site`].

    Args:
        value (`dict` or `list`): Units.
        sites (`dict[HeadSite, int]`): Original number of units at each site; `None` if it is unknown.
        name (`str`), from_json (`bool`): See [`heads_by_site`].

    Example:
        >>> units_by_site({"1": "2-4"}, {HeadSite("encoder", 1): 8}, "pruned_units", from_json=True)
        {HeadSite(kind='encoder', layer=1): [2, 3, 4]}
    """
    if isinstance(value, Mapping):
        kinds = kinds_of(sites)
        value = {
            kind: {layer: parse_units(units, f"{name} (layer {layer})") for layer, units in layers.items()}
            if isinstance(layers, Mapping)
            else layers
            for kind, layers in by_kind(value, kinds, name, "unit").items()
        }
    return heads_by_site(value, sites, name, from_json, "unit")


def units_value(units: Mapping[HeadSite, list[int]], kinds: list[str]) -> dict | None:
    """Units in the form of a configuration; `None` if there are none.

    Example:
        >>> units_value({HeadSite("encoder", 1): [2, 3, 4]}, ["encoder"])
        {1: '2-4'}
    """
    value = config_value(units, kinds)
    if value is None:
        return None
    if len(kinds) == 1:
        return {layer: format_units(own) for layer, own in value.items()}
    return {kind: {layer: format_units(own) for layer, own in layers.items()} for kind, layers in value.items()}
