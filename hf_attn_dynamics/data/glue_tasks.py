# Licensed under the Apache License, Version 2.0.
"""The tasks of GLUE: their texts, classes and splits."""

from collections.abc import Mapping
from dataclasses import dataclass, field


GLUE = "nyu-mll/glue"  # on the Hub


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE.

    Args:
        name (`str`): Configuration on the Hub.
        title (`str`): Folder among the files of GLUE.
        texts (`tuple[tuple[str, ...], ...]`): For each text column, its name on the Hub and other names in files.
        labels (`tuple[str, ...]`, *optional*): Class names in the order of their ids; `None` for scores from 0 to 5.
        label_column (`tuple[str, ...]`): Names of the label column.
        validation (`tuple[str, ...]`): Splits for evaluation.
        test (`dict[str, str]`): Splits without published labels, by their file names in a submission.
        answers_by_name (`bool`): Whether a submission has class names instead of ids.
        without_header (`tuple[str, ...]`): Columns of TSV files without header.
    """

    name: str
    title: str
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...] | None
    label_column: tuple[str, ...] = ("label",)
    validation: tuple[str, ...] = ("validation",)
    test: Mapping[str, str] = field(default_factory=dict)
    answers_by_name: bool = False
    without_header: tuple[str, ...] = ()


_SENTENCE, _SENTENCE1, _SENTENCE2 = ("sentence",), ("sentence1",), ("sentence2",)


_ENTAILMENT = ("entailment", "not_entailment")


GLUE_TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "cola",
            "CoLA",
            (_SENTENCE,),
            ("unacceptable", "acceptable"),
            test={"CoLA": "test"},
            without_header=("source", "label", "star", "sentence"),
        ),
        GlueTask(
            "sst2",
            "SST-2",
            (_SENTENCE,),
            ("negative", "positive"),
            test={"SST-2": "test"},
            without_header=("sentence", "label"),
        ),
        GlueTask(
            "mrpc",
            "MRPC",
            (("sentence1", "#1 string"), ("sentence2", "#2 string")),
            ("not_equivalent", "equivalent"),
            label_column=("label", "quality"),
            test={"MRPC": "test"},
        ),
        GlueTask(
            "stsb", "STS-B", (_SENTENCE1, _SENTENCE2), None, label_column=("label", "score"), test={"STS-B": "test"}
        ),
        GlueTask(
            "qqp",
            "QQP",
            (("question1",), ("question2",)),
            ("not_duplicate", "duplicate"),
            label_column=("label", "is_duplicate"),
            test={"QQP": "test"},
        ),
        GlueTask(
            "mnli",
            "MNLI",
            (("premise", "sentence1"), ("hypothesis", "sentence2")),
            ("entailment", "neutral", "contradiction"),
            label_column=("label", "gold_label"),
            validation=("validation_matched", "validation_mismatched"),
            test={"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched", "AX": "ax"},
            answers_by_name=True,
        ),
        GlueTask("qnli", "QNLI", (("question",), _SENTENCE), _ENTAILMENT, test={"QNLI": "test"}, answers_by_name=True),
        GlueTask("rte", "RTE", (_SENTENCE1, _SENTENCE2), _ENTAILMENT, test={"RTE": "test"}, answers_by_name=True),
        GlueTask("wnli", "WNLI", (_SENTENCE1, _SENTENCE2), ("not_entailment", "entailment"), test={"WNLI": "test"}),
    )
}
"""The tasks of GLUE by name (`dict[str, GlueTask]`)."""


def glue_task(name: str) -> GlueTask:
    """Looks up a task of GLUE by its name on the Hub or the title of its folder.

    Args:
        name (`str`): Name of the task, such as `"sst2"` or `"SST-2"`.

    Raises:
        ValueError: if the task is unknown.

    Example:
        >>> glue_task("STS-B").name
        'stsb'
    """
    key = _folder_key(name)
    if key not in GLUE_TASKS:
        raise ValueError(f"task must be one of GLUE ({', '.join(GLUE_TASKS)}), got {name!r}.")
    return GLUE_TASKS[key]


def _folder_key(name: str) -> str:
    return name.casefold().replace("-", "")
