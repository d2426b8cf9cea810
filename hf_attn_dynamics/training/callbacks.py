# Licensed under the Apache License, Version 2.0.
"""Callbacks for the time and the progress of a run."""

import time

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback


class StepTimer(TrainerCallback):
    """Measures wall time and tokens of optimizer steps, without evaluation."""

    def __init__(self):
        self.seconds, self.steps, self.tokens_before = 0.0, 0, None

    def on_step_begin(self, args, state, control, **kwargs):
        if self.tokens_before is None:
            self.tokens_before = state.num_input_tokens_seen
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self.started
        self.steps += 1
        self.tokens = state.num_input_tokens_seen - self.tokens_before

    def figures(self) -> dict[str, float | None]:
        """Mean seconds of a step and non-padding tokens per second; `None` without any step."""
        if not self.steps:
            return {"seconds_per_step": None, "tokens_per_second": None}
        return {"seconds_per_step": self.seconds / self.steps, "tokens_per_second": self.tokens / self.seconds}


class LogWhenSaved(TrainerCallback):
    """Logs whenever a checkpoint is saved, so that a resumed run does not lose losses of an unfinished window."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end


class ProgressWithLosses(ProgressCallback):
    """A progress bar with the latest losses, instead of a line for every log entry."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.name)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        pass

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = {"task_loss": "train", "eval_loss": "eval", "guidance_loss": "guidance"}
        values = {shown[key]: f"{value:.3f}" for key, value in logs.items() if key in shown}
        if self.training_bar is not None and values:
            self.latest = {**getattr(self, "latest", {}), **values}
            self.training_bar.set_postfix(self.latest)


def show_progress(trainer: Trainer, name: str) -> None:
    """Replaces the progress output of a trainer by a bar with its losses, or by nothing with `disable_tqdm`."""
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if not trainer.args.disable_tqdm:
        trainer.add_callback(ProgressWithLosses(name))
