# Licensed under the Apache License, Version 2.0.
"""Train attention to copy sentences, with one head or several, where co-occurrence counts help or tell nothing.

    accelerate launch recipes/learn_to_copy.py                                 # figure 3, small: some minutes
    accelerate launch recipes/learn_to_copy.py recipes/configs/learn_to_copy.yaml    # the same, explained
    accelerate launch recipes/learn_to_copy.py --experiments heads             # figure 6, small
    accelerate launch recipes/learn_to_copy.py --preset paper --experiments permutation control mixture function heads

The copying experiments of Snell et al. (2021). An LSTM encoder–decoder with attention learns to copy sentences:
    permutation         each is a permutation of the same words (section 3.3): some models fail, others are slow
    control             as many words from a larger vocabulary: all models succeed
    mixture             permutations of one of two disjoint vocabularies (appendix A.3): as `permutation`
    function            sentences of `control`, to be put into a fixed other order (equation 26)
    heads               permutations, copied with several heads (section 5.2). Each head is trained alone first: good
                        ones learn to copy, bad ones do not. Then `all_bad`, `one_good` and `random_heads` combine them

All models of a setting are trained as one stack, on sentences that are always new. Accuracy is the fraction of correct
target words given the preceding ones, measured on each batch before the update. A model has learnt to copy at 0.99,
and then stops. Models differ in their initial weights and their sentences; those of `heads` only in their heads. What
the paper leaves open has flags: `--optimizer`, `--embedding_std`, `--attention_scale` and `--share_embeddings`.

Writes to `--output_dir`: `summary.json`, `config.yaml`, a JSON file per setting with the `curves` (accuracy at steps
0, 1, … of each model), `copying.png` and `heads.png` (and SVG), and `models/` with the first model of each setting
and its card. With `--resume`, finished stacks of a stopped run are not trained again.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import trange

from .. import LstmSeq2SeqConfig, LstmSeq2SeqForConditionalGeneration
from .._files import read_json
from .._tables import format_table
from ..data import CopyingTask
from ..hub.card import Metric, write_model_card
from ..training import LstmSeq2SeqStack
from .arguments.learn_to_copy import PRESETS, CopyingArguments
from .copying_plots import plot_copying_curves
from .pictures import draw
from .run import SUMMARY, Run, device_name, provenance, run_recipe, save_made, share_out, write_json
from .summaries.learn_to_copy import CopyingResults, CopyingSummary


LEARNT_ACCURACY = 0.99
HEAD_SETTINGS = ("alone", "all_bad", "one_good", "random_heads")


def copying_model(
    args: CopyingArguments, task: CopyingTask, seed: int, heads: int = 1
) -> LstmSeq2SeqForConditionalGeneration:
    """A model whose random weights a seed determines."""
    torch.manual_seed(seed)
    sizes = dict.fromkeys(("embedding_size", "hidden_size", "readout_size"), args.hidden_size)
    config = LstmSeq2SeqConfig(
        vocab_size=task.vocab_size,
        num_attention_heads=heads,
        embedding_std=args.embedding_std,
        share_encoder_decoder_embeddings=args.share_embeddings,
        **sizes,
    )
    model = LstmSeq2SeqForConditionalGeneration(config)
    with torch.no_grad():
        model.attention.query.weight.mul_(args.attention_scale)
    return model


def model_with_heads(
    args: CopyingArguments, task: CopyingTask, heads: Sequence[int]
) -> LstmSeq2SeqForConditionalGeneration:
    """The model of the run's seed with other heads: head `n` comes from the model whose seed is larger by `n + 1`."""
    model = copying_model(args, task, args.seed, len(heads))
    queries = [copying_model(args, task, args.seed + 1 + head).attention.query.weight for head in heads]
    own = copying_model(args, task, args.seed).state_dict()
    model.load_state_dict({**own, "attention.query.weight": torch.cat(queries)})
    return model


def train_copying_stack(
    name: str,
    models: dict[int, LstmSeq2SeqForConditionalGeneration],
    task: CopyingTask,
    args: CopyingArguments,
    same_sentences: bool = False,
) -> dict[int, list[float]]:
    """Trains models in place as one stack; returns their accuracies at steps 0, 1, …, by index of the model."""
    stack = LstmSeq2SeqStack(list(models.values()))
    if args.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(stack.trained, lr=args.learning_rate)
    else:
        optimizer = torch.optim.SGD(stack.trained, lr=args.learning_rate, momentum=0.9)
    generators = {run: np.random.default_rng(args.seed + (0 if same_sentences else run)) for run in models}
    curves: dict[int, list[float]] = {run: [] for run in models}
    active = list(models)
    with trange(args.max_steps + 1, desc=name, unit=" steps", disable=args.disable_tqdm, leave=False) as bar:
        for step in bar:
            drawn = [task.draw(args.batch_size, generators[run]) for run in active]
            sources, targets = (torch.from_numpy(np.stack(side)).to(stack.device) for side in zip(*drawn))
            losses, accuracies, _ = stack(sources, targets)
            for run, accuracy in zip(active, accuracies.tolist()):
                curves[run].append(round(accuracy, 4))
            bar.set_postfix(learnt=sum(curve[-1] >= LEARNT_ACCURACY for curve in curves.values()), refresh=False)
            left = [index for index, run in enumerate(active) if not (args.stop_learnt and learns(curves[run][-1:]))]
            if not left or step == args.max_steps:
                break
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            if len(left) < len(active):
                stack.keep(left, optimizer)
                active = [active[index] for index in left]
    stack.unstack()
    return curves


class CopyingSettings:
    """Trains the stacks of each setting of a run, except those that a stopped run has finished."""

    def __init__(self, args: CopyingArguments, folder: Path, device: torch.device):
        self.args, self.folder, self.device = args, folder, device

    def curves(
        self,
        name: str,
        task: CopyingTask,
        build: Callable[[int], LstmSeq2SeqForConditionalGeneration],
        number: int,
        same_sentences: bool = False,
    ) -> list[list[float]]:
        """Accuracies of all models of a setting; `build` makes the model with an index."""
        args, record = self.args, {"seconds": 0.0, "curves": []}
        with contextlib.suppress(FileNotFoundError):
            record = read_json(self.folder / f"{name}.json")
        at_once = args.stack_size or number
        for first in range(len(record["curves"]), number, at_once):
            started = time.perf_counter()
            models = {run: build(run).to(self.device) for run in range(first, min(first + at_once, number))}
            record["curves"].extend(train_copying_stack(name, models, task, args, same_sentences).values())
            record["seconds"] += time.perf_counter() - started
            if not first:
                save_made(models[0], self.folder / "models" / name)
                self.write_card(name, task, models[0].config, record["curves"][0])
            write_json(self.folder / f"{name}.json", record)
        return record["curves"]

    def write_card(self, name: str, task: CopyingTask, config: LstmSeq2SeqConfig, curve: list[float]) -> None:
        """Writes the card of the first model of a setting."""
        heads = config.num_attention_heads
        write_model_card(
            self.folder / "models" / name,
            name=f"LSTM that copies: {name.replace('_', ' ')}",
            description=f"An LSTM encoder–decoder with {heads} attention head{'s' * (heads > 1)}, trained for "
            f"{len(curve) - 1:,} steps to copy sentences of {task.length} words; its setting is `{name}`. It has "
            "no tokenizer: `input_ids` and outputs are word indices.",
            config=config,
            task="text2text-generation",
            figures={"accuracy": curve[-1]},
            metric=Metric("accuracy", "accuracy on sentences before they are learnt from", curve[-1], "train"),
            dataset="sentences of random words (Snell et al. 2021)",
            provenance=provenance(self.args.seed, device_name(self)),
            methods=["lexical"],
            license=self.args.license,
        )

    def make(self, experiment: str) -> None:
        """Trains the settings of an experiment."""
        args, task = self.args, self.args.task(experiment)
        if experiment == "heads":
            self.make_heads(task)
        else:
            self.curves(experiment, task, lambda run: copying_model(args, task, args.seed + run), args.num_seeds)

    def make_heads(self, task: CopyingTask) -> None:
        """Finds good and bad heads, and trains models that combine them."""
        args = self.args
        alone = self.curves_of_heads("alone", task, [[head] for head in range(args.candidates)])
        good, bad = ([head for head, curve in enumerate(alone) if learns(curve) == wanted] for wanted in (True, False))
        if len(bad) < args.heads or not good:
            raise ValueError(
                f"of {args.candidates} heads {len(good)} learn to copy within {args.max_steps} steps, but at least "
                f"{args.heads} bad ones and a good one are needed; change candidates or max_steps."
            )
        generator = np.random.default_rng(args.seed)
        for name, num_good in (("all_bad", 0), ("one_good", 1)):
            pairs = [
                (generator.choice(good, num_good), generator.choice(bad, args.heads - num_good, replace=False))
                for _ in range(args.num_seeds)
            ]
            self.curves_of_heads(name, task, [np.concatenate(pair).tolist() for pair in pairs])
        new = args.candidates + np.arange(args.num_seeds * args.heads).reshape(args.num_seeds, args.heads)
        self.curves_of_heads("random_heads", task, new.tolist())

    def curves_of_heads(self, name: str, task: CopyingTask, heads: list[list[int]]) -> list[list[float]]:
        """Accuracies of models that differ only in these heads."""

        def build(run: int) -> LstmSeq2SeqForConditionalGeneration:
            return model_with_heads(self.args, task, heads[run])

        return self.curves(name, task, build, len(heads), same_sentences=True)


def learns(curve: Sequence[float]) -> bool:
    return max(curve) >= LEARNT_ACCURACY


def settings_in(experiments: Sequence[str]) -> list[str]:
    return [name for one in experiments for name in (HEAD_SETTINGS if one == "heads" else [one])]


def copying_results(record: dict[str, Any]) -> CopyingResults:
    curves = record["curves"]
    return CopyingResults(
        learnt=sum(map(learns, curves)) / len(curves),
        steps=[next((step for step, one in enumerate(curve) if one >= LEARNT_ACCURACY), None) for curve in curves],
        accuracy=[curve[-1] for curve in curves],
        seconds=record["seconds"],
    )


def draw_copying(args: CopyingArguments, records: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draws figure 3, with a panel per task beside the control, and figure 6."""
    named = {
        "permutation": f"permutations of {args.length} words",
        "mixture": f"permutations of one of two sets of {args.length} words",
        "function": f"{args.length} of {args.drawn_from} words, in another order",
        "control": f"{args.length} of {args.drawn_from} words",
        "all_bad": f"{args.heads} bad heads",
        "one_good": f"one good head of {args.heads}",
        "random_heads": f"{args.heads} random heads",
    }
    curves = {named[name]: record["curves"] for name, record in records.items() if name in named}
    title = f"LSTM encoder–decoders with {args.hidden_size} units; sentences of random words"
    tasks = [name for name in ("permutation", "mixture", "function", "control") if name in records]
    if tasks:
        # The control is in each panel, and has its own panel only without other tasks.
        panels = {
            name: {named[one]: curves[named[one]] for one in dict.fromkeys(("control", name)) if one in records}
            for name in (tasks[:-1] if len(tasks) > 1 and tasks[-1] == "control" else tasks)
        }
        draw(plot_copying_curves, folder / "copying", panels, LEARNT_ACCURACY, title)
    if "heads" in args.experiments:
        heads = ("one_good", "all_bad", "random_heads")
        panel = f"permutations of {args.length} words, attention with {args.heads} heads"
        panels = {panel: {named[name]: curves[named[name]] for name in heads}}
        draw(plot_copying_curves, folder / "heads", panels, LEARNT_ACCURACY, title)


def print_report(summary: CopyingSummary, folder: Path) -> None:
    rows = []
    for name, found in summary.settings.items():
        reached = [step for step in found.steps if step is not None]
        middle = round(statistics.median(reached)) if reached else None
        rows.append([name, len(found.steps), len(reached), middle, min(found.accuracy), found.seconds])
    print("\n" + format_table(["setting", "models", "learn", "at step (median)", "lowest accuracy", "seconds"], rows))
    print(f"Everything is in {folder}: {SUMMARY}, pictures, models/.")


def main(args: CopyingArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args, presets=PRESETS)
    with run.preparing():
        pass
    share_out(args.experiments, CopyingSettings(args, run.folder, run.state.device).make)
    records = {name: read_json(run.folder / f"{name}.json") for name in settings_in(args.experiments)}
    summary = CopyingSummary(settings={name: copying_results(record) for name, record in records.items()})
    return run.finish(
        summary,
        lambda: draw_copying(args, records, run.folder),
        lambda: print_report(summary, run.folder),
    )


if __name__ == "__main__":
    run_recipe(main, PRESETS, CopyingSummary)
