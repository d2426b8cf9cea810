# Licensed under the Apache License, Version 2.0.
"""Stacks of bag-of-words attention classifiers that `score_norm.py` trains: all runs of some classifiers at once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import BowAttentionConfig, BowAttentionForSequenceClassification
from ..analysis.score_norm import ScoreNormHistory, recording_epochs, run_interval
from ..hub.card import Metric, write_model_card
from ..training import BowAttentionStack, DescentResult, LabelledSentences, stacked_gradient_descent
from .arguments.score_norm import CLASSIFIERS, ScoreNormArguments
from .run import device_name, provenance, save_made, write_json
from .summaries.score_norm import RunInterval


VOCABULARY = "vocabulary.json"


@dataclass
class TrainedStack:
    """A stack after training: all runs of the first classifier, then those of the second, and so on."""

    names: list[str]
    stack: BowAttentionStack
    result: DescentResult
    history: ScoreNormHistory
    losses: torch.Tensor
    seconds: float

    def by_classifier(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Values with runs in the first dimension, divided among the classifiers."""
        return dict(zip(self.names, values.cpu().chunk(len(self.names))))

    def largest(self, values: torch.Tensor) -> dict[str, float]:
        """Maximum of such values, by classifier."""
        return {name: own.max().item() for name, own in self.by_classifier(values).items()}

    def intervals(self, values: torch.Tensor, limits: tuple[float, float] | None = None) -> dict[str, RunInterval]:
        """Mean and bounds over runs of values of shape `(runs,)`, by classifier; `limits` are those of the values."""
        found = {}
        for name, own in self.by_classifier(values).items():
            bounds = [bound.item() for bound in run_interval(own, limits=limits)]
            found[name] = RunInterval(**dict(zip(("mean", "low", "high"), (None if b != b else b for b in bounds))))
        return found

    def curves(self, unit: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Scores and norms of a recorded unit, of shape `(epochs, runs)`, by classifier."""
        parts = (self.history.scores[..., unit], self.history.norms[..., unit])
        return dict(zip(self.names, zip(*(part.chunk(len(self.names), 1) for part in parts))))

    def results(self, test: LabelledSentences) -> dict[str, Any]:
        """What all experiments report, see [`ExperimentResults`]."""
        return {
            "accuracy": self.intervals(self.stack.accuracies(test), limits=(0, 1)),
            "loss": self.largest(self.result.losses),
            "epochs": {name: epochs.tolist() for name, epochs in self.by_classifier(self.result.epochs).items()},
            "seconds": self.seconds,
        }


def classifier_settings(names: Sequence[str], **common: Any) -> dict[str, dict[str, Any]]:
    return {name: {**CLASSIFIERS[name], **common} for name in names}


def build_stack(settings: dict[str, dict], runs: int, seed: int, device: torch.device) -> BowAttentionStack:
    """A stack of classifiers, each with several initial weights."""
    models = []
    for own in settings.values():
        for run in range(runs):
            torch.manual_seed(seed + run)
            models.append(BowAttentionForSequenceClassification(BowAttentionConfig(**own)).to(device))
    return BowAttentionStack(models)


def train_stack(
    experiment: str,
    settings: dict[str, dict],
    data: LabelledSentences,
    args: ScoreNormArguments,
    device: torch.device,
    units: Sequence[int] | None = None,
    centered: bool = False,
    dev: LabelledSentences | None = None,
    extra_records: Sequence[int] = (),
) -> TrainedStack:
    """Trains all runs of some classifiers, and records scores, norms and losses."""
    sizes = args.sizes(experiment)
    stack = build_stack(settings, sizes.num_seeds, args.seed, device)
    history, losses = ScoreNormHistory(units, centered), []

    def record(epoch: int, values: torch.Tensor) -> None:
        history.add(epoch, *stack.score_norms(data))
        losses.append(values.cpu())

    started = time.perf_counter()
    result = stacked_gradient_descent(
        lambda: stack.losses(data),
        stack.parameters,
        stack.learning_rates(args.learning_rate),
        sizes.epochs,
        validation=None if dev is None else lambda: stack.losses(dev),
        patience=None if dev is None else args.patience,
        record=record,
        record_at={*recording_epochs(sizes.epochs, args.records), *extra_records},
        progress=None if args.disable_tqdm else experiment,
    )
    seconds = time.perf_counter() - started
    return TrainedStack(list(settings), stack, result, history, torch.stack(losses), seconds)


def save_first_runs(
    trained: TrainedStack,
    folder: Path,
    args: ScoreNormArguments,
    test: LabelledSentences,
    text: str,
    vocabulary: list[str] | None = None,
) -> None:
    """Saves the first run of each classifier with its card, and with its vocabulary if it reads real words."""
    accuracies = trained.by_classifier(trained.stack.accuracies(test))
    losses, epochs = (trained.by_classifier(values) for values in (trained.result.losses, trained.result.epochs))
    models = trained.stack.unstack()
    runs = len(models) // len(trained.names)
    for name, model in zip(trained.names, models[::runs]):
        save_made(model, folder / name)
        if vocabulary is not None:
            write_json(folder / name / VOCABULARY, vocabulary)
        accuracy, updates = accuracies[name][0].item(), int(epochs[name][0])
        write_model_card(
            folder / name,
            name=f"attention over bags of words, {name}",
            description=f"Attention over bags of words with a {model.config.classifier} classifier ({name} of Lu et "
            f"al. 2021), trained for {updates:,} epochs of gradient descent. It has no tokenizer: `input_ids` are "
            f"{'word indices' if vocabulary is None else f'indices of words in {VOCABULARY}'}.",
            config=model.config,
            task="text-classification",
            figures={"accuracy": accuracy, "loss": losses[name][0].item(), "epochs": updates},
            metric=Metric("accuracy", "accuracy", accuracy, "test"),
            dataset=text,
            provenance=provenance(args.seed, device_name(model)),
            methods=["score_norm"],
            license=args.license,
        )
