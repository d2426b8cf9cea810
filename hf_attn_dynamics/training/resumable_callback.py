# Licensed under the Apache License, Version 2.0.
"""Callbacks whose state is saved in checkpoints and restored when a run is resumed."""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class ResumableCallback(TrainerCallback, ExportableState):
    """A callback that starts each run with an empty state, and a resumed run with the state in its checkpoint.

    It may also be added to a run that is resumed. Subclasses define their state.
    """

    made_of = ""  # constructor arguments that checkpoints do not store

    def state(self) -> dict:
        """State in a checkpoint of the trainer."""
        return {"args": {}, "attributes": self._remembered()}

    def _remembered(self) -> dict[str, Any]:
        """The state, for JSON."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Resets the state."""
        raise NotImplementedError

    def _recall(self, remembered: dict[str, Any]) -> None:
        """Restores a state."""
        raise NotImplementedError

    def on_init_end(self, args, state, control, **kwargs):
        name = type(self).__name__
        if args.restore_callback_states_from_checkpoint:
            raise ValueError(
                f"restore_callback_states_from_checkpoint=True would build {name} again without {self.made_of}; set "
                "it to False: the callback restores its state itself."
            )

    def on_train_begin(self, args, state, control, **kwargs):
        # Again, for a callback that was added to the trainer later.
        self.on_init_end(args, state, control)
        self._forget()
        name = type(self).__name__
        # The Trainer only saves callbacks in this dictionary, which may come from a run without this callback.
        saved = state.stateful_callbacks.setdefault(name, self.state())
        if isinstance(saved, list):
            raise ValueError(f"the trainer has {len(saved)} {name}s; combine them into one.")
        if state.global_step:
            self._recall(saved["attributes"])


class LastStepCallback(ResumableCallback):
    """A callback that also measures the model after the last step.

    With `load_best_model_at_end`, it measures before the best weights are loaded, or not at all if training was
    stopped early.
    """

    def _measure(self, args, state, **kwargs: Any) -> None:
        """Records measurements of the current model in the state."""
        raise NotImplementedError

    def on_step_end(self, args, state, control, **kwargs):
        # Only if necessary, since it counts as time of the step.
        if args.load_best_model_at_end and state.global_step >= state.max_steps:
            self._measure(args, state, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        if not args.load_best_model_at_end:
            self._measure(args, state, **kwargs)
