# Licensed under the Apache License, Version 2.0.
"""How the guidance weight α falls over a run."""

GUIDANCE_SCHEDULES = ("linear", "hold_linear", "constant")


def guidance_weight_at(
    step: int, max_steps: int, initial: float, schedule: str = "linear", hold_steps: int = 0
) -> float:
    """Guidance weight α of one optimizer step (Deshpande & Narasimhan 2020, section 3.2).

    Args:
        step (`int`): Number of the step, from 0 to `max_steps - 1`.
        max_steps (`int`): Steps of the whole run.
        initial (`float`): α_0.
        schedule (`str`): `linear` falls from α_0 at the first step to 0 at the last; `hold_linear` stays at α_0 for
            `hold_steps` steps before it falls, as the paper's published code does; `constant` stays.
        hold_steps (`int`): Only read by `hold_linear`.

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
    """Number of heads that are to be open at one optimizer step: falls linearly from all to the target, then stays.

    Args:
        step (`int`): Number of the step, from 0 on.
        max_steps (`int`): Steps of the whole run.
        total (`int`): Heads at the start.
        target (`int`): Heads at the end.
        warmup (`float`): Share of the run over which the number falls, from 0 to 1.

    Returns:
        `float`: heads, no whole number on the way.

    Example:
        >>> [target_heads_at(step, 4, 12, 4) for step in range(5)]
        [12.0, 8.0, 4.0, 4.0, 4.0]
    """
    falling = warmup * max_steps
    share = 1.0 if step >= falling else step / falling
    return float(total - share * (total - target))
