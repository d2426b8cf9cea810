# Licensed under the Apache License, Version 2.0.
"""Watch the knowledge of a keyword leave the place where the keyword is.

    accelerate launch recipes/keyword_drift.py                                 # figure 7, small: a minute
    accelerate launch recipes/keyword_drift.py --preset paper

Section 6.1 of Snell et al. (2021): sentences of random words are positive if they have the keyword. An LSTM classifier
with uniform attention learns this. Measured is the log-odds γ of the positive class if attention went to one place
only, on average over positive sentences:
    keyword, next       at the keyword, and at the word after it
    last                at the last word of the sentence
    mean                over all words, which is what uniform attention gives
At first they come in the order of hypothesis 2, keyword > next > mean and last: a state tells of its own word. After
long training it is that of observation 3, last > next > mean and keyword: states pass on what they have seen. With
`--bidirectional true` they pass it on both ways, and the first word knows of it as the last one does.

Sentences are always new. Measured is on as many positive sentences, the same at each time, whose keyword is not last.

Writes to `--output_dir`: `summary.json`, `config.yaml`, `curves.json` (`steps`, and for each `log_odds` and
`accuracy`), `drift.png` and `.svg`, `model/` with its card. With `--resume`, a stopped run starts again, and a
finished one is only drawn again.

Keys of `summary.json`:
    log_odds            γ at the end, by place
    accuracy            on the new sentences of the last 10 steps
    hypothesis_2        first and last step at which its order was found; empty if it never was
    overtaken           step from which on γ at the last word is above γ at the keyword, until the end; empty if never
    observation_3       step from which on its order holds until the end; empty if never
    seconds             of training and measuring
And num_processes, seed, device, command and versions.
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
from .run import SUMMARY, Run, run_recipe, write_json


CURVES, MODEL = "curves.json", "model"
PLACES = ("keyword", "next", "mean", "last")


def positive_sentences(task: KeywordTask, size: int, generator: np.random.Generator) -> torch.Tensor:
    """Sentences with the keyword, but not as the last word."""
    found = np.empty((0, task.length), dtype=int)
    while len(found) < size:
        sentences, _ = task.draw(4 * size, generator)
        found = np.concatenate([found, sentences[(sentences[:, :-1] == KEYWORD).any(1)]])
    return torch.from_numpy(found[:size])


def measure(model: LstmForSequenceClassification, sentences: torch.Tensor) -> dict[str, float]:
    """Mean γ at each place."""
    batch = {"input_ids": sentences, "labels": torch.ones_like(sentences[:, 0])}
    log_odds = lexical_probe(model, batch).log_odds
    rows, place = torch.arange(len(sentences)), (sentences == KEYWORD).int().argmax(1)
    values = (log_odds[rows, place], log_odds[rows, place + 1], log_odds.mean(1), log_odds[:, -1])
    return {name: value.mean().item() for name, value in zip(PLACES, values)}


def train(args: DriftArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Trains the classifier; returns γ over training."""
    torch.manual_seed(args.seed)
    task = args.task()
    sizes = {name: getattr(args, name) for name in ("embedding_size", "hidden_size", "bidirectional")}
    config = LstmConfig(vocab_size=task.vocab_size, attention="uniform", **sizes)
    model = LstmForSequenceClassification(config).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    generator = np.random.default_rng(args.seed)
    measured = positive_sentences(task, args.positive, np.random.default_rng(args.seed + 1)).to(device)
    curves: dict[str, Any] = {"steps": [], "log_odds": {place: [] for place in PLACES}, "accuracy": []}
    moments = set(np.linspace(0, args.steps, args.measurements + 1).round().astype(int).tolist())
    # The order turns early.
    moments |= set(np.geomspace(1, args.steps, args.measurements).round().astype(int).tolist())
    accuracies = []
    started = time.perf_counter()
    with trange(args.steps + 1, desc="keyword", unit=" steps", disable=args.disable_tqdm, leave=False) as bar:
        for step in bar:
            sentences, labels = (torch.from_numpy(one).to(device) for one in task.draw(args.batch_size, generator))
            output = model(sentences, labels=labels)
            accuracies.append((output.logits.argmax(-1) == labels).float().mean().item())
            if step in moments:
                curves["steps"].append(step)
                curves["accuracy"].append(sum(accuracies[-10:]) / len(accuracies[-10:]))
                for place, value in measure(model, measured).items():
                    curves["log_odds"][place].append(value)
                bar.set_postfix(accuracy=f"{curves['accuracy'][-1]:.2f}", refresh=False)
            if step < args.steps:
                optimizer.zero_grad()
                output.loss.backward()
                optimizer.step()
    model.save_pretrained(folder / MODEL)
    return {**curves, "seconds": time.perf_counter() - started}


def holds_from(steps: Sequence[int], holds: Sequence[bool]) -> int | None:
    """Step from which on something holds until the end."""
    start = None
    for step, one in zip(steps, holds):
        start = None if not one else step if start is None else start
    return start


def in_order(log_odds: dict[str, list[float]], first: str, third: str) -> list[bool]:
    """Whether γ at one place is above that after the keyword, and this above the mean and a third place, each time."""
    columns = zip(*(log_odds[place] for place in (first, "next", "mean", third)))
    return [one > following > max(mean, other) for one, following, mean, other in columns]


def figures_of(curves: dict[str, Any]) -> dict[str, Any]:
    """What the summary says of the curves."""
    steps, log_odds = curves["steps"], curves["log_odds"]
    early = [step for step, holds in zip(steps, in_order(log_odds, "keyword", "last")) if holds]
    return {
        "log_odds": {place: values[-1] for place, values in log_odds.items()},
        "accuracy": curves["accuracy"][-1],
        "hypothesis_2": [early[0], early[-1]] if early else None,
        "overtaken": holds_from(steps, [a > b for a, b in zip(log_odds["last"], log_odds["keyword"])]),
        "observation_3": holds_from(steps, in_order(log_odds, "last", "keyword")),
        "seconds": curves["seconds"],
    }


def main(args: DriftArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, presets=PRESETS)
    with run.preparing():
        pass
    if run.is_main and not (run.folder / CURVES).is_file():
        write_json(run.folder / CURVES, train(args, run.folder, run.state.device))
    run.state.wait_for_everyone()
    curves = read_json(run.folder / CURVES)

    def publish(summary: dict) -> None:
        marks = {"last above keyword": summary["overtaken"]}
        plot_keyword_drift(curves["steps"], curves["log_odds"], run.folder / "drift", marks)
        write_card(args, summary, run.folder / MODEL)

    return run.finish(figures_of(curves), publish, lambda summary: print_report(curves, summary, run.folder))


def write_card(args: DriftArguments, summary: dict[str, Any], folder: Path) -> None:
    write_model_card(
        folder,
        name="LSTM with uniform attention that looks for a keyword",
        description=f"An LSTM classifier with uniform attention, trained for {args.steps:,} steps to tell whether "
        f"{args.length} random words, of {args.words}, have the keyword among them. It has no tokenizer: "
        f"`input_ids` are numbers of words, that of the keyword is {KEYWORD}.",
        config=AutoConfig.from_pretrained(folder),
        task="text-classification",
        figures={"accuracy": summary["accuracy"], **{f"log_odds_{k}": v for k, v in summary["log_odds"].items()}},
        metric=Metric("accuracy", "accuracy on sentences before they are learnt from", summary["accuracy"], "train"),
        dataset="sentences of random words (Snell et al. 2021, section 6.1)",
        provenance=summary,
        methods=["lexical"],
        license=args.license,
    )


def print_report(curves: dict[str, Any], summary: dict[str, Any], folder: Path) -> None:
    shown = sorted({len(curves["steps"]) * part // 8 for part in range(8)} | {len(curves["steps"]) - 1})
    rows = [
        [curves["steps"][one], curves["accuracy"][one], *(curves["log_odds"][place][one] for place in PLACES)]
        for one in shown
    ]
    print("\n" + format_table(["step", "accuracy", *(f"γ {place}" for place in PLACES)], rows))
    for key in ("hypothesis_2", "overtaken", "observation_3"):
        print(f"{key}: {'never' if summary[key] is None else summary[key]}")
    print(f"Everything is in {folder}: {SUMMARY}, {CURVES}, drift.png, model/.")


if __name__ == "__main__":
    run_recipe(main, PRESETS)
