# Licensed under the Apache License, Version 2.0.
"""Guide a head of a masked language model to syntactic heads or antecedents, beside an unguided twin.

    accelerate launch recipes/supervise_mlm.py                     # a demonstration on embedded sentences with trees
    accelerate launch recipes/supervise_mlm.py recipes/configs/supervise_mlm.yaml    # the same, every key explained
    accelerate launch recipes/supervise_mlm.py --model bert-base-uncased --layer 6 --num_train_epochs 3 \\
        --train_file en_ewt-ud-dev.conllu --test_file en_ewt-ud-test.conllu
    accelerate launch recipes/supervise_mlm.py --task antecedents --model bert-base-uncased \\
        --train_file open_sesame:refl.0.gz --test_file open_sesame:refl.1.gz winobias:wino/data

The model is trained twice on masked tokens of the training sentences, from the same weights, with the same batches and
masks: once with one head guided to the targets of the task, and once unguided. A checkpoint without a
masked-language-model head gets one with random weights, whose output layer is tied to the word embeddings.

The recipe measures, on test sentences without masks, how often the strongest key of each head is right, before and
after training. It reports the guided head, the head of the unguided model that is best on validation sentences, and
the word at the most frequent distance. With `--task parsing`, a case is a word with a syntactic head, and all words
but the word itself compete: the accuracy is the unlabelled attachment score without roots. With `--task antecedents`,
a case is a mention, and all words compete, or only the head words of mentions.

Writes to `--output_dir`: `summary.json`, `table.csv` (all models, data and groups of cases), `curves.png` and `.svg`
(losses), `heads.png` and `.svg` (accuracy of each head), `config.yaml` (the values of the run), `model/` (the guided
model with tokenizer, code and card) and `model_unguided/`. `--push_to_hub true --hub_model_id USER/NAME` pushes
`model/` to the Hub after everything is written.
"""

import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedModel, set_seed

from .. import (
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
    MaskedLanguageModelCollator,
    headwise_model,
)
from .._tables import format_table
from ..analysis.plots.base import plot_head_maps, plot_pretraining
from ..data import train_byte_level_bpe
from ..hub.card import Metric, write_model_card
from ..models.headwise_classes import twin_class
from ..training import LogWhenSaved, StepTimer, check_trainer_arguments, show_progress, train_from_newest
from .arguments.base import OF_A_TEACHER, flag, refuse_flags
from .arguments.supervise_mlm import SuperviseArguments
from .checkpoints import load_config, load_tokenizer, refused
from .classifying import fitting_length
from .curves import drawn_log
from .pictures import draw
from .run import SUMMARY, Run, cpu_only, run_recipe, write_csv
from .small_models import MASKED_CLASS, architecture_row, small_config
from .summaries.base import rows_table
from .summaries.supervise_mlm import SupervisedRow, SuperviseSummary
from .supervised_tasks import ALL, AMONG_MENTIONS, SUPERVISED_TASKS, TRAINING, VALIDATION, Measured, SupervisedTask


INITIAL, UNGUIDED, GUIDED = "initial", "unguided", "guided"
MODEL_FOLDERS = {INITIAL: None, UNGUIDED: "model_unguided", GUIDED: "model"}
SMALL = "bert"
DEFAULT_LENGTH = 128
POSITIONS = 512  # of the small model, which also reads longer sentences than it is trained on
DEMONSTRATION_RATE, CHECKPOINT_RATE = 3e-3, 2e-4
DEMONSTRATION_EPOCHS, CHECKPOINT_EPOCHS = 75.0, 3.0


@dataclass
class SuperviseTrainingArguments(HeadwiseTrainingArguments):
    """[`HeadwiseTrainingArguments`] with defaults for one guided head."""

    output_dir: str = flag("runs/supervise_mlm", "Output folder; it must not hold another run.")
    learning_rate: float | None = flag(
        None,
        f"Learning rate; by default {CHECKPOINT_RATE:g} for a checkpoint, {DEMONSTRATION_RATE:g} for the small BERT.",
    )
    num_train_epochs: float | None = flag(
        None,
        f"Epochs; by default {CHECKPOINT_EPOCHS:g} for a checkpoint, {DEMONSTRATION_EPOCHS:g} for the small BERT.",
    )
    guidance_weight: str = flag("1", "Initial weight of the guidance loss, or auto.")
    guidance_schedule: str = flag("constant", "Schedule of the guidance weight.")
    per_device_train_batch_size: int = flag(16, "Examples per training batch.")
    per_device_eval_batch_size: int = flag(32, "Examples per evaluation batch.")
    warmup_steps: float = flag(0.1, "Steps of linear warm-up, or their fraction.")
    train_sampling_strategy: str = flag("group_by_length", "Order of the examples.")
    eval_strategy: str = flag("epoch", "When to evaluate on the validation sentences.")
    logging_steps: float = flag(10, "Log every this many steps.")
    save_strategy: str = flag("no", "When to save checkpoints; the trained models are saved in any case.")
    report_to: str | None = flag("none", "Trackers to report to.")

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, OF_A_TEACHER)
        super().__post_init__()

    def choose_defaults(self, args: SuperviseArguments) -> None:
        """Sets the learning rate, the number of epochs and the length of sentences where the user does not."""
        config = load_config("model", args.model) if args.model else None
        args.max_length = fitting_length("max_length", args.max_length, DEFAULT_LENGTH, config)
        if self.learning_rate is None:
            self.learning_rate = CHECKPOINT_RATE if args.model else DEMONSTRATION_RATE
        if self.num_train_epochs is None:
            self.num_train_epochs = CHECKPOINT_EPOCHS if args.model else DEMONSTRATION_EPOCHS


class SupervisedModel:
    """The model before training, with or without guidance, but the same weights.

    Attributes:
        tokenizer (`PreTrainedTokenizerBase`): That of the checkpoint, or one that is trained on the sentences.
        collator ([`MaskedLanguageModelCollator`]): Masks tokens; equal seeds give equal masks.
        layer (`int`): Layer of the guided head.
        new_weights (`list[str]`): Weights that the checkpoint lacks; set by `build`.
    """

    def __init__(self, args: SuperviseArguments, task: SupervisedTask, seed: int):
        self.args, self.task, self.seed = args, task, seed
        self.new_weights: list[str] = []
        if args.model:
            self.tokenizer = load_tokenizer("model", args.model)
            config = load_config("model", args.model)
        else:
            texts = [item.text for item in task.train]
            self.tokenizer = train_byte_level_bpe(texts, args.vocab_size, kind=SMALL)
            config = self.config
        self.collator = MaskedLanguageModelCollator(self.tokenizer, args.mlm_probability, seed)
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        self.layer = layers // 2 if args.layer is None else args.layer
        for name, value, number in (("layer", self.layer, layers), ("head", args.head, heads)):
            if value >= number:
                raise ValueError(f"{name} must be below {number}, the number of {name}s, got {value}.")

    @cached_property
    def config(self) -> PreTrainedConfig:
        """Configuration of the small model."""
        return small_config(
            architecture_row(SMALL),
            self.tokenizer,
            length=max(self.args.max_length, POSITIONS),
            num_hidden_layers=self.args.num_hidden_layers,
            hidden_size=self.args.hidden_size,
            num_attention_heads=self.args.num_attention_heads,
            dropout=self.args.dropout,
        )

    def build(self, is_guided: bool) -> PreTrainedModel:
        set_seed(self.seed)
        guidance = self.task.guidance(self.layer) if is_guided else None
        if self.args.model:
            with refused("model", self.args.model):
                model, loading = headwise_model(
                    self.args.model, MASKED_CLASS, guidance=guidance, output_loading_info=True
                )
            self.new_weights = sorted(loading["missing_keys"])
            return model
        config = copy.deepcopy(self.config)
        config.guidance = guidance
        return twin_class("BertForMaskedLM")(config)


def trainer_of(
    name: str,
    source: SupervisedModel,
    training_args: SuperviseTrainingArguments,
    train: Dataset,
    validation: Dataset,
) -> HeadwiseTrainer:
    """Trainer of one model; both see the same batches and masks."""
    run_args = copy.copy(training_args)
    run_args.output_dir = str(Path(training_args.output_dir) / "checkpoints" / name)
    model = source.build(name == GUIDED)
    if name != GUIDED:
        run_args.guidance_weight = 0.0
        column = f"guidance_{source.task.target}"
        train, validation = train.remove_columns(column), validation.remove_columns(column)
    set_seed(training_args.seed)
    trainer = HeadwiseTrainer(
        model,
        run_args,
        train_dataset=train,
        eval_dataset=validation,
        data_collator=source.collator,
        processing_class=source.tokenizer,
    )
    show_progress(trainer, name)
    return trainer


def make(
    name: str,
    source: SupervisedModel,
    training_args: SuperviseTrainingArguments,
    train: Dataset,
    validation: Dataset,
    texts: dict[str, Dataset],
) -> tuple[dict[str, Any], HeadwiseTrainer, str | None]:
    """Trains and measures one model; returns results, trainer, and the folder to save it in, see [`Run.once`]."""
    trainer = trainer_of(name, source, training_args, train, validation)
    timer = StepTimer()
    if name != INITIAL:
        trainer.add_callback(timer)
        trainer.add_callback(LogWhenSaved())
        train_from_newest(trainer)
    history, steps = list(trainer.state.log_history), trainer.state.global_step
    losses = {data: trainer.evaluate(own, metric_key_prefix="test")["test_loss"] for data, own in texts.items()}
    model = trainer.accelerator.unwrap_model(trainer.model)
    measured = {
        data: source.task.measure(model, source.tokenizer, items).to_dict() for data, items in source.task.data.items()
    }
    results = {
        "measured": measured,
        "mlm_loss": losses,
        "steps": steps,
        "seconds_per_step": timer.figures()["seconds_per_step"],
        "new_weights": source.new_weights,
        "history": history,
    }
    return results, trainer, MODEL_FOLDERS[name]


def main(args: SuperviseArguments, training_args: SuperviseTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args)
    with run.preparing(partial(training_args.choose_defaults, args)):
        if training_args.max_steps <= 0 and training_args.num_train_epochs <= 0:
            raise ValueError("num_train_epochs must be greater than 0: the recipe trains the model.")
        with PartialState().main_process_first():
            task = SUPERVISED_TASKS[args.task](args)
            source = SupervisedModel(args, task, training_args.seed)
            train, validation = (
                task.examples(items, source.tokenizer, True) for items in (task.train, task.validation)
            )
            texts = {
                data: task.examples(items[: args.max_eval_examples], source.tokenizer, False)
                for data, items in task.data.items()
            }
        check_trainer_arguments(training_args, source.collator)
        # What the architecture refuses is refused before anything is written.
        config = source.build(True).config
    runs = {
        name: run.once(name, partial(make, name, source, training_args, train, validation, texts))
        for name in MODEL_FOLDERS
    }
    measured = {
        name: {data: Measured.from_dict(own) for data, own in of_model["measured"].items()}
        for name, of_model in runs.items()
    }
    summary = summarise(runs, measured, source)
    return run.finish(
        summary,
        lambda: publish(runs, measured, source, summary, config, run.folder),
        lambda: print_report(summary, run.folder),
        pushed=MODEL_FOLDERS[GUIDED],
    )


def rows_of(measured: dict[str, dict[str, Measured]], source: SupervisedModel) -> list[SupervisedRow]:
    """A row per model, data and group of cases."""
    rows = []
    for model, of_model in measured.items():
        chosen = of_model[VALIDATION].accuracy[ALL].best()
        for data, own in of_model.items():
            for group, scores in own.accuracy.items():
                best, table = scores.best(), scores[chosen.site]
                rows.append(
                    SupervisedRow(
                        model=model,
                        data=data,
                        group=group,
                        cases=own.counts[group],
                        guided_head=table[source.layer, source.args.head].item(),
                        chosen_head=table[chosen.layer, chosen.head].item(),
                        chosen=f"{chosen.layer}.{chosen.head}",
                        best_head=best.score,
                        best=f"{best.layer}.{best.head}",
                        baselines=own.baselines[group],
                    )
                )
    return rows


def accuracies(rows: list[SupervisedRow], group: str) -> dict[str, float]:
    """Accuracy on one group by data and system, see [`SuperviseSummary`]."""
    found = {}
    for row in rows:
        if row.group == group:
            found[f"{row.data}_{row.model}"] = row.guided_head if row.model == GUIDED else row.chosen_head
            found |= {f"{row.data}_{name}": value for name, value in row.baselines.items()}
    return found


def summarise(
    runs: dict[str, dict[str, Any]], measured: dict[str, dict[str, Measured]], source: SupervisedModel
) -> SuperviseSummary:
    args, task = source.args, source.task
    rows = rows_of(measured, source)
    accuracy_key = f"eval_guided_accuracy_{task.target}"
    targets = [target for item in task.train for target in task.targets(item)]
    return SuperviseSummary(
        task=args.task,
        accuracy=accuracies(rows, ALL),
        accuracy_among_mentions=accuracies(rows, f"{ALL}, {AMONG_MENTIONS}"),
        mlm_loss={f"{data}_{name}": loss for name, run in runs.items() for data, loss in run["mlm_loss"].items()},
        layer=source.layer,
        head=args.head,
        guidance_loss=args.guidance_loss,
        offset=task.offset,
        accuracy_curve=[[e["step"], e[accuracy_key]] for e in runs[GUIDED]["history"] if accuracy_key in e],
        rows=rows,
        steps=runs[GUIDED]["steps"],
        seconds_per_step={name: runs[name]["seconds_per_step"] for name in (GUIDED, UNGUIDED)},
        new_weights=runs[GUIDED]["new_weights"],
        model=args.model or "small BERT",
        train_text=task.text,
        train_examples=len(task.train),
        eval_examples=len(task.validation),
        test_examples={data: len(items) for data, items in task.tests.items()},
        train_targets=sum(target is not None for target in targets),
    )


def publish(
    runs: dict[str, dict[str, Any]],
    measured: dict[str, dict[str, Measured]],
    source: SupervisedModel,
    summary: SuperviseSummary,
    config: PreTrainedConfig,
    folder: Path,
) -> None:
    """Writes the table, the pictures and the card of each trained model."""
    header, lines = rows_table(summary.rows)
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in lines])
    title = f"{Path(summary.model).name}; {summary.task}, head {summary.layer}.{summary.head} is guided"
    maps = {
        name: {
            data: table for data, own in of_model.items() for table in own.accuracy[ALL].values() if data != TRAINING
        }
        for name, of_model in measured.items()
    }
    draw(plot_head_maps, folder / "heads.png", maps, "accuracy of the strongest key", title=title)
    trained = {name: drawn_log(runs[name]["history"]) for name in (GUIDED, UNGUIDED)}
    draw(plot_pretraining, folder / "curves.png", trained, title=title)
    loss = "masked-language-model loss (nats, mean over masked tokens)"
    for name, of_model in runs.items():
        if MODEL_FOLDERS[name] is None:
            continue
        head = f"head {summary.layer}.{summary.head} guided to the target {source.task.target}"
        own = copy.deepcopy(config)
        own.guidance = config.guidance if name == GUIDED else None
        write_model_card(
            folder / MODEL_FOLDERS[name],
            name=f"{name} {Path(summary.model).name}",
            description=f"{summary.model}, trained for {summary.steps:,} steps on masked tokens, with "
            f"{head if name == GUIDED else 'the stock loss, beside its guided twin'}.",
            config=own,
            task="fill-mask",
            figures={
                **{f"mlm_loss_{data}": value for data, value in of_model["mlm_loss"].items()},
                **{f"accuracy_{data}": summary.accuracy[f"{data}_{name}"] for data in source.task.data},
            },
            metric=Metric("loss", loss, of_model["mlm_loss"][VALIDATION]),
            dataset=summary.train_text,
            provenance=summary.provenance,
            language=None if source.args.train_file else "en",
            license=source.args.license,
            base_model=source.args.model,
        )


def print_report(summary: SuperviseSummary, folder: Path) -> None:
    names = [TRAINING, VALIDATION, *summary.test_examples]
    systems = list(
        dict.fromkeys(key.removeprefix(f"{VALIDATION}_") for key in summary.accuracy if key.startswith(VALIDATION))
    )
    lines = [
        [
            system,
            *(summary.accuracy.get(f"{data}_{system}") for data in names),
            *(summary.mlm_loss.get(f"{data}_{system}") for data in names),
        ]
        for system in systems
    ]
    header = ["system", *(f"accuracy {data}" for data in names), *(f"MLM loss {data}" for data in names)]
    print("\n" + format_table(header, lines))
    print(
        f"Accuracies are those of the guided head {summary.layer}.{summary.head}, and of the best heads of the other "
        "models on the validation data."
    )
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, heads.png, curves.png, {MODEL_FOLDERS[GUIDED]}/.")


if __name__ == "__main__":
    run_recipe(main, summary=SuperviseSummary)
