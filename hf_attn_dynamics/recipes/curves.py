# Licensed under the Apache License, Version 2.0.
"""Losses over training, and when the loss of one run reaches the final loss of another."""

from collections.abc import Mapping, Sequence
from typing import Any


def early_crossing(crossing: tuple[int, float] | None, steps: int) -> tuple[int, float] | None:
    """Step and loss of a crossing, or None if it is at the last step."""
    return crossing if crossing is not None and crossing[0] < steps else None


def drawn_log(history: Sequence[Mapping[str, Any]], keys: Sequence[str] = ("task_loss", "eval_loss")) -> list[dict]:
    """What `plot_pretraining` draws of a log: losses by step, and guidance."""
    shown, entries = {*keys, "guidance_loss", "guidance_weight"}, []
    for entry in history:
        # Without the weight of the first step, which has its own entry.
        by_name = {key for key in entry if key.startswith("guidance_weight_") and "guidance_loss" in entry}
        entries.append({key: value for key, value in entry.items() if key in shown | by_name})
    return [{"step": entry["step"], **own} for entry, own in zip(history, entries) if own]


def crossing_line(run: str, other: str, step: int | None, steps: int) -> str:
    """A sentence that says when one run reaches the final loss of another.

    Example:
        >>> crossing_line("The guided run", "the unguided one", 250, 800)
        'The guided run reached the end of the unguided one at step 250 of 800 (31%).'
        >>> crossing_line("The guided run", "the unguided one", 800, 800)
        'The guided run reached the end of the unguided one at its last step only.'
    """
    if step is None:
        return f"{run} did not reach the end of {other} within {steps} steps."
    if step == steps:
        return f"{run} reached the end of {other} at its last step only."
    return f"{run} reached the end of {other} at step {step} of {steps} ({step / steps:.0%})."
