# Licensed under the Apache License, Version 2.0.
"""Distil a classifier into fewer layers: from labels, and from the logits, attention or relations of its teacher.

    accelerate launch recipes/distil_heads.py                                  # a demonstration on embedded text
    accelerate launch recipes/distil_heads.py recipes/configs/distil_heads.yaml
    accelerate launch recipes/distil_heads.py --model roberta-base --train_file sst2/train.tsv \\
        --validation_file sst2/dev.tsv
    accelerate launch recipes/distil_heads.py --model runs/finetune/model --teacher_epochs 0 \\
        --train_file sst2/train.tsv --validation_file sst2/dev.tsv --student_layers 0 1 2

The teacher is fine-tuned first, unless `--teacher_epochs 0` takes a trained classifier. The students have some of its
layers, start from the same weights and see the same batches:

    labels      the task loss
    logits      (1 − w) · task loss + w · T² · KL(teacher‖student) of the logits (`--distillation_weight`,
                `--distillation_temperature`; Hinton et al. 2015)
    attention   the same, and the attention of each head, KL(teacher‖student), from the layer that the student's layer
                comes from
    relations   the same as logits, and the value and query–key relations of the last layer (MiniLM; Wang et al. 2020,
                2021)

`--guidance_weight` is the weight of attention and relations. Writes to `--output_dir`: `summary.json`, `table.csv`,
`students.png` and `.svg` (accuracy over training), `config.yaml` (the values of the run), `teacher/` if it is trained,
and `model/SYSTEM/`, the students with tokenizer, code and card.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, set_seed

from .. import HeadwiseTrainer
from .._tables import format_table
from ..training import LogWhenSaved, check_trainer_arguments
from .arguments.base import OF_HIDDEN_STATES, flag
from .arguments.distil_heads import DistilArguments
from .checkpoints import load_config
from .classifier_tasks import SampledTask, write_classifier_card_of_run
from .classifying import (
    SEQUENCE_CLASSIFIER,
    ClassifierTrainingArguments,
    accuracy,
    class_names,
    load_classifier,
    predict,
    train_classifier,
)
from .distil_plots import plot_students
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, write_csv
from .summaries.distil_heads import DistilSummary


TEACHER, MODEL_FOLDER = "teacher", "model"
LEARNT = {
    "labels": [],
    "logits": ["logits"],
    "attention": ["logits", "attention"],
    "relations": ["logits", "relations"],
}


@dataclass
class DistilTrainingArguments(ClassifierTrainingArguments):
    """[`ClassifierTrainingArguments`] with another output folder, evaluations and the losses of a teacher."""

    output_dir: str = flag("runs/distil_heads", "Output folder; it must not hold another run.")
    distillation_weight: float = flag(0.5, "Weight of the logits of the teacher; the task loss has the rest of 1.")
    distillation_temperature: float = flag(2.0, "Temperature of the logits of teacher and student.")
    guidance_weight: str = flag(
        "auto", "Initial weight of attention and relations: a number, or auto to equal the first task loss."
    )
    guidance_schedule: str = flag("constant", "Schedule of this weight.")
    eval_strategy: str = flag("steps", "When to evaluate.")
    eval_steps: float | None = flag(0.1, "Steps between evaluations, or their fraction of the run.")

    without_effect: ClassVar[dict[str, str]] = OF_HIDDEN_STATES


def layers_of(model: PreTrainedModel) -> str:
    """Name of the list of layers of a model.

    Raises:
        ValueError: if there is none with a module for each layer, as in ALBERT.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return name
    raise ValueError(f"{type(model).__name__} has no list with a module for each layer, which a student could take.")


def student_of(teacher: PreTrainedModel, layers: Sequence[int], guidance: dict[str, Any] | None) -> PreTrainedModel:
    """A model with some layers of a teacher, and copies of their weights and of all others.

    Args:
        teacher (`PreTrainedModel`): A headwise model with all of its heads.
        layers (sequence of `int`): Its layers, in the order of the student.
        guidance (`dict`, *optional*): Guidance of the student.

    Raises:
        ValueError: if the teacher lacks a layer.
    """
    count, place = teacher.config.num_hidden_layers, layers_of(teacher)
    if wrong := [layer for layer in layers if layer >= count]:
        raise ValueError(f"student_layers name layer {wrong[0]}, but the teacher has {count} layers.")
    config = copy.deepcopy(teacher.config)
    config.num_hidden_layers, config.guidance = len(layers), guidance
    student = type(teacher)(config)
    weights = teacher.state_dict()
    numbered = re.compile(rf"(?<={re.escape(place)}\.)\d+")

    def source(name: str) -> str:
        return numbered.sub(lambda found: str(layers[int(found[0])]), name, count=1)

    student.load_state_dict({name: weights[source(name)] for name in student.state_dict()})
    return student


def guidance_of(system: str, args: DistilArguments) -> dict[str, Any] | None:
    """Guidance of a student; `None` without attention and relations."""
    layers = dict(enumerate(args.student_layers))
    if system == "attention":
        return {TEACHER: {"layers": layers, "loss": args.attention_loss}}
    if system == "relations":
        last = max(layers)
        taught = {"layers": {last: layers[last]}, "relations": args.relations, "relation_heads": args.relation_heads}
        return {TEACHER: {name: value for name, value in taught.items() if value is not None}}
    return None


def without_evaluation(training_args: DistilTrainingArguments, epochs: float) -> DistilTrainingArguments:
    """Training arguments of the teacher."""
    own = copy.copy(training_args)
    own.num_train_epochs, own.max_steps, own.eval_strategy, own.load_best_model_at_end = epochs, -1, "no", False
    own.guidance_weight = own.distillation_weight = 0.0
    return own


def train_teacher(
    task: SampledTask, splits: dict[str, Dataset], training_args: DistilTrainingArguments
) -> tuple[dict[str, Any], HeadwiseTrainer, str | None]:
    """Fine-tunes the teacher if needed, and evaluates it."""
    own = without_evaluation(training_args, task.args.teacher_epochs)
    trainer = train_classifier(task, TEACHER, own.seed, splits, own)
    return evaluated(trainer, task, splits), trainer, TEACHER if own.trains else None


def evaluated(trainer: HeadwiseTrainer, task: SampledTask, splits: dict[str, Dataset]) -> dict[str, Any]:
    """Metrics of a model, and the classes that it gives to the validation text."""
    outputs_of = cache(partial(predict, trainer))
    metrics = task.evaluate(outputs_of, splits)
    return {"metrics": metrics, "answers": outputs_of(splits["validation"]).predictions.argmax(-1).tolist()}


def train_student(
    system: str,
    task: SampledTask,
    teacher: PreTrainedModel,
    splits: dict[str, Dataset],
    training_args: DistilTrainingArguments,
) -> tuple[dict[str, Any], HeadwiseTrainer, str]:
    """Trains a student; returns results, the trainer, and the folder to save the model in."""
    own, guidance = copy.copy(training_args), guidance_of(system, task.args)
    if guidance is None:
        own.guidance_weight = 0.0
    if system == "labels":
        own.distillation_weight = 0.0
    set_seed(own.seed)
    student = student_of(teacher, task.args.student_layers, guidance)
    taught = {} if system == "labels" else {"teacher": teacher}
    callbacks = [LogWhenSaved()]
    trainer = train_classifier(
        task, system, own.seed, splits, own, student, compute_metrics=accuracy, callbacks=callbacks, **taught
    )
    last = trainer.state.global_step
    history = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    results = evaluated(trainer, task, splits)
    curve = [[entry["step"], entry["eval_accuracy"]] for entry in history if entry["step"] < last]
    results |= {
        "curve": [*curve, [last, results["metrics"]["accuracy"]]],
        "steps": last,
        "guidance_weight_initial": trainer.initial_guidance_weight,
    }
    return results, trainer, f"{MODEL_FOLDER}/{system}"


def choose_defaults(args: DistilArguments, training_args: DistilTrainingArguments) -> None:
    """Sets flags that depend on the teacher where the user does not."""
    training_args.choose_defaults(args)
    if args.student_layers is None:
        layers = load_config("model", args.model).num_hidden_layers if args.model else args.num_hidden_layers
        args.student_layers = list(range(1, layers, 2)) or [0]


def main(args: DistilArguments, training_args: DistilTrainingArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args, training_args, pushes=False)
    with run.preparing(partial(choose_defaults, args, training_args)):
        check_trainer_arguments(training_args)
        if not training_args.trains:
            raise ValueError("num_train_epochs must be greater than 0: this recipe trains students.")
        if "logits" in args.systems and not training_args.distillation_weight:
            raise ValueError("distillation_weight must be greater than 0, or systems without logits.")
        task = SampledTask(args, training_args.seed)
        task.read(trains=args.teacher_epochs > 0)
        with PartialState().main_process_first():
            splits = task.encode()
        # Checks that the teacher has these layers, and the guidance of each student.
        model = task.build()
        configs = {
            system: student_of(model, args.student_layers, guidance_of(system, args)).config for system in args.systems
        }
        layers = model.config.num_hidden_layers
    of_teacher = run.once(TEACHER, partial(train_teacher, task, splits, training_args))

    @cache
    def teacher() -> PreTrainedModel:
        """The teacher, loaded if a student is trained."""
        place = run.folder / TEACHER if args.teacher_epochs else args.model
        return load_classifier("model", str(place), SEQUENCE_CLASSIFIER, class_names(task.labels))

    runs = {
        system: run.once(system, lambda system=system: train_student(system, task, teacher(), splits, training_args))
        for system in args.systems
    }
    summary = summarise(of_teacher, runs, task, splits, training_args, layers)
    return run.finish(
        summary,
        lambda: publish(runs, task, configs, summary, run.folder),
        lambda: print_report(summary, args.systems, run.folder),
    )


def summarise(
    teacher: dict[str, Any],
    runs: dict[str, dict[str, Any]],
    task: SampledTask,
    splits: dict[str, Dataset],
    training_args: DistilTrainingArguments,
    layers: int,
) -> DistilSummary:
    curves = {system: run["curve"] for system, run in runs.items()}
    # The first one of equal values.
    best = {system: max(curve, key=lambda point: (point[1], -point[0])) for system, curve in curves.items()}

    def metric(name: str) -> dict[str, float]:
        return {system: run["metrics"][name] for system, run in runs.items() if name in run["metrics"]}

    def first_at_labels(curve: list[list[float]]) -> int | None:
        least = best["labels"][1] if "labels" in best else float("inf")
        return next((step for step, value in curve if value >= least), None)

    return DistilSummary(
        **{name: metric(name) for name in ("accuracy", "test_accuracy", "loss")},
        best_accuracy={system: value for system, (_, value) in best.items()},
        steps_to_best={system: step for system, (step, _) in best.items()},
        steps_to_labels={system: first_at_labels(curve) for system, curve in curves.items()},
        mean_accuracy={system: sum(value for _, value in curve) / len(curve) for system, curve in curves.items()},
        agreement={
            system: float(np.mean(np.array(run["answers"]) == np.array(teacher["answers"])))
            for system, run in runs.items()
        },
        curve=curves,
        guidance_weight_initial={system: run["guidance_weight_initial"] for system, run in runs.items()},
        teacher_accuracy=teacher["metrics"]["accuracy"],
        teacher_test_accuracy=teacher["metrics"].get("test_accuracy"),
        teacher_layers=layers,
        student_layers=task.args.student_layers,
        distillation_weight=training_args.distillation_weight,
        distillation_temperature=training_args.distillation_temperature,
        labels=task.labels,
        model=task.args.model or "small BERT",
        text=task.text,
        steps=next(iter(runs.values()))["steps"],
        train_examples=len(splits["train"]),
        eval_examples=len(splits["validation"]),
        test_examples=len(splits["test"]) if "test" in splits else None,
    )


def publish(
    runs: dict[str, dict[str, Any]],
    task: SampledTask,
    configs: dict[str, Any],
    summary: DistilSummary,
    folder: Path,
) -> None:
    """Writes the table, the picture, and the card of each student."""
    header, lines = summary.table("student", runs)
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in lines])
    size = f"{summary.teacher_layers} into {len(summary.student_layers)} layers"
    title = f"{Path(summary.model).name}, {size}; {summary.text}"
    draw(plot_students, folder / "students.png", summary.curve, teacher=summary.teacher_accuracy, title=title)
    for system, config in configs.items():
        kept = ", ".join(map(str, summary.student_layers))
        learnt = [what for what in LEARNT[system] if what != "logits" or summary.distillation_weight]
        part = f" in its layers {kept} of {summary.teacher_layers}, counted from 0"
        part += f", which has learnt from the {' and the '.join(learnt)} of its teacher" if learnt else ""
        write_classifier_card_of_run(
            task, runs[system]["metrics"], config, summary, folder / MODEL_FOLDER / system, part
        )


def print_report(summary: DistilSummary, systems: Sequence[str], folder: Path) -> None:
    print("\n" + format_table(*summary.table("student", systems)))
    print(f"\nThe teacher has an accuracy of {summary.teacher_accuracy:.3f} on the validation text.")
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, students.png, {MODEL_FOLDER}/.")


if __name__ == "__main__":
    run_recipe(main, summary=DistilSummary)
