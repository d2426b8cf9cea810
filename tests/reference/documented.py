# Licensed under the Apache License, Version 2.0.
"""Whether the summary of a recipe has the keys that its dataclass describes."""

import importlib
from collections.abc import Iterable
from types import ModuleType


def undocumented(recipe: ModuleType, summary: Iterable[str], **placeholders: Iterable[str]) -> set[str]:
    """Keys of a summary, but for versions, that its dataclass does not describe.

    Args:
        recipe (module): The recipe.
        summary (iterable of `str`): The keys.
        placeholders (iterable of `str`): What words in capitals in the description stand for, each.
    """
    name = recipe.__name__.rpartition(".")[2]
    described = importlib.import_module(f"hf_attn_dynamics.recipes.summaries.{name}").SUMMARY.documentation()
    words = {key for keys in described for key in keys.split(", ")}
    for name, values in placeholders.items():
        words = {word.replace(name, value) for word in words for value in values}
    return {key for key in summary if key not in words and not key.endswith("_version")}
