# Licensed under the Apache License, Version 2.0.
"""Whether the summary of a recipe has the keys that its dataclass describes."""

import importlib
import re
from collections.abc import Iterable
from types import ModuleType


def listed_keys(lines: str) -> set[str]:
    """Keys in front of the lines of such a list, up to two spaces or "and"."""
    fronts = re.findall(r"^ {4}(\w.*?),?(?: {2,}|, and |$)", lines, flags=re.MULTILINE)
    return {key for front in fronts for key in front.split(", ")}


def undocumented(recipe: ModuleType, summary: Iterable[str], **placeholders: Iterable[str]) -> set[str]:
    """Keys of a summary, but for versions, that neither its dataclass nor the docstring of the recipe describes.

    Args:
        recipe (module): The recipe.
        summary (iterable of `str`): The keys.
        placeholders (iterable of `str`): What words in capitals in the description stand for, each.
    """
    name = recipe.__name__.rpartition(".")[2]
    try:
        described = importlib.import_module(f"hf_attn_dynamics.recipes.summaries.{name}").SUMMARY.documentation()
        words = {key for keys in described for key in keys.split(", ")}
    except ModuleNotFoundError:
        listed = recipe.__doc__.partition("Keys of `summary.json`")[2]
        fronts = re.findall(r"^(?: {4}|And )(\S.*?)(?: {2,}|$)", listed, re.MULTILINE)
        words = {word for front in fronts for word in re.findall(r"\w+", front)}
    for name, values in placeholders.items():
        words = {word.replace(name, value) for word in words for value in values}
    return {key for key in summary if key not in words and not key.endswith("_version")}
