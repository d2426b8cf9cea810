# Licensed under the Apache License, Version 2.0.
"""The base class of summaries and of the rows of their tables."""

import dataclasses
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin


# Keys that `Run.finish` adds to every summary.
PROVENANCE = {
    "num_processes": "Number of processes.",
    "seed": "Random seed.",
    "device": "Name of the GPU, or cpu.",
    "command": "Command that repeats the run.",
    "python_version, hf_attn_dynamics_version, transformers_version, torch_version, accelerate_version, "
    "datasets_version, tokenizers_version": "Versions of Python and of the packages.",
}


def result(
    description: str,
    *,
    key: str | None = None,
    per: Sequence[str] | str = (),
    more: Sequence[str] = (),
    column: str | None = None,
    optional: bool = False,
    **settings: Any,
) -> Any:
    """A field of a [`Record`].

    Args:
        description (`str`): What the value is, with unit and reduction.
        key (`str`, *optional*): Key in `summary.json`; the name of the field by default. Attributes of the record
            stand in braces (`"{metric}_dense"`), and `{per}` for each name of `per`.
        per (sequence of `str`, or `str`): The value is a dictionary, and the file has one key per name, `NAME_PER` by
            default. With a sequence, these are the names, and the file has null where the dictionary has no value.
            With a word in capitals, the names are the dictionary's own, and the documentation shows the word.
        more (sequence of `str`): Further names; the file has their keys only if the dictionary has them.
        column (`str`, *optional*): Heading of the column of a field with `per` in [`Summary.table`]; without, the
            table leaves the field out.
        optional (`bool`): Whether the keys are left out of the file while the value is None.
        settings: Arguments of `dataclasses.field`, such as `default`.
    """
    metadata = {
        "description": description, "key": key, "per": per, "more": more, "column": column, "optional": optional
    }  # fmt: skip
    return field(metadata=metadata, **settings)


def hidden(**settings: Any) -> Any:
    """A field that is not written to the file; other keys may name it in braces."""
    return field(metadata={"hidden": True}, **settings)


def included(*, per: str = "", **settings: Any) -> Any:
    """A field that holds a record, whose keys stand among those of the file.

    Args:
        per (`str`): The field holds a dictionary of records, and their keys have its names in front, `NAME_KEY`; the
            documentation shows this word in capitals.
        settings: Arguments of `dataclasses.field`.
    """
    return field(metadata={"included": True, "per": per}, **settings)


@dataclass(kw_only=True)
class Record:
    """Named results: fields are declared by [`result`], [`hidden`] and [`included`]."""

    def to_dict(self) -> dict[str, Any]:
        """Values by the keys of `summary.json`; records in lists and dictionaries become dictionaries, too."""
        values: dict[str, Any] = {}
        for one in _shown(type(self)):
            value, per = getattr(self, one.name), one.metadata["per"]
            if one.metadata.get("included"):
                for front, record in [(f"{name}_", own) for name, own in value.items()] if per else [("", value)]:
                    values |= {f"{front}{key}": own for key, own in record.to_dict().items()}
                continue
            if value is None and one.metadata["optional"]:
                continue
            key, value = _key_of(one), _plain(value)
            if per:
                value = value or {}
                names = (
                    value
                    if isinstance(per, str)
                    else [*per, *(name for name in one.metadata["more"] if name in value)]
                )
                values |= {key.format(**vars(self), per=name): value.get(name) for name in names}
            else:
                values[key.format(**vars(self))] = value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Any:
        """The record whose [`to_dict`] gave these values, for records without `per` and without braces in keys."""
        return cls(
            **{one.name: _typed(values[_key_of(one)], one.type) for one in _shown(cls) if _key_of(one) in values}
        )

    @classmethod
    def documentation(cls) -> dict[str, str]:
        """Descriptions by key; what depends on the run is in capitals (`METRIC_dense`), or `*` in a dictionary."""
        found: dict[str, str] = {}
        for one in _shown(cls):
            per = one.metadata["per"]
            record, path = _record_in(one.type)
            inner = record.documentation() if record else {}
            if one.metadata.get("included"):
                found |= _with_front(f"{per}_" if per else "", inner)
                continue
            key = _in_capitals(_key_of(one))
            names = [per] if isinstance(per, str) else [*per, *one.metadata["more"]]
            found[", ".join(key.replace("PER", name) for name in names) or key] = one.metadata["description"]
            found |= _with_front(f"{key}{path}.", inner)
        return found


@dataclass(kw_only=True)
class Summary(Record):
    """What a run writes to `summary.json`.

    Attributes:
        provenance (`dict`): Number of processes, seed, device, command and versions, see [`PROVENANCE`]; set by
            `Run.finish`.
    """

    provenance: dict[str, Any] = field(default_factory=dict, init=False, metadata={"hidden": True})

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **self.provenance}

    @classmethod
    def documentation(cls) -> dict[str, str]:
        return {**super().documentation(), **PROVENANCE}

    def table(self, heading: str, names: Iterable[str]) -> tuple[list[str], list[list[Any]]]:
        """Header and lines of a table with a line per name, of the fields with `per` that have a column.

        Args:
            heading (`str`): Heading of the names.
            names (iterable of `str`): Names in the dictionaries of the fields.
        """
        shown = [
            one for one in _shown(type(self)) if one.metadata.get("column") and getattr(self, one.name) is not None
        ]
        lines = [[name, *(getattr(self, one.name).get(name) for one in shown)] for name in names]
        return [heading, *(one.metadata["column"] for one in shown)], lines


def rows_table(rows: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Header and lines of a table with a line per record; columns without any value are left out."""
    lines = [row.to_dict() for row in rows]
    # Rows may lack optional values; the longest one has the order of the others.
    longest = max(lines, key=len)
    keys = [key for key in longest if any(line.get(key) is not None for line in lines)]
    return keys, [[line.get(key) for key in keys] for line in lines]


def explained(summary: type[Summary], width: int = 100) -> str:
    """The docstring and the keys of a summary, for `--help`; keys with the same description stand together."""
    keys: dict[str, list[str]] = {}
    for names, text in summary.documentation().items():
        keys.setdefault(text, []).append(names)
    about = " ".join((summary.__doc__ or "").split())
    lines = ["keys of summary.json:", *textwrap.wrap(about, width, initial_indent="  ", subsequent_indent="  "), ""]
    for text, names in keys.items():
        lines += textwrap.wrap(", ".join(names), width, initial_indent="  ", subsequent_indent="  ")
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _shown(record: type[Record]) -> list[dataclasses.Field]:
    return [one for one in dataclasses.fields(record) if not one.metadata.get("hidden")]


def _is_record(kind: Any) -> bool:
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, Record)


def _record_in(kind: Any) -> tuple[type[Record] | None, str]:
    """The record that the annotation of a field names, and how to get to it: `[]` for lists, `.*` for dictionaries."""
    if _is_record(kind):
        return kind, ""
    for one in get_args(kind):
        record, path = _record_in(one)
        if record is not None:
            return record, {list: "[]", dict: ".*"}.get(get_origin(kind), "") + path
    return None, ""


def _with_front(front: str, documentation: Mapping[str, str]) -> dict[str, str]:
    return {", ".join(front + key for key in keys.split(", ")): text for keys, text in documentation.items()}


def _plain(value: Any) -> Any:
    """The value with dictionaries instead of records."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def _typed(value: Any, kind: Any) -> Any:
    """The value with those records that the annotation of its field names."""
    if isinstance(value, dict) and _is_record(kind):
        return kind.from_dict(value)
    arguments = get_args(kind)
    if isinstance(value, list) and get_origin(kind) is list:
        return [_typed(one, arguments[0]) for one in value]
    if isinstance(value, dict) and get_origin(kind) is dict:
        return {name: _typed(one, arguments[1]) for name, one in value.items()}
    for one in arguments:
        value = _typed(value, one)
    return value


def _key_of(one: dataclasses.Field) -> str:
    return one.metadata["key"] or (f"{one.name}_{{per}}" if one.metadata["per"] else one.name)


def _in_capitals(key: str) -> str:
    return "".join(text + (name or "").upper() for text, name, _, _ in string.Formatter().parse(key))
