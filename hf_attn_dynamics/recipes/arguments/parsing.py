# Licensed under the Apache License, Version 2.0.
"""How arguments are read: `[CONFIG.yaml] [--flag value …]`."""

import argparse
import ast
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
    """Flags with their defaults, below a description that keeps its lines."""


class _Parser(HfArgumentParser):
    """Says what is wrong in one line, not in the usage of two hundred flags, and in its help what a recipe does."""

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
) -> tuple:
    """Arguments of a recipe: `[CONFIG.yaml] [--flag value …]`. Flags win over the file, the file over the preset.

    Args:
        dataclass_types (`type`): Dataclasses whose fields are the flags; the first one has those of the recipe itself,
            which are all that `--help` explains: `--help_all` explains all. If it has a class variable `positional`,
            the name of one of its flags, that flag takes the words that no other flag takes; there is no file then.
        presets (`dict`, *optional*): Defaults of some flags, by the names that the flag `--preset` takes; the first
            one is used if none is named.
        argv (`list[str]`, *optional*): Words of the command line; those of this process by default.
        description (`str`, *optional*): What `--help` says before the flags.

    Returns:
        `tuple`: one instance of each dataclass.

    Raises:
        SystemExit: with status 2 and one line on standard error, if a flag, key or value is not possible; with status
            0 once `--help` is printed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _explain(dataclass_types, argv, description, has_more=len(dataclass_types) > 1)
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
) -> None:
    """Explains or refuses the flags of a recipe before PyTorch is imported.

    Flags of a trainer are only known by name then, and the values of the others are checked as far as their
    dataclass does: [`parse_yaml_or_flags`] reads all of them later.

    Args:
        arguments (`type`): The dataclass of the flags of the recipe itself.
        has_trainer (`bool`): Whether those of a trainer are possible, too.
        presets, argv, description: See [`parse_yaml_or_flags`].

    Raises:
        SystemExit: as [`parse_yaml_or_flags`] does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if has_trainer and f"--{HELP_ALL}" in argv:
        return
    _explain((arguments,), argv, description, has_more=has_trainer)
    own = _names((arguments,))
    with refuse_bad_input():
        words, values = _words_and_values(argv, arguments)
        _check_known(words, values, own | (trainer_flags() if has_trainer else set()), has_more=has_trainer)
        words = [word for name, some in _by_flag(words) for word in some if _name_in(name, own)]
        values = {key: value for key, value in values.items() if key in own}
        presets = {name: {k: v for k, v in of.items() if k in own} for name, of in (presets or {}).items()}
        _parse((arguments,), words, values, presets)


def trainer_flags() -> set[str]:
    """Names of the flags of training arguments, read off their source code: importing it would take seconds."""
    transformers = Path(importlib.util.find_spec("transformers").origin)
    files = [transformers.with_name(name) for name in ("training_args.py", "training_args_seq2seq.py")]
    files.append(Path(__file__).parents[2] / "training" / "arguments.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = [
        node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and "Arguments" in node.name
    ]
    names = {node.target.id for one in classes for node in one.body if isinstance(node, ast.AnnAssign)}
    return {name for name in names if not name.startswith("_")}


def _explain(dataclass_types: Sequence[type], argv: list[str], description: str | None, has_more: bool) -> None:
    """Prints the help that is asked for, if any is, and ends the program."""
    if f"--{HELP_ALL}" in argv:
        types, epilog = dataclass_types, None
    elif f"--{HELP}" in argv or "-h" in argv:
        types = dataclass_types[:1]
        epilog = f"--{HELP_ALL} explains the flags of the Trainer of Transformers as well." if has_more else None
    else:
        return
    _Parser(types, description, epilog).print_help()
    raise SystemExit(0)


def _words_and_values(argv: list[str], kind: type | None = None) -> tuple[list[str], dict[str, Any]]:
    """Flags with their words, and the values of the YAML file that may come before."""
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
    """Names of flags, and those that they go by as well."""
    fields = [one for kind in dataclass_types for one in dataclasses.fields(kind) if one.init]
    aliases = {alias.lstrip("-") for one in fields for alias in one.metadata.get("aliases", ())}
    return aliases | {one.name for one in fields}


def _name_in(name: str, known: set[str]) -> bool:
    """Whether a flag is known: what is true by default has a flag that says no, too."""
    return name in known or name.removeprefix("no_") in known


def _check_known(words: list[str], values: dict[str, Any], known: set[str], has_more: bool) -> None:
    """Refuses flags and keys that there are none of.

    Raises:
        ValueError: naming the first, and the one that may be meant.
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
    if presets:
        name = _given(words, values).get("preset", next(iter(presets)))
        if name not in presets:
            raise ValueError(f"preset {name!r} is not one of {', '.join(presets)}.")
        parser.set_defaults(**presets[name])
    # No flag can say nothing.
    empty = {key: value for key, value in values.items() if value is None or value == []}
    parser.set_defaults(**empty)
    of_file = [word for key, value in values.items() if key not in empty for word in _flag(key, value)]
    return parser.parse_args_into_dataclasses(of_file + words)


def _by_flag(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Names of flags, and the words of each, itself included; words before the first flag have the name `""`."""
    name, some = "", []
    for word in words:
        if word.startswith("--"):
            if some:
                yield name, some
            name, some = word[2:].partition("=")[0].replace("-", "_"), []
        some.append(word)
    if some:
        yield name, some


def given_values(argv: list[str] | None = None) -> dict[str, Any]:
    """What the command line of a recipe says, before it is known which flags there are.

    Args:
        argv (`list[str]`, *optional*): Words of the command line; those of this process by default.

    Returns:
        `dict[str, Any]`: values by the names of keys of the YAML file, and of flags, which win. Those of flags are
        words as they were written, `None` for a flag without any.

    Raises:
        ValueError: if the first word is neither a flag nor a YAML file.

    Example:
        >>> given_values(["--model", "lstm", "--keep", "4", "2", "--from_scratch"])
        {'model': 'lstm', 'keep': '4 2', 'from_scratch': None}
    """
    return _given(*_words_and_values(list(sys.argv[1:] if argv is None else argv)))


def _given(words: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """`values`, and those of flags among words."""
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
    """The `name: value` lines of a YAML file.

    Raises:
        ValueError: naming the file, if it is not such a file.
    """
    text = read_text(path)
    try:
        values = yaml.safe_load(text) or {}
    # A value may not be what its tag says (`!!bool x`), which is found by whatever fails then.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `name: value` lines, got {type(values).__name__}.")
    return values


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
