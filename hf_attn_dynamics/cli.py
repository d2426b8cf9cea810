# Licensed under the Apache License, Version 2.0.
"""The command line: `hf-attn NAME …` and `python -m hf_attn_dynamics NAME …` run the recipe NAME.

Importing this file imports neither PyTorch nor Transformers.
"""

import ast
import difflib
import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from .recipes import JOBS, PROGRAM


def jobs() -> dict[str, str]:
    """One-line descriptions of the recipes, by name."""
    return {name: _documentation(name).partition("\n")[0] for name in JOBS}


def main(words: list[str] | None = None) -> None:
    """Runs a recipe, or lists the recipes.

    Args:
        words (`list[str]`, *optional*): Name of the recipe and its arguments; defaults to the command line.

    Raises:
        SystemExit: with status 2 and one line on standard error, if there is no such recipe, a required library is
            not installed, or the recipe exits.
    """
    words = sys.argv[1:] if words is None else words
    if not words or words[0] in ("-h", "--help"):
        width = max(map(len, JOBS))
        lines = [f"  {name:{width}}  {line}" for name, line in jobs().items()]
        print(f"usage: {PROGRAM} NAME [CONFIG.yaml] [--flag value …]\n", *lines, sep="\n")
        print(f"\n{PROGRAM} NAME --help describes the flags of a recipe.")
        return
    # As in flags, hyphens stand for underscores.
    name = words[0].replace("-", "_")
    if name not in JOBS:
        close = difflib.get_close_matches(name, JOBS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"recipes are {', '.join(JOBS)}."
        _refuse(f"there is no recipe {words[0]!r}; {meant}")
    sys.argv = [f"{PROGRAM} {name}", *words[1:]]
    run(name)


def run(name: str) -> None:
    """Runs a recipe with the command line of this process.

    Args:
        name (`str`): Name of the recipe.

    Raises:
        SystemExit: see [`main`].
    """
    if not sys.stderr.isatty():
        # In a log file, each update of a progress bar is a line; tqdm reads the variable when it is imported.
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    try:
        arguments = importlib.import_module(f".recipes.arguments.{name}", __package__)
        summary = _summary(name)
        _check_early(name, arguments, summary)
        recipe = importlib.import_module(f".recipes.{name}", __package__)
        from .recipes.run import run_recipe
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        _refuse(f"{name} needs {error.name}, which is not installed: pip install 'hf_attn_dynamics[recipes]'.")
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped before anything was written.\n")
        raise SystemExit(130) from None
    run_recipe(recipe.main, arguments.PRESETS, summary)


def _check_early(name: str, arguments: ModuleType, summary: type | None) -> None:
    """Prints help or reports invalid flags before PyTorch is imported."""
    from .recipes.arguments.parsing import check_early
    from .recipes.summaries.base import explained

    settings = {"description": _documentation(name), "keys": explained(summary) if summary is not None else None}
    check_early(arguments.ARGUMENTS, arguments.HAS_TRAINER, arguments.PRESETS, **settings)


def _summary(name: str) -> type | None:
    """The dataclass of a recipe's summary, if it has one."""
    module = f"{__package__}.recipes.summaries.{name}"
    return importlib.import_module(module).SUMMARY if find_spec(module) is not None else None


def _documentation(name: str) -> str:
    """The docstring of a recipe, without importing it."""
    text = (Path(__file__).parent / "recipes" / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text), clean=False)


def _refuse(message: str) -> None:
    sys.stderr.write(f"{PROGRAM}: error: {message}\n")
    raise SystemExit(2)
