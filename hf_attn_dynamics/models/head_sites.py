# Licensed under the Apache License, Version 2.0.
"""Names of heads: kind of site, layer and index, always in the original numbering."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .number_checks import is_integer


SITE_KINDS = ("encoder", "decoder", "cross")


class HeadSite(NamedTuple):
    """Kind of attention, `encoder` or `decoder` (self-attention) or `cross`, and the layer."""

    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.kind} layer {self.layer}"


def kinds_of(sites: Mapping[HeadSite, Any]) -> list[str]:
    """Kinds of sites among `sites`, in the order encoder, decoder, cross."""
    present = {site.kind for site in sites}
    return [kind for kind in SITE_KINDS if kind in present]


def by_kind(value: Mapping, kinds: list[str], name: str, part: str = "head") -> dict[str, Any]:
    """Normalises a user's value to `{kind: value}`.

    Args:
        value (`dict`): `{kind: value}`, or a bare value if the model has a single kind of site.
        kinds (`list[str]`): Kinds of sites of the model.
        name (`str`): Name of the value, for messages.
        part (`str`): What the model has at its sites, for messages.

    Returns:
        `dict[str, Any]`: values by kind, for the given kinds.

    Raises:
        ValueError: if the model has no site of a given kind, or has several kinds and none is given.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary or None, got {value!r}.")
    named = [key for key in value if key in SITE_KINDS]
    if not named:
        if len(kinds) == 1:
            return {kinds[0]: value}
        if not value:
            return {}
        raise ValueError(
            f"{name} of a model with {part}s at several sites must name them, {{{', '.join(map(repr, kinds))}: …}}, "
            f"got {value!r}."
        )
    for key in value:
        if key not in kinds:
            raise ValueError(
                f"{name} names the site {key!r}, but the {part}s of this model are at {', '.join(kinds)}."
            )
    return dict(value)


def heads_by_site(
    value: Mapping | Iterable[tuple],
    sites: Mapping[HeadSite, int | None],
    name: str,
    from_json: bool = False,
    part: str = "head",
) -> dict[HeadSite, list[int]]:
    """`{layer: [heads]}`, `{kind: {layer: [heads]}}`, or a list of `(kind, layer, head)`, checked against a model.

    Args:
        value (`dict` or `list`): Heads of each layer, by kind for models with several kinds of sites; or a list of
            tuples that start with kind, layer and head, such as `HeadScores.ranked`.
        sites (`dict[HeadSite, int]`): Original number of heads at each site; `None` if it is unknown.
        name (`str`): Name of the value, for messages.
        from_json (`bool`): Whether layers may be strings, since JSON has no integer keys.
        part (`str`): `head`, or another name of what is numbered, for messages.

    Returns:
        `dict[HeadSite, list[int]]`: sorted heads in the order of `sites`, without empty sites.

    Raises:
        ValueError: if a layer or head is not an integer, out of range or named twice; the message names it.

    Example:
        >>> heads_by_site({1: [3, 0]}, {HeadSite("encoder", layer): 4 for layer in range(2)}, "pruned_heads")
        {HeadSite(kind='encoder', layer=1): [0, 3]}
    """
    if not (from_json or isinstance(value, Mapping)):
        value = _gathered(value, name, part)
    found: dict[HeadSite, list[int]] = {}
    kinds = kinds_of(sites)
    for kind, layers in by_kind(value, kinds, name, part).items():
        if not isinstance(layers, Mapping):
            raise ValueError(f"{name} must be {{layer: [{part}s]}}, got {layers!r}.")
        numbers = [site.layer for site in sites if site.kind == kind]
        of_kind = f" of the {kind}" if len(kinds) > 1 else ""
        for key, heads in layers.items():
            layer = int(key) if from_json and isinstance(key, str) and key.isdecimal() else key
            if not is_integer(layer):
                raise ValueError(f"{name} must name layers{of_kind} by integers, got {key!r} ({type(key).__name__}).")
            layer = int(layer)
            site = HeadSite(kind, layer)
            if site not in sites:
                raise ValueError(
                    f"{name} names layer {layer}{of_kind}, but its layers are {min(numbers)} to {max(numbers)}."
                )
            if site in found:
                raise ValueError(f"{name} names layer {layer}{of_kind} twice.")
            found[site] = _checked_numbers(heads, sites[site], f"{name} (layer {layer}{of_kind})", part)
    return {site: found[site] for site in sites if found.get(site)}


def _gathered(heads: Any, name: str, part: str) -> dict[str, dict[int, list[int]]]:
    """Groups `(kind, layer, head, …)` tuples as `{kind: {layer: [heads]}}`."""
    gathered: dict[str, dict[int, list[int]]] = {}
    for one in heads if isinstance(heads, Iterable) and not isinstance(heads, str) else [heads]:
        if not isinstance(one, tuple) or len(one) < 3 or one[0] not in SITE_KINDS:
            raise ValueError(
                f"{name} must be {{layer: [{part}s]}}, or a list of {part}s as HeadScores.ranked() gives, each "
                f"({', '.join(SITE_KINDS[:-1])} or {SITE_KINDS[-1]}, layer, {part}); got {heads!r}."
            )
        kind, layer, head = one[:3]
        gathered.setdefault(kind, {}).setdefault(layer, []).append(head)
    return gathered


def _checked_numbers(numbers: Any, count: int | None, where: str, part: str) -> list[int]:
    """Sorted numbers of parts of a layer, from 0 to `count`, if it is known."""
    if isinstance(numbers, (str, Mapping)) or not hasattr(numbers, "__iter__"):
        raise ValueError(f"{where} must be a list of {part}s, got {numbers!r}.")
    numbers = list(numbers)
    for number in numbers:
        if not is_integer(number):
            raise ValueError(f"{where} must name {part}s by integers, got {number!r} ({type(number).__name__}).")
        if number < 0 or (count is not None and number >= count):
            last = "" if count is None else f" to {count - 1}"
            raise ValueError(f"{where} names {part} {number}, but the {part}s of this layer are 0{last}.")
    numbers = [int(number) for number in numbers]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number, times in Counter(numbers).items() if times > 1)
        raise ValueError(f"{where} names {part} {twice} twice.")
    return sorted(numbers)


def config_value(heads: Mapping[HeadSite, list[int]], kinds: list[str]) -> dict | None:
    """The inverse of [`heads_by_site`]: heads in the form of a configuration; `None` if there are none.

    Example:
        >>> config_value({HeadSite("encoder", 1): [0, 3]}, ["encoder"])
        {1: [0, 3]}
        >>> config_value({HeadSite("cross", 0): [2]}, ["encoder", "decoder", "cross"])
        {'cross': {0: [2]}}
    """
    value: dict[str, dict[int, list[int]]] = {}
    for (kind, layer), chosen in heads.items():
        if chosen:
            value.setdefault(kind, {})[layer] = sorted(chosen)
    if not value:
        return None
    return value[kinds[0]] if len(kinds) == 1 else value
