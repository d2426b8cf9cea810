# Licensed under the Apache License, Version 2.0.
"""Fine-tune a classifier with heads that are guided to rationales, and its unguided twin.

    accelerate launch recipes/supervise_classifier.py                  # a demonstration on embedded text
    accelerate launch recipes/supervise_classifier.py recipes/configs/supervise_classifier.yaml
    accelerate launch recipes/supervise_classifier.py --model roberta-base --train_file sst2/train.tsv \\
        --validation_file sst2/dev.tsv --test_file sst2/test.tsv --lexicon_file sst/phrases.tsv

The rationale of a sentence consists of its words that have its class in a lexicon. The lexicon has the single words of
`--lexicon_file`, such as the polar phrases of a sentiment treebank, without those that occur mostly in training texts
of other classes; by default, it has the words that occur mostly in training texts of one class. All tokens learn to
attend to the rationale in the guided heads (`--guidance_loss mass`: −log of the attention that falls on it).

The rationales of validation and test sentences only serve to measure heads: how often their strongest key belongs to
the rationale, from the first token, which the classifier reads, and from all tokens. The best head of each model is
chosen on the validation text.

Both models start from the same weights and see the same batches. Writes to `--output_dir`: `summary.json`, `table.csv`
(all heads of both models), `heads.png` and `.svg`, `config.yaml` (the values of the run), `model/` (the guided model
with tokenizer, code and card) and `model_unguided/`. `--push_to_hub true --hub_model_id USER/NAME` pushes `model/` to
the Hub after everything is written.
"""

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, Features, List, Value
from transformers import DataCollatorWithPadding, PreTrainedModel

from .. import HeadScores, HeadwiseTrainer, observe
from .._tables import format_table
from ..analysis.observers.base import AttentionCall, HeadMeans, Observer
from ..analysis.plots.base import plot_head_maps
from ..analysis.running import on_device
from ..data import align_weights
from ..data.lexicons import learn_lexicon, load_lexicon, rationale
from ..models.guidance_settings import COLUMN_PREFIX
from ..training import GuidanceCollator, check_trainer_arguments
from .arguments.base import flag
from .arguments.supervise_classifier import RationaleArguments
from .checkpoints import load_config
from .classifier_tasks import SampledTask, write_classifier_card_of_run
from .classifying import (
    ClassifierTrainingArguments,
    build_classifier,
    class_names,
    model_inputs,
    predict,
    train_classifier,
)
from .pictures import draw
from .run import SUMMARY, Run, named_files, run_recipe, write_csv
from .summaries.base import rows_table
from .summaries.supervise_classifier import SYSTEMS, RationaleRow, RationaleSummary


TARGET = "rationale"
COLUMN = COLUMN_PREFIX + TARGET
MODEL_FOLDERS = {"guided": "model", "unguided": "model_unguided"}
BATCH = 64  # sentences per pass in which heads are measured


@dataclass
class RationaleTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`] with another output folder and guidance."""

    output_dir: str = flag("runs/supervise_classifier", "Output folder; it must not hold another run.")
    guidance_weight: str = flag(
        "0.03", "Initial weight of the guidance loss: a number, or auto to equal the first task loss."
    )
    guidance_schedule: str = flag("constant", "Schedule of the guidance weight.")


class RationaleTask(SampledTask):
    """A class per sentence, with the rationale of each sentence as a target of guided heads.

    Attributes:
        lexicon (`dict[str, str]`): Class of each word; set by `read`.
        rationales (`dict[str, list]`): Weights of the tokens of each sentence, by part of the text; set by `encode`.
        guidance (`dict`, *optional*): Guidance of the next model that is built.
    """

    guidance: dict[str, Any] | None = None

    def read(self, trains: bool) -> None:
        super().read(trains)
        args, train = self.args, self.texts["train"]
        known = None
        if args.lexicon_file:
            known = load_lexicon(args.lexicon_file, label_names=args.class_names, encoding=args.encoding)
            if unknown := set(known.values()) - set(train.features["label"].names):
                raise ValueError(
                    f"lexicon_file {args.lexicon_file} has the classes {', '.join(sorted(unknown))}, which are not "
                    f"those of the training text: {', '.join(train.features['label'].names)}; name both alike."
                )
        self.lexicon = learn_lexicon(train["text"], classes_of(train), args.min_count, args.min_fraction, known)

    def encode(self) -> dict[str, Dataset]:
        """Token ids, labels and rationales of each part of the text."""
        self.rationales = {split: self.weights(split) for split in self.texts}
        feature = Features({COLUMN: List(Value("float32"))})[COLUMN]
        return {
            split: examples.add_column(COLUMN, self.rationales[split], feature=feature)
            for split, examples in super().encode().items()
        }

    def weights(self, split: str) -> list[list[float]]:
        """Weights of the tokens of each sentence of a part of the text.

        Raises:
            ValueError: if no sentence has a rationale.
        """
        texts = self.texts[split]
        found = [rationale(text, name, self.lexicon) for text, name in zip(texts["text"], classes_of(texts))]
        spans, words = zip(*found)
        encoding = self.tokenizer(texts["text"][:], truncation=True, max_length=self.args.max_length)
        weights = align_weights(encoding, words, spans=spans)
        if not any(map(any, weights)):
            raise ValueError(
                f"no sentence of the {split} text has a word that is in the lexicon with its class; give another "
                "--lexicon_file, or lower --min_count or --min_fraction."
            )
        return weights

    def with_rationale(self, split: str) -> float:
        """Fraction of the sentences of a part of the text that have a rationale."""
        return sum(map(any, self.rationales[split])) / len(self.rationales[split])

    @property
    def chance(self) -> float:
        """Mean fraction of the tokens of a validation sentence that belong to its rationale."""
        parts = [sum(map(bool, row)) / len(row) for row in self.rationales["validation"] if any(row)]
        return sum(parts) / len(parts)

    def collator(self, tokenizer: Any) -> GuidanceCollator:
        return GuidanceCollator(DataCollatorWithPadding(tokenizer))

    def build(self) -> PreTrainedModel:
        return build_classifier(self.args, self.tokenizer, {**class_names(self.labels), "guidance": self.guidance})


def classes_of(texts: Dataset) -> list[str]:
    """Name of the class of each text."""
    names = texts.features["label"].names
    return [names[label] for label in texts["label"]]


class RationaleHits(Observer):
    """How often the strongest key of each head is a token of the rationale: from the first token, and from all.

    Sentences without a rationale do not count. Needs the weights of the current batch in `weights`.
    """

    name = TARGET

    def __init__(self):
        self.weights: torch.Tensor
        self.first, self.all = HeadMeans(type(self).__name__), HeadMeans(type(self).__name__)

    def update(self, call: AttentionCall) -> None:
        _, keys = call.largest()
        in_rationale = self.weights[call.sentences].to(keys.device) > 0
        hits = in_rationale[:, None].expand(-1, keys.shape[1], -1).gather(2, keys).double()
        counted = call.real_queries & in_rationale.any(-1, keepdim=True)
        self.all.add(call, hits, counted)
        self.first.add(call, hits, counted & (call.query_positions == 0))

    def compute(self) -> tuple[HeadScores, HeadScores]:
        return self.first.compute(), self.all.compute()


def measure_heads(trainer: HeadwiseTrainer, examples: Dataset) -> dict[str, list]:
    """How often each head finds rationales, as tables of shape `(layers, heads)`: `found` and `found_by_rows`."""
    model, hits = trainer.accelerator.unwrap_model(trainer.model), RationaleHits()
    examples = model_inputs(examples, trainer.processing_class).remove_columns("labels")
    # Similar lengths need little padding.
    rows = sorted(examples.to_list(), key=lambda example: len(example["input_ids"]))
    with observe(model, hits), torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            batch = on_device(trainer.data_collator(rows[start : start + BATCH]), model)
            hits.weights = batch.pop(COLUMN)
            model(**batch)
    first, of_rows = hits.compute()
    return {"found": first["encoder"].tolist(), "found_by_rows": of_rows["encoder"].tolist()}


def train_system(
    system: str, task: RationaleTask, splits: dict[str, Dataset], training_args: RationaleTrainingArguments
) -> tuple[dict[str, Any], HeadwiseTrainer, str]:
    """Trains and measures a model; returns results, the trainer, and the folder to save the model in."""
    args, run_args = task.args, copy.copy(training_args)
    task.guidance = guidance_of(args) if system == "guided" else None
    if system == "unguided":
        run_args.guidance_weight = 0.0
    trainer = train_classifier(task, system, training_args.seed, splits, run_args)
    measured = {
        prefix + name: table
        for split, prefix in (("validation", ""), ("test", "test_"))
        if split in splits
        for name, table in measure_heads(trainer, splits[split]).items()
    }
    results = {
        "metrics": task.evaluate(partial(predict, trainer), splits),
        "steps": trainer.state.global_step,
        "guidance_weight_initial": trainer.initial_guidance_weight,
        "heads": measured,
    }
    return results, trainer, MODEL_FOLDERS[system]


def guidance_of(args: RationaleArguments) -> dict[str, Any]:
    """Guidance of the configuration."""
    return {
        "heads": {args.layer: {TARGET: args.heads}},
        "targets": {TARGET: "weights"},
        "loss": {TARGET: args.guidance_loss},
    }


def choose_defaults(args: RationaleArguments, training_args: RationaleTrainingArguments) -> None:
    """Sets flags that depend on the checkpoint where the user does not."""
    training_args.choose_defaults(args)
    if args.layer is None:
        layers = load_config("model", args.model).num_hidden_layers if args.model else args.num_hidden_layers
        args.layer = layers - 1


def main(args: RationaleArguments, training_args: RationaleTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(choose_defaults, args, training_args)):
        check_trainer_arguments(training_args)
        if not training_args.trains:
            raise ValueError("num_train_epochs must be greater than 0: this recipe compares trainings.")
        if training_args.guidance_weight == 0:
            raise ValueError("guidance_weight must be greater than 0, or auto.")
        task = RationaleTask(args, training_args.seed)
        task.read(trains=True)
        with PartialState().main_process_first():
            splits = task.encode()
        task.guidance = guidance_of(args)
        config = task.build().config
    runs = {system: run.once(system, partial(train_system, system, task, splits, training_args)) for system in SYSTEMS}
    summary = summarise(runs, task, splits)
    return run.finish(
        summary,
        lambda: publish(runs, task, config, summary, run.folder),
        lambda: print_report(summary, run.folder),
        pushed=MODEL_FOLDERS["guided"],
    )


def head_rows(runs: dict[str, dict[str, Any]], args: RationaleArguments) -> list[RationaleRow]:
    """Results of all heads that are left, by model."""
    rows = []
    for system, run in runs.items():
        tables = {name: torch.tensor(table, dtype=torch.float64) for name, table in run["heads"].items()}
        for layer, head in (~tables["found"].isnan()).nonzero().tolist():
            values = {name: table[layer, head].item() for name, table in tables.items()}
            is_guided = system == "guided" and layer == args.layer and head in args.heads
            values = {"test_found": None, "test_found_by_rows": None, **values}
            rows.append(RationaleRow(system=system, layer=layer, head=head, is_guided=is_guided, **values))
    return rows


def best_heads(rows: list[RationaleRow]) -> dict[str, RationaleRow]:
    """The head of each model that finds most rationales of the validation text; in the guided model, a guided head."""
    return {
        system: max(
            (row for row in rows if row.system == system and (row.is_guided or system == "unguided")),
            key=lambda row: row.found,
        )
        for system in SYSTEMS
    }


def summarise(runs: dict[str, dict[str, Any]], task: RationaleTask, splits: dict[str, Dataset]) -> RationaleSummary:
    args, rows = task.args, head_rows(runs, task.args)
    best = best_heads(rows)
    guided = best["guided"]
    same = next(
        row for row in rows if row.system == "unguided" and (row.layer, row.head) == (guided.layer, guided.head)
    )

    def metric(name: str) -> dict[str, float]:
        return {system: run["metrics"][name] for system, run in runs.items() if name in run["metrics"]}

    def of_best(name: str) -> dict[str, Any]:
        return {system: getattr(row, name) for system, row in best.items()}

    return RationaleSummary(
        **{name: metric(name) for name in ("accuracy", "test_accuracy", "loss", "test_loss")},
        **{name: of_best(name) for name in ("found", "test_found", "found_by_rows", "test_found_by_rows")},
        best_head={system: [row.layer, row.head] for system, row in best.items()},
        same_head=same.found,
        chance=task.chance,
        rows=rows,
        guidance_loss=args.guidance_loss,
        guidance_weight_initial=runs["guided"]["guidance_weight_initial"],
        lexicon=named_files(args.lexicon_file) if args.lexicon_file else task.text,
        lexicon_words=len(task.lexicon),
        with_rationale={split: task.with_rationale(split) for split in splits},
        labels=task.labels,
        model=args.model or "small BERT",
        text=task.text,
        steps=runs["guided"]["steps"],
        train_examples=len(splits["train"]),
        eval_examples=len(splits["validation"]),
        test_examples=len(splits["test"]) if "test" in splits else None,
    )


def publish(
    runs: dict[str, dict[str, Any]], task: RationaleTask, config: Any, summary: RationaleSummary, folder: Path
) -> None:
    """Writes the table of all heads, the picture, and the card of each model."""
    header, lines = rows_table(summary.rows)
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in lines])
    shown = "test_found" if summary.test_examples else "found"
    maps = {system: {"first token": torch.tensor(run["heads"][shown])} for system, run in runs.items()}
    name = "fraction of sentences in which the strongest key is in the rationale"
    draw(plot_head_maps, folder / "heads.png", maps, name, title=f"{Path(summary.model).name}; {summary.text}")
    unguided = copy.deepcopy(config)
    unguided.guidance = None
    parts = {"guided": (config, ", with heads guided to rationales"), "unguided": (unguided, "")}
    for system, (own, part) in parts.items():
        write_classifier_card_of_run(task, runs[system]["metrics"], own, summary, folder / MODEL_FOLDERS[system], part)


def print_report(summary: RationaleSummary, folder: Path) -> None:
    header, lines = summary.table("model", SYSTEMS)
    lines = [["-".join(map(str, cell)) if isinstance(cell, list) else cell for cell in line] for line in lines]
    print("\n" + format_table(header, lines))
    print(f"\nOf the tokens of a sentence with a rationale, {summary.chance:.3f} belong to it.")
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, heads.png, {', '.join(MODEL_FOLDERS.values())}.")


if __name__ == "__main__":
    run_recipe(main, summary=RationaleSummary)
