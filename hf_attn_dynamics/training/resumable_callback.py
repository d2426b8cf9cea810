# Licensed under the Apache License, Version 2.0.
"""What callbacks need that remember something over a run, to go on with it when the run is resumed."""

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class ResumableCallback(TrainerCallback, ExportableState):
    """A callback that begins each run with an empty memory, and a resumed one with that of its checkpoint.

    It works where it was not there before the run was resumed, too. Subclasses say what they remember.
    """

    made_of = ""  # what it cannot be built from a checkpoint without

    def state(self) -> dict:
        """What a checkpoint of the trainer keeps."""
        return {"args": {}, "attributes": self._remembered()}

    def _remembered(self) -> dict[str, Any]:
        """What is remembered, as JSON can hold it."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Begins anew."""
        raise NotImplementedError

    def _recall(self, remembered: dict[str, Any]) -> None:
        """Goes on with what was remembered."""
        raise NotImplementedError

    def on_init_end(self, args, state, control, **kwargs):
        name = type(self).__name__
        if args.restore_callback_states_from_checkpoint:
            raise ValueError(
                f"restore_callback_states_from_checkpoint=True would build {name} anew, without {self.made_of}; set "
                "it to False: the callback finds what it had recorded in the checkpoint by itself."
            )

    def on_train_begin(self, args, state, control, **kwargs):
        # Once more, for one that was added to the trainer later.
        self.on_init_end(args, state, control)
        self._forget()
        name = type(self).__name__
        # The checkpoint may come from a run without this callback, and the Trainer saves only what has a place.
        saved = state.stateful_callbacks.setdefault(name, self.state())
        if isinstance(saved, list):
            raise ValueError(f"the trainer has {len(saved)} {name}s; have one measure everything.")
        if state.global_step:
            self._recall(saved["attributes"])


class LastStepCallback(ResumableCallback):
    """One that measures the model once more when training ends, as the last step left it.

    With `load_best_model_at_end`, other weights may be in place by then: it measures before they are, or not at all
    where training was stopped early.
    """

    def _measure(self, args, state, **kwargs: Any) -> None:
        """Takes down what is to be remembered of the model as it is."""
        raise NotImplementedError

    def on_step_end(self, args, state, control, **kwargs):
        # Only where it has to be, since it counts as time of the step.
        if args.load_best_model_at_end and state.global_step >= state.max_steps:
            self._measure(args, state, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        if not args.load_best_model_at_end:
            self._measure(args, state, **kwargs)
