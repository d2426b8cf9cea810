# Licensed under the Apache License, Version 2.0.
"""The base class of summaries and of the rows of their tables."""

import dataclasses
import string
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


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
        column (`str`, *optional*): Heading of the column of a field with `per` in [`Summary.table`]; without, the
            table leaves the field out.
        optional (`bool`): Whether the keys are left out of the file while the value is None.
        settings: Arguments of `dataclasses.field`, such as `default`.
    """
    metadata = {"description": description, "key": key, "per": per, "column": column, "optional": optional}
    return field(metadata=metadata, **settings)


def hidden(**settings: Any) -> Any:
    """A field that is not written to the file; other keys may name it in braces."""
    return field(metadata={"hidden": True}, **settings)


@dataclass(kw_only=True)
class Record:
    """Named results: fields are declared by [`result`]."""

    def to_dict(self) -> dict[str, Any]:
        """Values by the keys of `summary.json`; records in lists become dictionaries, too."""
        values: dict[str, Any] = {}
        for one in _shown(type(self)):
            value = getattr(self, one.name)
            if value is None and one.metadata["optional"]:
                continue
            key, per = _key_of(one), one.metadata["per"]
            if per:
                value = value or {}
                names = value if isinstance(per, str) else per
                values |= {key.format(**vars(self), per=name): value.get(name) for name in names}
            elif isinstance(value, list):
                values[key.format(**vars(self))] = [row.to_dict() if isinstance(row, Record) else row for row in value]
            else:
                values[key.format(**vars(self))] = value
        return values

    @classmethod
    def documentation(cls) -> dict[str, str]:
        """Descriptions by key; what depends on the run is in capitals (`METRIC_dense`)."""
        found: dict[str, str] = {}
        for one in _shown(cls):
            per = one.metadata["per"]
            key = _in_capitals(_key_of(one))
            found[", ".join(key.replace("PER", name) for name in ([per] if isinstance(per, str) else per)) or key] = (
                one.metadata["description"]
            )
            for names, text in _rows_of(one).items():
                found[", ".join(f"{key}[].{name}" for name in names.split(", "))] = text
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
        shown = [one for one in _shown(type(self)) if one.metadata["column"] and getattr(self, one.name) is not None]
        lines = [[name, *(getattr(self, one.name).get(name) for one in shown)] for name in names]
        return [heading, *(one.metadata["column"] for one in shown)], lines


def rows_table(rows: Sequence[Record]) -> tuple[list[str], list[list[Any]]]:
    """Header and lines of a table with a line per record."""
    return list(rows[0].to_dict()), [list(row.to_dict().values()) for row in rows]


def explained(summary: type[Summary], width: int = 100) -> str:
    """The keys of a summary, for `--help`."""
    lines = ["keys of summary.json:"]
    for keys, text in summary.documentation().items():
        lines += textwrap.wrap(keys, width, initial_indent="  ", subsequent_indent="  ")
        lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _shown(record: type[Record]) -> list[dataclasses.Field]:
    return [one for one in dataclasses.fields(record) if not one.metadata.get("hidden")]


def _rows_of(one: dataclasses.Field) -> dict[str, str]:
    """Documentation of the rows of a field that is a list of records."""
    kinds = [kind for kind in getattr(one.type, "__args__", ()) if isinstance(kind, type) and issubclass(kind, Record)]
    return kinds[0].documentation() if kinds else {}


def _key_of(one: dataclasses.Field) -> str:
    return one.metadata["key"] or (f"{one.name}_{{per}}" if one.metadata["per"] else one.name)


def _in_capitals(key: str) -> str:
    return "".join(text + (name or "").upper() for text, name, _, _ in string.Formatter().parse(key))
