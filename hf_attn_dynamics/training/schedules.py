# Licensed under the Apache License, Version 2.0.
"""Schedules of the guidance weight and of the target number of heads."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..models.guidance_settings import check_guided_names


GUIDANCE_SCHEDULES = ("linear", "hold_linear", "constant", "hold")
"""Names of the schedules of the guidance weight, see [`guidance_weight_at`]."""

HOLDING = ("hold_linear", "hold")  # those that read the number of steps to hold


def guidance_weight_at(
    step: int, max_steps: int, initial: float, schedule: str = "linear", hold_steps: int = 0
) -> float:
    """Guidance weight α of one optimizer step (Deshpande & Narasimhan 2020, section 3.2).

    Args:
        step (`int`): Number of the step, from 0 to `max_steps - 1`.
        max_steps (`int`): Steps of the whole run.
        initial (`float`): α_0.
        schedule (`str`): `linear` decays from α_0 at the first step to 0 at the last; `hold_linear` holds α_0 for
            `hold_steps` steps first, as the paper's published code does; `constant` holds it throughout; `hold` holds
            it for `hold_steps` steps and is 0 from then on.
        hold_steps (`int`): Only used by `hold_linear` and `hold`.

    Returns:
        `float`: α, at least 0.

    Example:
        >>> [guidance_weight_at(step, 5, 8.0) for step in range(5)]
        [8.0, 6.0, 4.0, 2.0, 0.0]
    """
    if schedule == "constant":
        return initial
    if schedule == "hold":
        return initial if step < hold_steps else 0.0
    start = hold_steps if schedule == "hold_linear" else 0
    last = max_steps - 1
    if step <= start:
        return initial
    return initial * max(0.0, (last - step) / (last - start)) if last > start else 0.0


@dataclass(frozen=True)
class GuidanceSchedules:
    """Schedules of the guidance weight, one for all patterns and targets or several by name.

    Args:
        schedule (`str` or `dict[str, str]`): One of `GUIDANCE_SCHEDULES`; or one by pattern or target, `linear` for
            names that are left out.
        hold_steps (`int` or `dict[str, int]`): Steps that schedules of `HOLDING` hold α_0, 0 for names that are left
            out.

    Raises:
        ValueError: if a schedule is unknown, steps are negative or not read by the schedule, or `hold` has no steps.

    Example:
        >>> schedules = GuidanceSchedules({"avoided": "hold"}, {"avoided": 2})
        >>> [schedules.weights_at(step, 5, 8.0, ["avoided", "prev"]) for step in (1, 2)]
        [{'avoided': 8.0, 'prev': 6.0}, {'avoided': 0.0, 'prev': 4.0}]
        >>> schedules.weights_at(1, 5, 8.0, ["next", "prev"])
        6.0
    """

    schedule: str | Mapping[str, str] = "linear"
    hold_steps: int | Mapping[str, int] = 0

    def __post_init__(self):
        by_name = isinstance(self.schedule, Mapping)
        for name, schedule in self.schedule.items() if by_name else [(None, self.schedule)]:
            if not isinstance(schedule, str) or schedule not in GUIDANCE_SCHEDULES:
                raise ValueError(
                    f"guidance_schedule{_of(name)} must be one of {', '.join(GUIDANCE_SCHEDULES)}, got {schedule!r}."
                )
        has_steps = isinstance(self.hold_steps, Mapping)
        for name, steps in self.hold_steps.items() if has_steps else [(None, self.hold_steps)]:
            if steps < 0:
                raise ValueError(f"guidance_hold_steps{_of(name)} must be at least 0, got {steps}.")
            read = self._schedules(name)
            if steps and not any(schedule in HOLDING for schedule in read):
                raise ValueError(
                    f"guidance_hold_steps={steps}{_of(name)} needs guidance_schedule='hold_linear' or "
                    f"'hold', got {self.schedule!r}."
                )
        if by_name or not has_steps:
            self._check_held(self.schedule if by_name else [None])

    def _schedules(self, name: str | None) -> Collection[str]:
        """The schedule of a name, or all schedules."""
        if not isinstance(self.schedule, Mapping):
            return [self.schedule]
        return self.schedule.values() if name is None else [self.schedule.get(name, "linear")]

    def _check_held(self, names: Collection[str | None]) -> None:
        for name in names:
            if self._of(name) == ("hold", 0):
                raise ValueError(
                    f"guidance_schedule='hold'{_of(name)} needs guidance_hold_steps, the number of steps with a "
                    f"guidance weight, got {self.hold_steps}."
                )

    def _of(self, name: str | None) -> tuple[str, int]:
        """Schedule and steps of a name."""
        (schedule,) = self._schedules(name)
        steps = self.hold_steps.get(name, 0) if isinstance(self.hold_steps, Mapping) else self.hold_steps
        return schedule, steps if schedule in HOLDING else 0

    def check_names(self, names: Collection[str]) -> None:
        """Checks the schedules against the patterns and targets of a model.

        Raises:
            ValueError: if one of another name is given, or `hold` lacks the steps of a name.
        """
        for argument, given in (("guidance_schedule", self.schedule), ("guidance_hold_steps", self.hold_steps)):
            if isinstance(given, Mapping):
                check_guided_names(f"{argument}={dict(given)}", given, names)
        self._check_held(names)

    def weights_at(
        self, step: int, max_steps: int, initial: float, names: Collection[str]
    ) -> float | dict[str, float]:
        """α of one optimizer step: a number if all names have the same schedule, or one by name.

        Args:
            step, max_steps, initial: See [`guidance_weight_at`].
            names (collection of `str`): Patterns and targets.
        """
        chosen = {name: self._of(name) for name in names}
        if len(set(chosen.values())) == 1:
            return guidance_weight_at(step, max_steps, initial, *next(iter(chosen.values())))
        return {name: guidance_weight_at(step, max_steps, initial, *own) for name, own in chosen.items()}


def _of(name: str | None) -> str:
    return "" if name is None else f" of {name!r}"


def target_heads_at(step: int, max_steps: int, total: float, target: float, warmup: float = 0.5) -> float:
    """Target at one optimizer step: decreases linearly from `total` to `target`, then stays.

    Targets are numbers of open heads, or fractions of the cost of the dense model.

    Args:
        step (`int`): Number of the step, from 0.
        max_steps (`int`): Steps of the whole run.
        total (`float`): Target at the start.
        target (`float`): Target at the end.
        warmup (`float`): Fraction of the run over which the target decreases, from 0 to 1.

    Returns:
        `float`: the target, not rounded.

    Example:
        >>> [target_heads_at(step, 4, 12, 4) for step in range(5)]
        [12.0, 8.0, 4.0, 4.0, 4.0]
    """
    falling = warmup * max_steps
    fraction = 1.0 if step >= falling else step / falling
    return float(total - fraction * (total - target))
