# Licensed under the Apache License, Version 2.0.
"""Settings of the guidance to the attention of a teacher. This file does not import PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .number_checks import is_integer


TEACHER = "teacher"  # name of its loss, beside patterns and targets
TEACHER_LOSSES = ("kl", "squared")
# Left and right factor of the scores of each relation.
RELATIONS = {"query": ("query", "query"), "key": ("key", "key"), "value": ("value", "value")}
RELATIONS["query_key"] = ("query", "key")
SAME = "same"


@dataclass(frozen=True)
class TeacherSettings:
    """Settings of the guidance of one kind of site to a teacher, see [`HeadwiseConfigMixin`].

    Attributes:
        taught (`dict[int, dict[int, int]]`): For each layer of the student, the head of the teacher that each head
            learns from, removed heads included; empty if only relations are learned.

    Example:
        >>> settings = TeacherSettings.from_dict({"layers": {0: 1}, "heads": {2: 5}}, "encoder", [4, 4])
        >>> settings.layers, settings.taught
        ({0: 1}, {0: {2: 5}})
    """

    layers: dict[int, int]
    heads: str | dict | None = None
    loss: str = "kl"
    relations: list[str] | None = None
    relation_heads: int | None = None
    taught: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def from_dict(
        cls, value: Any, kind: str, num_heads: list[int], where: str = "guidance teacher"
    ) -> TeacherSettings:
        """Reads settings and fills in defaults.

        Args:
            value (`dict`): Settings that differ from the defaults.
            kind (`str`): `encoder`, `decoder` or `cross`.
            num_heads (`list[int]`): Number of heads of each layer of the student, removed ones included.
            where (`str`): Name of the settings, for messages.

        Raises:
            ValueError: if a value is invalid; the message names the key, the value and the way out.
        """
        known = [one.name for one in fields(cls) if one.name != "taught"]
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be a dictionary with layers, such as {{0: 1}}, got {value!r}.")
        if unknown := sorted(str(key) for key in set(value) - set(known)):
            raise ValueError(f"{where} has no key {unknown[0]!r}; its keys are {', '.join(known)}.")
        given = {key: one for key, one in value.items() if one is not None}
        layers = _checked_layers(given.get("layers"), num_heads, where)
        relations = _checked_relations(given, kind, where)
        heads = given.get("heads", None if relations else SAME)
        loss = given.get("loss", "kl")
        if not isinstance(loss, str) or loss not in TEACHER_LOSSES:
            raise ValueError(f"{where} loss must be one of {', '.join(TEACHER_LOSSES)}, got {loss!r}.")
        taught = {} if heads is None else {layer: _taught(heads, layer, num_heads[layer], where) for layer in layers}
        if isinstance(heads, Mapping):
            _check_named_layers(heads, layers, where)
        return cls(layers, heads, loss, relations, given.get("relation_heads"), taught)

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON, which has no integer keys."""
        heads = self.heads
        if isinstance(heads, Mapping):
            heads = {
                str(key): {str(head): one for head, one in own.items()} if isinstance(own, Mapping) else own
                for key, own in heads.items()
            }
        values = {"layers": {str(layer): one for layer, one in self.layers.items()}, "heads": heads, "loss": self.loss}
        values |= {"relations": self.relations, "relation_heads": self.relation_heads}
        return {key: one for key, one in values.items() if one is not None}


def _index(key: Any) -> int | None:
    """An integer, possibly as a string of JSON; `None` for other values."""
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    return int(key) if is_integer(key) and key >= 0 else None


def _checked_layers(layers: Any, num_heads: list[int], where: str) -> dict[int, int]:
    if not isinstance(layers, Mapping) or not layers:
        raise ValueError(f"{where} layers must be {{layer of the student: layer of the teacher}}, got {layers!r}.")
    checked = {}
    for key, other in layers.items():
        own, learned = _index(key), _index(other)
        if own is None or learned is None:
            raise ValueError(f"{where} layers must be integers of at least 0, got {{{key!r}: {other!r}}}.")
        if own >= len(num_heads):
            raise ValueError(f"{where} layers name layer {own}, but the model has {len(num_heads)} layers.")
        checked[own] = learned
    return dict(sorted(checked.items()))


def _checked_relations(given: Mapping, kind: str, where: str) -> list[str] | None:
    relations, count = given.get("relations"), given.get("relation_heads")
    if relations is None:
        if count is not None:
            raise ValueError(f"{where} relation_heads={count!r} needs relations, such as ['value'].")
        return None
    if not isinstance(relations, (list, tuple)) or not relations or not set(relations) <= RELATIONS.keys():
        raise ValueError(f"{where} relations must be a list of {', '.join(RELATIONS)}, got {relations!r}.")
    if kind == "cross" and (others := [name for name in relations if name != "query_key"]):
        raise ValueError(
            f"{where} relations name {others[0]!r}, which is not between the two texts of cross-attention; name "
            "query_key."
        )
    if len(set(relations)) < len(relations):
        raise ValueError(f"{where} relations name one of {relations!r} twice; name each once.")
    if count is not None and not (is_integer(count) and count > 0):
        raise ValueError(f"{where} relation_heads must be an integer of at least 1, got {count!r}.")
    return list(relations)


def _taught(heads: Any, layer: int, count: int, where: str) -> dict[int, int]:
    """Head of the teacher by head of the student, of one layer of the student."""
    if heads == SAME:
        return {head: head for head in range(count)}
    if not isinstance(heads, Mapping) or not heads:
        raise ValueError(
            f"{where} heads must be {SAME!r} or {{head of the student: head of the teacher}}, got {heads!r}."
        )
    if all(isinstance(own, Mapping) for own in heads.values()):
        by_layer = {_index(key): own for key, own in heads.items()}
        heads = by_layer.get(layer)
        if not heads:
            raise ValueError(f"{where} heads name no head of layer {layer}; name some, or leave it out of layers.")
    taught = {}
    for key, other in heads.items():
        own, learned = _index(key), _index(other)
        if own is None or learned is None:
            raise ValueError(
                f"{where} heads must be integers of at least 0, got {{{key!r}: {other!r}}} (layer {layer})."
            )
        if own >= count:
            raise ValueError(f"{where} heads name head {own} (layer {layer}), but a layer has {count} heads.")
        taught[own] = learned
    return dict(sorted(taught.items()))


def _check_named_layers(heads: Mapping, layers: Mapping[int, int], where: str) -> None:
    if all(isinstance(own, Mapping) for own in heads.values()):
        for key in heads:
            if _index(key) not in layers:
                raise ValueError(
                    f"{where} heads name layer {key!r}, which layers does not name: add it, or remove it."
                )
