# Licensed under the Apache License, Version 2.0.
"""Full-batch gradient descent of many independent runs, stacked into one set of parameters."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel


Losses = Callable[[], torch.Tensor]


def check_alike(models: Sequence[PreTrainedModel], names: Iterable[str]) -> None:
    """Raises ValueError if there are no models, or their configurations differ in one of these values."""
    if not models:
        raise ValueError("models are empty; pass at least one.")
    for name in names:
        values = {getattr(model.config, name) for model in models}
        if len(values) > 1:
            raise ValueError(f"models must have the same {name}, got {sorted(values, key=str)}.")


@dataclass(frozen=True, eq=False)
class DescentResult:
    """Result of [`stacked_gradient_descent`].

    Args:
        losses (`torch.Tensor` of shape `(runs,)`): Training loss of each run with its final parameters.
        epochs (`torch.LongTensor` of shape `(runs,)`): Number of updates of each run.
        best_epochs (`torch.LongTensor` of shape `(runs,)`): Number of updates with the lowest validation loss; the
            same as `epochs` without validation.
    """

    losses: torch.Tensor
    epochs: torch.Tensor
    best_epochs: torch.Tensor


def stacked_gradient_descent(
    losses: Losses,
    parameters: Mapping[str, torch.Tensor],
    learning_rates: Mapping[str, float | torch.Tensor],
    epochs: int,
    *,
    validation: Losses | None = None,
    patience: int | None = None,
    record: Callable[[int, torch.Tensor], None] | None = None,
    record_at: Collection[int] = (),
    progress: str | None = None,
) -> DescentResult:
    """Trains independent runs by p ← p − η ∂L/∂p, where L is the loss of each run over all its data.

    Runs do not influence each other: each follows the gradient of its own loss, and ends as it would alone, up to the
    order of summation. `losses` computes the model.

    Args:
        losses (callable): Returns the losses of all runs with the current parameters, of shape `(runs,)`.
        parameters (`dict[str, torch.Tensor]`): Leaf tensors, updated in place. Each belongs to some of the runs, along
            any dimension.
        learning_rates (`dict[str, float | torch.Tensor]`): η of each parameter: a number, or a tensor that broadcasts
            to it, with 0 for runs in which it is frozen.
        epochs (`int`): Largest number of updates.
        validation (callable, *optional*): Returns the losses of all runs on other data, for early stopping; called
            without gradients after each update.
        patience (`int`, *optional*): A run stops once its validation loss has had no new minimum for this many
            updates, and keeps its last parameters, `patience` updates after the best ones. It is still computed until
            all runs have stopped, so that runs in one call should stop at about the same time.
        record (callable, *optional*): Called as `record(epoch, losses)` after `epoch` updates.
        record_at (collection of `int`): Epochs to record, from 0; the last epoch is always recorded.
        progress (`str`, *optional*): Label of a progress bar; `None` for no bar.

    Returns:
        [`DescentResult`]

    Raises:
        ValueError: if a parameter has no learning rate, or all rates are 0; if only one of `patience` and `validation`
            is given; if a number is out of range; or if a recorded loss is not finite.

    Example:
        >>> x = torch.tensor([4.0, 4.0], requires_grad=True)
        >>> ended = stacked_gradient_descent(lambda: x**2, {"x": x}, {"x": torch.tensor([0.25, 0.0])}, epochs=2)
        >>> x.tolist(), ended.losses.tolist()
        ([1.0, 4.0], [1.0, 16.0])
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}.")
    if (validation is None) != (patience is None):
        raise ValueError("early stopping needs both validation and patience.")
    if patience is not None and patience < 1:
        raise ValueError(f"patience must be at least 1, got {patience}.")
    if other := sorted(parameters.keys() ^ learning_rates.keys()):
        raise ValueError(f"parameters and learning_rates must have the same names, but only one has {other[0]!r}.")
    trained = {
        name: p for name, p in parameters.items() if torch.is_tensor(learning_rates[name]) or learning_rates[name]
    }
    if not trained:
        raise ValueError("learning_rates are 0 for all parameters; set at least one.")
    for parameter in trained.values():
        parameter.requires_grad_(True)
    runs = None
    with tqdm(total=epochs, desc=progress, unit=" epochs", disable=progress is None, leave=False) as bar:
        for epoch in range(epochs + 1):
            with torch.enable_grad():
                values = losses()
            with torch.no_grad():
                runs = runs or _Runs(values, patience)
                runs.update(epoch, None if validation is None else validation())
            is_last = epoch == epochs or runs.all_stopped
            if is_last or epoch in record_at:
                _check_finite(values, epoch)
                if record is not None:
                    with torch.no_grad():
                        record(epoch, values.detach())
                bar.set_postfix(loss=f"{values.mean().item():.4f}", refresh=False)
            if is_last:
                break
            # Stopped runs have no gradient.
            gradients = torch.autograd.grad(values[runs.active].sum(), list(trained.values()))
            with torch.no_grad():
                for (name, parameter), gradient in zip(trained.items(), gradients):
                    rate = learning_rates[name]
                    if torch.is_tensor(rate):
                        parameter.addcmul_(gradient, -rate)
                    else:
                        parameter.add_(gradient, alpha=-rate)
            bar.update()
    return DescentResult(values.detach(), runs.epochs, runs.best_epochs)


class _Runs:
    """Early stopping: active runs and their numbers of updates."""

    def __init__(self, losses: torch.Tensor, patience: int | None):
        self.patience = patience
        self.active = torch.ones_like(losses, dtype=torch.bool)
        self.epochs = torch.zeros_like(losses, dtype=torch.long)
        self.best_epochs = torch.zeros_like(self.epochs)
        self.best = torch.full_like(losses, torch.inf)

    @property
    def all_stopped(self) -> bool:
        return self.patience is not None and not bool(self.active.any())

    def update(self, epoch: int, validation: torch.Tensor | None) -> None:
        self.epochs = self.epochs.masked_fill(self.active, epoch)
        if validation is None:
            self.best_epochs = self.epochs
            return
        better = self.active & (validation < self.best)
        self.best = torch.where(better, validation, self.best)
        self.best_epochs = self.best_epochs.masked_fill(better, epoch)
        self.active = self.active & (epoch - self.best_epochs < self.patience)


def _check_finite(losses: torch.Tensor, epoch: int) -> None:
    wrong = (~losses.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"the loss of run {wrong[0]} is {losses[wrong[0]]} after {epoch} epochs; lower learning_rates."
        )
