# Licensed under the Apache License, Version 2.0.
"""Training stops at a loss that is not finite, before the weights are changed, and keeps the batch."""

from pathlib import Path
from typing import Any

import torch

from ..models.ignored_labels import IGNORED, is_labelled


NONFINITE_BATCH = "nonfinite_batch.pt"


class FiniteLossMixin:
    """A trainer that stops at a loss that is NaN or infinite; it goes before the class of the trainer.

    No callback sees the loss of a step before its weights are changed.
    """

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The stock step, which a loss that is not finite ends before the weights are changed.

        Not under fp16, whose scaled losses may overflow for a step.

        Raises:
            FloatingPointError: if the loss is NaN or infinite; the batch is kept in `output_dir` if it can be.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        # The stock trainer asks as well, to keep such losses out of its log: this does not wait any longer.
        if not self.args.fp16 and not loss.isfinite():
            step, folder, process = self.state.global_step + 1, self.args.output_dir, self.args.process_index
            raise FloatingPointError(save_nonfinite_batch(loss, step, inputs, folder, process))
        return loss


def save_nonfinite_batch(
    loss: torch.Tensor, step: int, batch: dict[str, Any], folder: str | Path, process: int = 0
) -> str:
    """Keeps a batch whose loss is NaN or infinite, if it can be written.

    Args:
        loss (`torch.Tensor`): The loss, a scalar.
        step (`int`): Number of the step, from 1.
        batch (`dict[str, Any]`): Arguments of the forward pass; tensors of them are kept.
        folder (`str` or `Path`): Where to write `nonfinite_batch.pt`, which `torch.load` reads.
        process (`int`): Which process has met it; all but the first write a file with their number in its name.

    Returns:
        `str`: what to tell the user.
    """
    path = Path(folder) / NONFINITE_BATCH
    if process:
        path = path.with_stem(f"{path.stem}_{process}")
    temporary = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.cpu() for name, value in batch.items() if torch.is_tensor(value)}, temporary)
        temporary.replace(path)
        kept = f"is in {path}"
    # A full disk is a RuntimeError to PyTorch.
    except (OSError, RuntimeError) as error:
        kept = f"could not be kept in {path} ({error})"
    labels = batch.get("labels")
    if torch.is_tensor(labels) and not is_labelled(labels).any():
        # The stock loss is the mean over the labels that count.
        advice = f"All of its labels are ignored: give some that are not {IGNORED}"
    else:
        advice = "Lower the learning rate, clip gradients, or look for extreme inputs"
    return (
        f"the loss is {loss.item()} at step {step}; training has stopped before the weights were changed, the batch "
        f"{kept}. {advice}; checkpoints are as they were."
    )
