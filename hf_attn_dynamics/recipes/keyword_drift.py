# Licensed under the Apache License, Version 2.0.
"""Measure how information about a keyword moves from its position to other positions during training.

    accelerate launch recipes/keyword_drift.py                                 # figure 7, small: one minute
    accelerate launch recipes/keyword_drift.py recipes/configs/keyword_drift.yaml   # the same, explained
    accelerate launch recipes/keyword_drift.py --preset paper
    accelerate launch recipes/keyword_drift.py --bidirectional true

Section 6.1 of Snell et al. (2021): sentences of random words are positive if they contain the keyword. An LSTM
classifier with uniform attention learns this. The recipe measures the log-odds γ of the positive class if attention
selects a single position, mean over positive sentences:
    keyword, next       the keyword, and the word after it
    last                the last word of the sentence
    mean                all words, which is uniform attention
First, the order is that of hypothesis 2, keyword > next > mean and last: a state encodes its own word. After long
training it is that of observation 3, last > next > mean and keyword: states pass on what they have read. With
`--bidirectional true` they do so in both directions, and the first word encodes as much as the last one.

Training sentences are always new. All measurements use the same positive sentences, in which the keyword is not last.

Writes to `--output_dir`: `summary.json`, `config.yaml`, `curves.json` (`steps`, and for each `log_odds` and
`accuracy`), `drift.png` and `.svg`, `model/` with its card. With `--resume`, a stopped run starts again, and a
finished run only draws its picture again.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import trange
from transformers import AutoConfig

from .. import LstmConfig, LstmForSequenceClassification, lexical_probe
from .._files import read_json
from .._tables import format_table
from ..data import KeywordTask
from ..data.demo.copying import KEYWORD
from ..hub.card import Metric, write_model_card
from .arguments.keyword_drift import PRESETS, DriftArguments
from .copying_plots import plot_keyword_drift
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, write_json
from .summaries.keyword_drift import DriftSummary, PositionLogOdds


CURVES, MODEL_FOLDER = "curves.json", "model"
# With the names of their lines in the picture.
ATTENDED_POSITIONS = {
    "keyword": "the keyword",
    "next": "the word after it",
    "mean": "mean of all words",
    "last": "the last word",
}


def positive_sentences(task: KeywordTask, size: int, generator: np.random.Generator) -> torch.Tensor:
    """Sentences with the keyword before the last word."""
    found = np.empty((0, task.length), dtype=int)
    while len(found) < size:
        sentences, _ = task.draw(4 * size, generator)
        found = np.concatenate([found, sentences[(sentences[:, :-1] == KEYWORD).any(1)]])
    return torch.from_numpy(found[:size])


def mean_log_odds(model: LstmForSequenceClassification, sentences: torch.Tensor) -> dict[str, float]:
    """Mean γ by attended position."""
    batch = {"input_ids": sentences, "labels": torch.ones_like(sentences[:, 0])}
    log_odds = lexical_probe(model, batch).log_odds
    rows, keyword = torch.arange(len(sentences)), (sentences == KEYWORD).int().argmax(1)
    values = (log_odds[rows, keyword], log_odds[rows, keyword + 1], log_odds.mean(1), log_odds[:, -1])
    return {name: value.mean().item() for name, value in zip(ATTENDED_POSITIONS, values)}


def train_keyword_classifier(args: DriftArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Trains and saves the classifier; returns its curves over training."""
    torch.manual_seed(args.seed)
    task = args.task()
    sizes = {name: getattr(args, name) for name in ("embedding_size", "hidden_size", "bidirectional")}
    config = LstmConfig(vocab_size=task.vocab_size, attention="uniform", **sizes)
    model = LstmForSequenceClassification(config).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    generator = np.random.default_rng(args.seed)
    measured = positive_sentences(task, args.positive, np.random.default_rng(args.seed + 1)).to(device)
    curves: dict[str, Any] = {
        "steps": [],
        "log_odds": {position: [] for position in ATTENDED_POSITIONS},
        "accuracy": [],
    }
    measured_at = set(np.linspace(0, args.max_steps, args.measurements + 1).round().astype(int).tolist())
    # The order changes early.
    measured_at |= set(np.geomspace(1, args.max_steps, args.measurements).round().astype(int).tolist())
    accuracies = []
    started = time.perf_counter()
    with trange(args.max_steps + 1, desc="keyword", unit=" steps", disable=args.disable_tqdm, leave=False) as bar:
        for step in bar:
            sentences, labels = (torch.from_numpy(one).to(device) for one in task.draw(args.batch_size, generator))
            output = model(sentences, labels=labels)
            accuracies.append((output.logits.argmax(-1) == labels).float().mean().item())
            if step in measured_at:
                curves["steps"].append(step)
                curves["accuracy"].append(sum(accuracies[-10:]) / len(accuracies[-10:]))
                for position, value in mean_log_odds(model, measured).items():
                    curves["log_odds"][position].append(value)
                bar.set_postfix(accuracy=f"{curves['accuracy'][-1]:.2f}", refresh=False)
            if step < args.max_steps:
                optimizer.zero_grad()
                output.loss.backward()
                optimizer.step()
    model.save_pretrained(folder / MODEL_FOLDER)
    return {**curves, "seconds": time.perf_counter() - started}


def holds_from(steps: Sequence[int], holds: Sequence[bool]) -> int | None:
    """Step from which a condition holds until the end; None if it does not hold at the end."""
    start = None
    for step, one in zip(steps, holds):
        start = None if not one else step if start is None else start
    return start


def in_order(log_odds: dict[str, list[float]], first: str, other: str) -> list[bool]:
    """Whether γ falls from `first` to the next word and from there to the mean and `other`, at each measurement."""
    columns = zip(*(log_odds[position] for position in (first, "next", "mean", other)))
    return [one > following > max(rest) for one, following, *rest in columns]


def summarise(curves: dict[str, Any]) -> DriftSummary:
    steps, log_odds = curves["steps"], curves["log_odds"]
    early = [step for step, holds in zip(steps, in_order(log_odds, "keyword", "last")) if holds]
    return DriftSummary(
        log_odds=PositionLogOdds(**{position: values[-1] for position, values in log_odds.items()}),
        accuracy=curves["accuracy"][-1],
        hypothesis_2=[early[0], early[-1]] if early else None,
        overtaken=holds_from(steps, [a > b for a, b in zip(log_odds["last"], log_odds["keyword"])]),
        observation_3=holds_from(steps, in_order(log_odds, "last", "keyword")),
        seconds=curves["seconds"],
    )


def main(args: DriftArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, presets=PRESETS)
    with run.preparing():
        pass
    if run.is_main and not (run.folder / CURVES).is_file():
        write_json(run.folder / CURVES, train_keyword_classifier(args, run.folder, run.state.device))
    run.state.wait_for_everyone()
    curves = read_json(run.folder / CURVES)
    summary = summarise(curves)
    return run.finish(
        summary,
        lambda: publish(curves, summary, args, run.folder),
        lambda: print_report(curves, summary, run.folder),
    )


def publish(curves: dict[str, Any], summary: DriftSummary, args: DriftArguments, folder: Path) -> None:
    """Draws the picture and writes the card."""
    marks = {"last above keyword": summary.overtaken}
    title = "Sentences with the keyword, LSTM with uniform attention"
    lines = {name: curves["log_odds"][position] for position, name in ATTENDED_POSITIONS.items()}
    draw(plot_keyword_drift, folder / "drift", curves["steps"], lines, marks, title)
    log_odds = {f"log_odds_{position}": value for position, value in summary.log_odds.to_dict().items()}
    write_model_card(
        folder / MODEL_FOLDER,
        name="LSTM with uniform attention that looks for a keyword",
        description=f"An LSTM classifier with uniform attention, trained for {args.max_steps:,} steps to tell whether "
        f"{args.length} random words, of {args.words}, contain the keyword. It has no tokenizer: `input_ids` are word "
        f"indices, and that of the keyword is {KEYWORD}.",
        config=AutoConfig.from_pretrained(folder / MODEL_FOLDER),
        task="text-classification",
        figures={"accuracy": summary.accuracy, **log_odds},
        metric=Metric("accuracy", "accuracy on sentences before they are learnt from", summary.accuracy, "train"),
        dataset="sentences of random words (Snell et al. 2021, section 6.1)",
        provenance=summary.provenance,
        methods=["lexical"],
        license=args.license,
    )


def print_report(curves: dict[str, Any], summary: DriftSummary, folder: Path) -> None:
    steps, log_odds = curves["steps"], curves["log_odds"]
    shown = sorted({len(steps) * part // 8 for part in range(8)} | {len(steps) - 1})
    rows = [
        [steps[one], curves["accuracy"][one], *(log_odds[position][one] for position in ATTENDED_POSITIONS)]
        for one in shown
    ]
    print("\n" + format_table(["step", "accuracy", *(f"γ {position}" for position in ATTENDED_POSITIONS)], rows))
    for name in ("hypothesis_2", "overtaken", "observation_3"):
        value = getattr(summary, name)
        print(f"{name}: {'never' if value is None else value}")
    print(f"Everything is in {folder}: {SUMMARY}, {CURVES}, drift.png, {MODEL_FOLDER}/.")


if __name__ == "__main__":
    run_recipe(main, PRESETS, DriftSummary)
