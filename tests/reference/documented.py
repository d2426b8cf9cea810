# Licensed under the Apache License, Version 2.0.
"""Whether the docstring of a recipe lists what is in its summary."""

import re
from collections.abc import Iterable
from types import ModuleType


def listed_keys(lines: str) -> set[str]:
    """Keys in front of the lines of such a list, up to two spaces or "and"."""
    fronts = re.findall(r"^ {4}(\w.*?),?(?: {2,}|, and |$)", lines, flags=re.MULTILINE)
    return {key for front in fronts for key in front.split(", ")}


def undocumented(recipe: ModuleType, summary: Iterable[str], **placeholders: Iterable[str]) -> set[str]:
    """Keys of a summary, but for versions, that the docstring of the recipe does not list.

    It lists them after "Keys of `summary.json`", in front of their lines and up to two spaces.

    Args:
        recipe (module): The recipe.
        summary (iterable of `str`): The keys.
        placeholders (iterable of `str`): What words in capitals in the docstring stand for, each.
    """
    listed = recipe.__doc__.partition("Keys of `summary.json`")[2]
    fronts = re.findall(r"^(?: {4}|And )(\S.*?)(?: {2,}|$)", listed, re.MULTILINE)
    words = {word for front in fronts for word in re.findall(r"\w+", front)}
    for name, values in placeholders.items():
        words = {word.replace(name, value) for word in words for value in values}
    return {key for key in summary if key not in words and not key.endswith("_version")}
