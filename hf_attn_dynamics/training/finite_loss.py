# Licensed under the Apache License, Version 2.0.
"""Stops training at a non-finite loss, before the weights are updated, and saves the batch."""

from pathlib import Path
from typing import Any

import torch

from ..models.ignored_labels import IGNORED, is_labelled


NONFINITE_BATCH = "nonfinite_batch.pt"
OVERFLOWS = 20  # consecutive batches without a finite loss under fp16


class FiniteLossMixin:
    """A trainer that stops at a NaN or infinite loss; precedes the trainer class.

    Not a callback, since none is called between the loss of a step and the update of the weights.
    """

    _nonfinite_losses = 0  # consecutive

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The stock step, followed by a check of the loss.

        Raises:
            FloatingPointError: if the loss is NaN or infinite, under fp16 for `OVERFLOWS` consecutive batches; the
                last batch is saved in `output_dir` if possible.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        # The stock trainer reads the loss, too, so that this adds no synchronisation.
        self._nonfinite_losses = 0 if loss.isfinite() else self._nonfinite_losses + 1
        # Activations of single batches may overflow under fp16; the stock trainer skips their steps.
        if self._nonfinite_losses >= (OVERFLOWS if self.args.fp16 else 1):
            step, folder, process = self.state.global_step + 1, self.args.output_dir, self.args.process_index
            raise FloatingPointError(save_nonfinite_batch(loss, step, inputs, folder, process))
        return loss


def save_nonfinite_batch(
    loss: torch.Tensor, step: int, batch: dict[str, Any], folder: str | Path, process: int = 0
) -> str:
    """Saves a batch with a NaN or infinite loss, if possible.

    Args:
        loss (`torch.Tensor`): The loss, a scalar.
        step (`int`): Number of the step, from 1.
        batch (`dict[str, Any]`): Arguments of the forward pass, of which tensors are saved.
        folder (`str` or `Path`): Folder for `nonfinite_batch.pt`, which `torch.load` reads.
        process (`int`): Index of the process; all but the first add it to the file name.

    Returns:
        `str`: the error message.
    """
    path = Path(folder) / NONFINITE_BATCH
    if process:
        path = path.with_stem(f"{path.stem}_{process}")
    temporary = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.cpu() for name, value in batch.items() if torch.is_tensor(value)}, temporary)
        temporary.replace(path)
        saved = f"is in {path}"
    # PyTorch raises RuntimeError for a full disk.
    except (OSError, RuntimeError) as error:
        saved = f"could not be saved in {path} ({error})"
    labels = batch.get("labels")
    if torch.is_tensor(labels) and not is_labelled(labels).any():
        # The stock loss is a mean over the labels that are not ignored.
        advice = f"All of its labels are ignored: pass some that are not {IGNORED}"
    else:
        advice = "Lower the learning rate, clip gradients, or look for extreme inputs"
    return (
        f"the loss is {loss.item()} at step {step}; training has stopped before the weights were updated, and the "
        f"batch {saved}. {advice}. Checkpoints are unchanged."
    )
