# Licensed under the Apache License, Version 2.0.
"""Measurements of all heads on fixed probe data during training."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..analysis.head_scores import HeadScores, tabulate
from ..analysis.head_timeline import HeadTimeline
from ..analysis.observers.base import Observer, tell_tokenizer
from ..analysis.observers.measured_scores import measured_scores, probe_batches
from ..models.head_roles import locate_heads
from .head_loss import INITIAL_WEIGHT_KEY
from .random_state import random_state_kept
from .resumable_callback import LastStepCallback


TIMELINE = "head_dynamics.csv"
"""File of the history in `output_dir`, see [`HeadDynamicsCallback`]."""
GATE, GATE_OPEN, GUIDANCE_WEIGHT = "gate", "gate_open", "guidance_weight"  # statistics that need no observer


class HeadDynamicsCallback(LastStepCallback):
    """Measures all heads on fixed probe data during training, and writes their timeline.

    Before the first optimizer step, after every `every` steps and after the last one, the model reads the probe data
    under fresh copies of the observers, in evaluation mode, without gradients, in the precision of the trainer's
    evaluation. Measuring does not change training: weights, losses and random numbers are bitwise the same. Works with
    [`HeadwiseTrainer`] and the stock `Trainer`; a resumed run has the same timeline as an uninterrupted one. All
    processes measure, and the main process writes; sharded models (FSDP, ZeRO-3) cannot be measured. A run with
    `load_best_model_at_end` that stops early ends without a measurement.

    Statistics are named after their observers, or `OBSERVER/NAME` if an observer has several. Models with gates have
    two more: `gate_open`, the probability that a gate is not zero, and `gate`, its value outside training.
    `guidance_weight` is α, if [`HeadwiseTrainer`] logs it; if patterns and targets have different schedules, each has
    its `guidance_weight_NAME`.

    Args:
        observers (`list[Observer]`): Observers, see [`observe`]. Their results must be [`HeadScores`], or have a
            method `head_scores()` that returns several by name.
        probe_data (`dict` or iterable of `dict`): Batches of tensors for the model, or a single one, kept on the CPU.
            A measurement takes about two forward passes over them.
        every (`int`): Optimizer steps between two measurements.
        folder (`str` or `Path`, *optional*): Folder of `head_dynamics.csv`, which is rewritten after each measurement;
            defaults to `args.output_dir`.
        log (callable, *optional*): Takes the means over the heads of each kind of site, `heads/STATISTIC/SITE`, and
            the time of the measurement, `heads/seconds`; for example `trainer.log`. By default they are appended to
            `trainer.state.log_history`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): See [`observe`]; defaults to the tokenizer in the trainer's
            `processing_class`, if any.

    Attributes:
        history (`HeadTimeline`): All measurements so far; `history.plot` draws them, and `history.save_page` writes an
            HTML page.
        seconds (`float`): Total time of all measurements.

    Raises:
        ValueError: if `every` is not a positive integer, observers or probe data are empty, or two statistics have the
            same name; before the first step if a result has no scores of heads.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadConfidence, HeadDynamicsCallback
        >>> probe = [{"input_ids": torch.tensor([[0, 5, 7, 8, 2]]), "attention_mask": torch.ones(1, 5)}]
        >>> callback = HeadDynamicsCallback([HeadConfidence()], probe, every=50)
        >>> len(callback.history)  # empty until it is passed to a trainer, as in callbacks=[callback]
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
        self.probe_data = probe_batches(probe_data)
        self.every = every
        self.folder = folder
        self.log = log
        self.tokenizer = tokenizer
        tell_tokenizer([], tokenizer)  # raises ValueError for other objects
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
        # At the beginning of a step, since the end of the previous one belongs to its measured time.
        if state.global_step % self.every == 0:
            self._measure(args, state, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, value in logs.items():
            if name == GUIDANCE_WEIGHT or (name.startswith(f"{GUIDANCE_WEIGHT}_") and name != INITIAL_WEIGHT_KEY):
                self.history.record(state.global_step, name, value)

    def _measure(self, args, state, model=None, processing_class=None, **kwargs) -> None:
        from accelerate.utils import extract_model_from_parallel

        started = time.perf_counter()
        # The model as passed to the trainer, in the precision that Accelerate sets.
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        tokenizer = self.tokenizer
        if tokenizer is None:
            # Multimodal processors contain a tokenizer.
            tokenizer = getattr(processing_class, "tokenizer", processing_class)
            tokenizer = tokenizer if hasattr(tokenizer, "all_special_ids") else None
        hidden = args.disable_tqdm or not state.is_world_process_zero
        with random_state_kept(model.device):
            # The bar of the trainer stands still meanwhile.
            scores = measured_scores(model, self.observers, self.probe_data, tokenizer, hidden)
        measured = {**scores, **gate_scores(model)}
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
def gate_scores(model: PreTrainedModel) -> dict[str, HeadScores]:
    """Scores from the gates of each head.

    Args:
        model (`PreTrainedModel`): Any model.

    Returns:
        `dict[str, HeadScores]`: `gate_open`, P(gate ≠ 0), and `gate`, its value outside training; NaN for removed
        heads. Empty for a model without gates.
    """
    gates = model.head_gates() if hasattr(model, "head_gates") else {}
    if not gates:
        return {}
    open_probability = {site: gate.open_probabilities() for site, gate in gates.items()}
    settled = {site: gate.settled() for site, gate in gates.items()}
    layers = locate_heads(model)
    return {GATE_OPEN: tabulate(layers, open_probability), GATE: tabulate(layers, settled)}


def _check_observers(observers: list[Observer]) -> None:
    if not observers:
        raise ValueError("observers are empty: pass at least one, as in [HeadConfidence()].")
    for observer in observers:
        if not isinstance(observer, Observer):
            raise ValueError(f"observers must be instances of Observer, got {observer!r}.")
        if not observer.name:
            raise ValueError(f"{type(observer).__name__} has no name for its statistic; set its `name`.")
    names = Counter([GATE, GATE_OPEN, GUIDANCE_WEIGHT, *(observer.name for observer in observers)])
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two statistics have the name {repeated[0]!r}; set another `name` of an observer.")
