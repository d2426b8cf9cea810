# Licensed under the Apache License, Version 2.0.
"""Schedules of the guidance weight and of the target number of heads."""

GUIDANCE_SCHEDULES = ("linear", "hold_linear", "constant")
"""Names of the schedules of the guidance weight, see [`guidance_weight_at`]."""


def guidance_weight_at(
    step: int, max_steps: int, initial: float, schedule: str = "linear", hold_steps: int = 0
) -> float:
    """Guidance weight α of one optimizer step (Deshpande & Narasimhan 2020, section 3.2).

    Args:
        step (`int`): Number of the step, from 0 to `max_steps - 1`.
        max_steps (`int`): Steps of the whole run.
        initial (`float`): α_0.
        schedule (`str`): `linear` decays from α_0 at the first step to 0 at the last; `hold_linear` holds α_0 for
            `hold_steps` steps first, as the paper's published code does; `constant` holds it throughout.
        hold_steps (`int`): Only used by `hold_linear`.

    Returns:
        `float`: α, at least 0.

    Example:
        >>> [guidance_weight_at(step, 5, 8.0) for step in range(5)]
        [8.0, 6.0, 4.0, 2.0, 0.0]
    """
    if schedule == "constant":
        return initial
    start = hold_steps if schedule == "hold_linear" else 0
    last = max_steps - 1
    if step <= start:
        return initial
    return initial * max(0.0, (last - step) / (last - start)) if last > start else 0.0


def target_heads_at(step: int, max_steps: int, total: int, target: int, warmup: float = 0.5) -> float:
    """Target number of open heads at one optimizer step: decreases linearly from `total` to `target`, then stays.

    Args:
        step (`int`): Number of the step, from 0.
        max_steps (`int`): Steps of the whole run.
        total (`int`): Heads at the start.
        target (`int`): Heads at the end.
        warmup (`float`): Fraction of the run over which the number decreases, from 0 to 1.

    Returns:
        `float`: number of heads, not rounded.

    Example:
        >>> [target_heads_at(step, 4, 12, 4) for step in range(5)]
        [12.0, 8.0, 4.0, 4.0, 4.0]
    """
    falling = warmup * max_steps
    fraction = 1.0 if step >= falling else step / falling
    return float(total - fraction * (total - target))
