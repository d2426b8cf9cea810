# Licensed under the Apache License, Version 2.0.
"""Values from the log of a run."""


def mean_over_steps(log_history: list[dict], key: str) -> float | None:
    """Mean over all steps of a value that was logged as a mean over each logging window.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        key (`str`): Name of the value, such as `"task_loss"`.

    Returns:
        `float` or `None`: `None` if the value was never logged.
    """
    total, last = 0.0, 0
    for entry in log_history:
        if key in entry:
            total += entry[key] * (entry["step"] - last)
            last = entry["step"]
    return total / last if last else None


def first_at_or_below(log_history: list[dict], loss: float, key: str = "eval_loss") -> tuple[int, float] | None:
    """Step and loss of the first evaluation at or below a loss.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        loss (`float`): The loss to reach.
        key (`str`): Its name in the log.

    Returns:
        `tuple[int, float]` or `None`: `None` if it is never reached.
    """
    return next(((e["step"], e[key]) for e in log_history if e.get(key, float("inf")) <= loss), None)
