# Licensed under the Apache License, Version 2.0.
"""How heads change while a model is trained: observers look on at a fixed probe, time and again."""

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..analysis.head_scores import HeadScores, tabulate
from ..analysis.head_timeline import HeadTimeline
from ..analysis.observers.base import Observer, tell_tokenizer
from ..analysis.observers.observation import observe
from ..models.head_gates import expected_open_heads
from ..models.head_roles import locate_heads
from .random_state import random_state_kept
from .resumable_callback import LastStepCallback


TIMELINE = "head_dynamics.csv"
GATE, GATE_OPEN, GUIDANCE_WEIGHT = "gate", "gate_open", "guidance_weight"  # statistics that need no observer


class HeadDynamicsCallback(LastStepCallback):
    """Measures all heads on a fixed probe while a model is trained, and keeps a timeline of what it finds.

    Before the first optimizer step, after every `every` of them, and once more after the last, fresh copies of the
    observers look on while the model reads the probe: in evaluation mode, without gradients, in the precision that
    the trainer evaluates in. Training goes on as if nothing had happened: weights, losses and random numbers are the
    same, bit for bit. Works with [`HeadwiseTrainer`] and the stock `Trainer`, and goes on with a run that is resumed:
    the timeline is the one of a run that was never stopped. All processes measure the same, and the main one writes;
    models whose weights are spread over processes (FSDP, ZeRO-3) cannot be measured. With `load_best_model_at_end`,
    a run that is stopped early ends without a measurement.

    Statistics are named after their observers; where a result is a table of several, `OBSERVER/NAME`. Models with
    gates have two more, `gate_open`, the probability that a gate is not zero, and `gate`, its factor outside training.
    `guidance_weight` is α as [`HeadwiseTrainer`] logs it, when it does.

    Args:
        observers (`list[Observer]`): What is measured, see [`observe`]. Their results are [`HeadScores`], or have a
            method `head_scores()` that returns some by name.
        probe_data (iterable of `dict`): Batches of tensors as the model takes them; kept on the CPU. Measuring takes
            about two forward passes over them.
        every (`int`): Optimizer steps between two measurements.
        folder (`str` or `Path`, *optional*): Where `head_dynamics.csv` is kept, whole after each measurement;
            `args.output_dir` by default.
        log (callable, *optional*): Takes the means over the heads of each kind of site, `heads/STATISTIC/SITE`, and
            `heads/seconds`, what the measurement took. With `trainer.log` they reach trackers; by default they are an
            entry of `trainer.state.log_history`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): As of [`observe`]; by default the trainer's
            `processing_class`, where that is or holds a tokenizer.

    Attributes:
        history (`HeadTimeline`): All that was measured so far.
        seconds (`float`): Time that all measurements of the run took together.

    Raises:
        ValueError: if `every` is no number of steps, there is no observer or no probe, or two statistics have the same
            name; before the first step if a result cannot be read as scores of heads.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadConfidence, HeadDynamicsCallback
        >>> probe = [{"input_ids": torch.tensor([[0, 5, 7, 8, 2]]), "attention_mask": torch.ones(1, 5)}]
        >>> callback = HeadDynamicsCallback([HeadConfidence()], probe, every=50)
        >>> len(callback.history)  # nothing yet: give it to a trainer, as in callbacks=[callback]
        0
    """

    made_of = "its observers and probe"

    def __init__(
        self,
        observers: Iterable[Observer],
        probe_data: Iterable[Mapping[str, Any]],
        every: int = 100,
        folder: str | Path | None = None,
        log: Callable[[dict[str, float]], None] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, at least 1, got {every!r}.")
        self.observers = list(observers)
        self.probe_data = [_checked_batch(number, batch) for number, batch in enumerate(probe_data)]
        self.every = every
        self.folder = folder
        self.log = log
        self.tokenizer = tokenizer
        tell_tokenizer([], tokenizer)  # refuses what is none
        if not self.probe_data:
            raise ValueError("probe_data is empty: heads need at least one batch to be measured on.")
        _check_observers(self.observers)
        self._forget()

    def _forget(self) -> None:
        self.history, self.seconds = HeadTimeline(), 0.0

    def _remembered(self) -> dict[str, Any]:
        return {"history": self.history.to_csv(), "seconds": self.seconds}

    def _recall(self, remembered: dict[str, Any]) -> None:
        self.history = HeadTimeline.from_csv(remembered["history"])
        self.seconds = remembered["seconds"]

    def on_step_begin(self, args, state, control, **kwargs):
        # Not when the step before ends: what is measured then would count as time of that step.
        if state.global_step % self.every == 0:
            self._measure(args, state, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if GUIDANCE_WEIGHT in logs:
            self.history.record(state.global_step, GUIDANCE_WEIGHT, logs[GUIDANCE_WEIGHT])

    def _measure(self, args, state, model=None, processing_class=None, **kwargs) -> None:
        from accelerate.utils import extract_model_from_parallel

        started = time.perf_counter()
        # As it was given to the trainer, in the precision that Accelerate has it compute in.
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        tokenizer = self.tokenizer
        if tokenizer is None:
            # Processors of several kinds of data hold one.
            tokenizer = getattr(processing_class, "tokenizer", processing_class)
            tokenizer = tokenizer if hasattr(tokenizer, "all_special_ids") else None
        hidden = args.disable_tqdm or not state.is_world_process_zero
        measured = {**self._observe(model, tokenizer, hidden), **gate_scores(model)}
        for statistic, scores in measured.items():
            self.history.record(state.global_step, statistic, scores)
        if state.is_world_process_zero:
            self.history.save(Path(self.folder or args.output_dir) / TIMELINE)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        means = {
            f"heads/{statistic}/{kind}": table.nanmean().item()
            for statistic, scores in measured.items()
            for kind, table in scores.items()
        }
        means["heads/seconds"] = seconds
        if self.log is None:
            state.log_history.append({**means, "epoch": state.epoch, "step": state.global_step})
        else:
            self.log(means)

    @torch.no_grad()
    def _observe(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, hide_progress: bool = True
    ) -> dict[str, HeadScores]:
        from accelerate.utils import send_to_device

        observers = copy.deepcopy(self.observers)
        with random_state_kept(model.device), observe(model, *observers, tokenizer=tokenizer) as seen:
            # The bar of the trainer stands still meanwhile.
            for batch in tqdm(self.probe_data, "measuring heads", leave=False, disable=hide_progress):
                model(**send_to_device(batch, model.device))
        measured = {}
        for name, result in seen.results().items():
            if isinstance(result, HeadScores):
                measured[name] = result
            elif hasattr(result, "head_scores"):
                measured |= {f"{name}/{part}": scores for part, scores in result.head_scores().items()}
            else:
                raise ValueError(
                    f"the result of observer {name!r}, {type(result).__name__}, is no scores of heads: return "
                    "HeadScores, or an object with a method head_scores() that returns some by name."
                )
        return measured


@torch.no_grad()
def gate_scores(model: PreTrainedModel) -> dict[str, HeadScores]:
    """State of the gate of each head.

    Args:
        model (`PreTrainedModel`): Any model.

    Returns:
        `dict[str, HeadScores]`: `gate_open`, P(gate ≠ 0), and `gate`, its factor outside training; NaN where a head is
        removed. Empty for a model without gates.
    """
    gates = model.head_gates() if hasattr(model, "head_gates") else {}
    if not gates:
        return {}
    open_probability = {
        # Of each gate by itself.
        site: expected_open_heads(gate.locations()[:, None], gate.settings.temperature, gate.settings.limits)
        for site, gate in gates.items()
    }
    settled = {site: gate.settled() for site, gate in gates.items()}
    layers = locate_heads(model)
    return {GATE_OPEN: tabulate(layers, open_probability), GATE: tabulate(layers, settled)}


def _checked_batch(number: int, batch: Mapping[str, Any]) -> dict[str, Any]:
    from accelerate.utils import send_to_device

    if not isinstance(batch, Mapping) or not any(torch.is_tensor(value) for value in batch.values()):
        held = {type(value).__name__ for value in batch.values()} if isinstance(batch, Mapping) else ()
        kinds = f" of {', '.join(sorted(held))}" if held else ""
        raise ValueError(
            f"batch {number} of probe_data must be a dictionary of tensors, got {type(batch).__name__}{kinds}; "
            "a DataLoader makes tensors of the rows of a data set."
        )
    return send_to_device(dict(batch), "cpu")


def _check_observers(observers: list[Observer]) -> None:
    if not observers:
        raise ValueError("observers are empty: nothing to measure; pass some, as in [HeadConfidence()].")
    for observer in observers:
        if not isinstance(observer, Observer):
            raise ValueError(f"observers must be instances of Observer, got {observer!r}.")
        if not observer.name:
            raise ValueError(f"{type(observer).__name__} has no name that its statistic could have; set its `name`.")
    names = Counter([GATE, GATE_OPEN, GUIDANCE_WEIGHT, *(observer.name for observer in observers)])
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two statistics would be called {repeated[0]!r}; give an observer another `name`.")
