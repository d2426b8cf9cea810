# Licensed under the Apache License, Version 2.0.
"""Parsing of `[CONFIG.yaml] [--flag value …]`."""

import argparse
import ast
import copy
import dataclasses
import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from transformers import HfArgumentParser

from ..._files import read_text
from ..._refusals import refuse_bad_input


HELP, HELP_ALL = "help", "help_all"


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows flags with their defaults, without their other spellings; the description keeps its lines."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        if action.option_strings and action.option_strings[0].startswith("--"):
            shown.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(shown)


class _Parser(HfArgumentParser):
    """Reports errors in one line, without the usage of two hundred flags."""

    def __init__(self, dataclass_types: Sequence[type], description: str | None, epilog: str | None = None):
        first = getattr(next(iter(dataclass_types), None), "positional", "").upper() or "[CONFIG.yaml]"
        super().__init__(
            dataclass_types,
            prog=Path(sys.argv[0]).name,
            usage=f"%(prog)s {first} [--flag value …]",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_yaml_or_flags(
    *dataclass_types: type,
    presets: dict[str, dict[str, Any]] | None = None,
    argv: list[str] | None = None,
    description: str | None = None,
    keys: str | None = None,
) -> tuple:
    """Parses `[CONFIG.yaml] [--flag value …]`. Flags override the file, which overrides the preset.

    Args:
        dataclass_types (`type`): Dataclasses whose fields are the flags. `--help` explains those of the first one,
            `--help_all` those of all. If the first one has a class variable `positional`, the name of one of its
            flags, this flag takes the words that no other flag takes, and there is no file.
        presets (`dict`, *optional*): Defaults of flags, by the values of `--preset`; the first preset is the default.
        argv (`list[str]`, *optional*): Command-line arguments; those of this process by default.
        description (`str`, *optional*): Text of `--help` before the flags.
        keys (`str`, *optional*): Text of `--help` after the flags: the keys of the summary.

    Returns:
        `tuple`: one instance of each dataclass.

    Raises:
        SystemExit: with status 2 and one line on standard error, if a flag, key or value is invalid; with status 0
            after `--help`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _explain(dataclass_types, argv, description, keys, has_more=len(dataclass_types) > 1)
    with refuse_bad_input():
        words, values = _words_and_values(argv, *dataclass_types[:1])
        _check_known(words, values, _names(dataclass_types), has_more=len(dataclass_types) > 1)
        return _parse(dataclass_types, words, values, presets)


def check_early(
    arguments: type,
    has_trainer: bool,
    presets: dict[str, dict[str, Any]] | None = None,
    argv: list[str] | None = None,
    description: str | None = None,
    keys: str | None = None,
) -> None:
    """Explains or checks the flags of a recipe before PyTorch is imported.

    It checks the names of all flags, and the values of the recipe's own ones, as far as their dataclass does;
    [`parse_yaml_or_flags`] parses all of them later.

    Args:
        arguments (`type`): Dataclass of the recipe's own flags.
        has_trainer (`bool`): Whether the recipe also has the flags of a trainer.
        presets, argv, description, keys: See [`parse_yaml_or_flags`].

    Raises:
        SystemExit: as [`parse_yaml_or_flags`] does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if has_trainer and f"--{HELP_ALL}" in argv:
        return
    _explain((arguments,), argv, description, keys, has_more=has_trainer)
    own = _names((arguments,))
    with refuse_bad_input():
        words, values = _words_and_values(argv, arguments)
        _check_known(words, values, own | (trainer_flags() if has_trainer else set()), has_more=has_trainer)
        words = [word for name, some in _by_flag(words) for word in some if _name_in(name, own)]
        values = {key: value for key, value in values.items() if _name_in(key, own)}
        presets = {name: {k: v for k, v in of.items() if k in own} for name, of in (presets or {}).items()}
        _parse((arguments,), words, values, presets)


def trainer_flags() -> set[str]:
    """Names of the flags of training arguments, parsed from the source code: importing it takes seconds."""
    transformers = Path(importlib.util.find_spec("transformers").origin)
    files = [transformers.with_name(name) for name in ("training_args.py", "training_args_seq2seq.py")]
    files.append(Path(__file__).parents[2] / "training" / "arguments.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [
        node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and "Arguments" in node.name
    ]
    names = {node.target.id for one in classes for node in one.body if isinstance(node, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}


def _explain(
    dataclass_types: Sequence[type], argv: list[str], description: str | None, keys: str | None, has_more: bool
) -> None:
    """Prints the requested help, if any, and exits."""
    epilog = [keys] if keys else []
    if f"--{HELP_ALL}" in argv:
        types = dataclass_types
    elif f"--{HELP}" in argv or "-h" in argv:
        types = dataclass_types[:1]
        if has_more:
            epilog.append(f"--{HELP_ALL} explains the flags of the Trainer of Transformers as well.")
    else:
        return
    _Parser([_own_first(kind) for kind in types], description, "\n\n".join(epilog)).print_help()
    raise SystemExit(0)


def _own_first(kind: type) -> type:
    """A dataclass with the same flags: those that the class itself declares come before those of its bases."""
    classes = [one for one in kind.__mro__ if dataclasses.is_dataclass(one)]

    def first_declared(one: dataclasses.Field) -> int:
        return max(
            place for place, owner in enumerate(classes) if one.name in owner.__dict__.get("__annotations__", {})
        )

    fields = [
        (
            one.name,
            one.type,
            dataclasses.field(default=one.default, default_factory=one.default_factory, metadata=one.metadata),
        )
        for one in sorted(dataclasses.fields(kind), key=first_declared)
        if one.init
    ]
    return dataclasses.make_dataclass(kind.__name__, fields, kw_only=True)


def _words_and_values(argv: list[str], kind: type | None = None) -> tuple[list[str], dict[str, Any]]:
    """Words of the flags, and values of the YAML file before them, if any."""
    if hasattr(kind, "positional"):
        return _name_positional(argv, kind), {}
    if not argv or argv[0].startswith("-"):
        return argv, {}
    return argv[1:], _values_of_file(Path(argv[0]))


def _name_positional(argv: list[str], kind: type) -> list[str]:
    """Gives the words that no flag takes to the flag that `kind` calls positional."""
    types = get_type_hints(kind)
    flags, alone = [], []
    for name, some in _by_flag(argv):
        if name == kind.positional:
            taken = len(some)
        elif types.get(name) is bool and some[1:2] not in (["true"], ["false"]):
            taken = 1
        else:
            taken = bool(name) + (bool(name) and "=" not in some[0])
        flags += some[:taken]
        alone += some[taken:]
    if types[kind.positional] is str and len(alone) > 1:
        raise ValueError(f"{kind.positional} takes one value, got {' '.join(alone)}.")
    return [f"--{kind.positional}", *alone, *flags] if alone else flags


def _names(dataclass_types: Sequence[type]) -> set[str]:
    """Names of flags, earlier spellings included."""
    fields = {one.name for kind in dataclass_types for one in dataclasses.fields(kind) if one.init}
    return fields | _earlier_names(dataclass_types).keys()


def _earlier_names(dataclass_types: Sequence[type]) -> dict[str, str]:
    """Names of flags by their earlier spellings."""
    fields = [one for kind in dataclass_types for one in dataclasses.fields(kind)]
    return {
        alias.lstrip("-").replace("-", "_"): one.name for one in fields for alias in one.metadata.get("aliases", ())
    }


def with_current_names(values: dict[str, Any], *dataclass_types: type) -> dict[str, Any]:
    """Values by the current names of flags, where a file has earlier spellings."""
    earlier = _earlier_names(dataclass_types)
    return {earlier.get(key, key): value for key, value in values.items()}


def _name_in(name: str, known: set[str]) -> bool:
    """Whether a flag is known; flags that are true by default also have a form `no_NAME`."""
    return name in known or name.removeprefix("no_") in known


def _check_known(words: list[str], values: dict[str, Any], known: set[str], has_more: bool) -> None:
    """Checks the names of flags and keys.

    Raises:
        ValueError: if one is unknown, with the closest known name.
    """
    flags = [name for name, _ in _by_flag(words) if name]
    for name in [*sorted(values), *flags]:
        if _name_in(name, known):
            continue
        close = difflib.get_close_matches(name, sorted(known), n=1)
        lists = f"--{HELP} lists all" + f", and --{HELP_ALL} those of the Trainer" * has_more
        meant = f"did you mean {'--' * (name in flags)}{close[0]}?" if close else f"{lists}."
        what = f"there is no flag --{name}" if name in flags else f"the configuration has the unknown key {name!r}"
        raise ValueError(f"{what}; {meant}")


def _parse(
    dataclass_types: Sequence[type],
    words: list[str],
    values: dict[str, Any],
    presets: dict[str, dict[str, Any]] | None,
) -> tuple:
    parser = _Parser(dataclass_types, None)
    values = with_current_names(values, *dataclass_types)
    if presets:
        name = _given(words, values).get("preset", next(iter(presets)))
        if name not in presets:
            raise ValueError(f"preset {name!r} is not one of {', '.join(presets)}.")
        parser.set_defaults(**presets[name])
    # Flags cannot express None or [].
    empty = {key: value for key, value in values.items() if value is None or value == []}
    parser.set_defaults(**empty)
    of_file = [word for key, value in values.items() if key not in empty for word in _flag(key, value)]
    return parser.parse_args_into_dataclasses(of_file + words)


def _by_flag(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Names of flags, with the words of each, including itself; words before the first flag have the name `""`."""
    name, some = "", []
    for word in words:
        if word.startswith("--"):
            if some:
                yield name, some
            name, some = word[2:].partition("=")[0].replace("-", "_"), []
        some.append(word)
    if some:
        yield name, some


def _given(words: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """`values`, updated with the flags in `words`."""
    flags = {}
    for name, some in _by_flag(words):
        if name:
            value = some[0].partition("=")[2]
            flags[name] = " ".join([value] * bool(value) + some[1:]) or None
    return {**values, **flags}


def _values_of_file(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{str(path)!r} is neither a flag (--name value) nor a YAML file.")
    return read_yaml(path)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Reads the `name: value` lines of a YAML file.

    Raises:
        ValueError: if the file has anything else.
    """
    text = read_text(path)
    try:
        values = yaml.safe_load(text) or {}
    # Values that do not match their tag (`!!bool x`) raise various errors.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `name: value` lines, got {type(values).__name__}.")
    return values


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
