# Licensed under the Apache License, Version 2.0.
"""Tasks of `supervise_mlm`: sentences, the word that each word should attend to, and the accuracy of every head.

parsing        each word attends to its syntactic head
antecedents    a mention attends to its antecedent
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import HeadScores, SyntacticRoles, coreference_accuracy, observe
from ..analysis.running import reader_of
from ..data import (
    CoreferenceItem,
    Tree,
    add_distractors,
    align_targets,
    coreference_targets,
    embedded_coreference,
    embedded_trees,
    load_conllu,
    load_coreference,
    tree_targets,
)
from .arguments.supervise_mlm import SuperviseArguments
from .run import named_files
from .summaries.probe_coreference import BASELINES


ALL, AMONG_MENTIONS = "all", "among mentions"
OFFSET = "offset"  # name of the baseline
TRAINING, VALIDATION, TEST = "training", "validation", "test"
TEST_EVERY = 5  # of the embedded sentences, one is for the test
RARE, FEW = 0.01, 10  # relations with a smaller fraction, or number, of the words get no row of their own
TO_HEAD = "to head"
Item = TypeVar("Item", Tree, CoreferenceItem)


@dataclass(frozen=True)
class Measured:
    """Accuracy of every head by group of cases, beside baselines; the group "all" comes first.

    Args:
        accuracy (`dict[str, HeadScores]`): Fraction of cases in which the strongest key is right.
        counts (`dict[str, int]`): Number of cases.
        baselines (`dict[str, dict[str, float]]`): Accuracies of baselines, by group and name.
    """

    accuracy: dict[str, HeadScores]
    counts: dict[str, int]
    baselines: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "accuracy": {group: scores.to_dict() for group, scores in self.accuracy.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Measured":
        scores = {group: HeadScores.from_dict(table) for group, table in values["accuracy"].items()}
        return cls(**{**values, "accuracy": scores})


class SupervisedTask:
    """Base class of the tasks.

    Attributes:
        target (`str`): Name of the target of the guided head.
        train, validation (`list`): Sentences to train on, and to choose heads of the unguided model on.
        tests (`dict[str, list]`): Sentences to measure on, by name.
        text (`str`): Name of the training data.
        offset (`int`): The most frequent distance to the target in the training sentences, in words.
    """

    target: str

    def __init__(self, args: SuperviseArguments):
        self.args = args
        if args.train_file:
            items = sampled(self.load_train(), args.max_examples)
            self.tests = {name: sampled(own, args.max_test_examples) for name, own in self.load_tests().items()}
            self.text = named_files(args.train_file)
        else:
            items, self.tests = self.embedded(), {}
            items, self.tests[TEST] = divided(items, TEST_EVERY)
            self.text = "embedded sentences"
        self.train, self.validation = divided(items, args.validation_every)
        if not self.train or not self.validation:
            raise ValueError(
                f"there are {len(items)} training sentences; validation_every={args.validation_every} leaves none to "
                "train or to validate on."
            )
        distances = Counter(distance for item in self.train for distance in self.distances(item))
        if not distances:
            raise ValueError("the training sentences have no word with a target.")
        # The nearest of several equally frequent distances.
        self.offset = max(distances, key=lambda one: (distances[one], -abs(one), one))

    def embedded(self) -> list[Any]:
        """Sentences of the package."""
        raise NotImplementedError

    def load_train(self) -> list[Any]:
        """Sentences of the training files."""
        raise NotImplementedError

    def load_tests(self) -> dict[str, list[Any]]:
        """Sentences of the test files, by name."""
        raise NotImplementedError

    def targets(self, item: Any) -> list[int | None]:
        """The word that each word of a sentence should attend to."""
        raise NotImplementedError

    def distances(self, item: Any) -> Iterator[int]:
        """Distances, in words, from the words with a target to their targets."""
        raise NotImplementedError

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[Any]) -> Measured:
        """Accuracy of every head of a model on sentences."""
        raise NotImplementedError

    @property
    def data(self) -> dict[str, list[Any]]:
        """Sentences to measure on, by name; as many of the training sentences as there are for validation."""
        return {TRAINING: self.train[: len(self.validation)], VALIDATION: self.validation, **self.tests}

    def examples(self, items: list[Any], tokenizer: PreTrainedTokenizerBase, with_targets: bool) -> Dataset:
        """Token ids of sentences and, in a column `guidance_NAME`, the key that each token should attend to."""
        encoding = tokenizer([item.text for item in items], truncation=True, max_length=self.args.max_length)
        columns = {"input_ids": encoding["input_ids"]}
        if with_targets:
            targets, spans = [self.targets(item) for item in items], [item.spans for item in items]
            columns[f"guidance_{self.target}"] = align_targets(encoding, targets, spans=spans)
        return Dataset.from_dict(columns)

    def guidance(self, layer: int) -> dict[str, Any]:
        """The guidance of the configuration: one head."""
        return {
            "heads": {layer: {self.target: [self.args.head]}},
            "targets": {self.target: "keys"},
            "loss": self.args.guidance_loss,
        }


class Parsing(SupervisedTask):
    """Each word attends to its head in the dependency tree.

    A case is a word with a head, punctuation included; words that share their tokens count as one. A head is right if
    the word with the largest attention weight outside of the word itself is its head, see [`SyntacticRoles`]: special
    tokens do not compete. The accuracy over all cases is the unlabelled attachment score without roots.
    """

    target = "syntax"

    def embedded(self) -> list[Tree]:
        return embedded_trees()

    def load_train(self) -> list[Tree]:
        return load_conllu(self.args.train_file)

    def load_tests(self) -> dict[str, list[Tree]]:
        return {TEST: load_conllu(self.args.test_file)}

    def targets(self, item: Tree) -> list[int | None]:
        return tree_targets(item)

    def distances(self, item: Tree) -> Iterator[int]:
        return (distance for _, distance in _dependencies(item))

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[Tree]) -> Measured:
        cases = [case for tree in items for case in _dependencies(tree)]
        relations = list(dict.fromkeys(relation for relation, _ in cases))
        reader = reader_of(model).eval()
        observer = SyntacticRoles(items, tokenizer, relations)
        with torch.inference_mode(), observe(reader, observer) as seen:
            for batch in observer.batches(reader):
                reader(**batch)
        found = seen.syntactic_roles
        scores = {one: found.accuracy[f"{one} {TO_HEAD}"] for one in relations if f"{one} {TO_HEAD}" in found.accuracy}
        counts = {one: next(iter(found.counts[f"{one} {TO_HEAD}"].values())) for one in scores}
        total = sum(counts.values())
        pooled = {
            kind: sum(scores[one][kind] * counts[one] for one in scores) / total
            for kind in next(iter(scores.values()))
        }
        kept = sorted((one for one in scores if counts[one] >= max(FEW, RARE * total)), key=lambda one: -counts[one])
        of_group = {ALL: cases, **{one: [case for case in cases if case[0] == one] for one in kept}}
        return Measured(
            {ALL: HeadScores(pooled), **{one: scores[one] for one in kept}},
            {ALL: total, **{one: counts[one] for one in kept}},
            {
                group: {OFFSET: sum(distance == self.offset for _, distance in own) / len(own)}
                for group, own in of_group.items()
            },
        )


def _dependencies(tree: Tree) -> Iterator[tuple[str, int]]:
    """Relation and distance to the head of each word, counted in words that have their own text."""
    written = {span: unit for unit, span in enumerate(dict.fromkeys(tree.spans or ()))}
    units = [written[span] for span in tree.spans or ()]
    for unit, head, relation in zip(units, tree.heads, tree.relations):
        if head is not None and units[head] != unit:
            yield relation, units[head] - unit


class Antecedents(SupervisedTask):
    """A mention attends to its nearest earlier antecedent.

    A case is a mention. A head is right if its attention from the head word of the mention to a word of an antecedent
    exceeds its attention to every other word, see [`coreference_accuracy`]; special tokens do not compete. In a second
    measure, only the head words of antecedents and of other mentions compete.
    """

    target = "antecedent"

    def embedded(self) -> list[CoreferenceItem]:
        return embedded_coreference()

    def load_train(self) -> list[CoreferenceItem]:
        return [item for source in self.args.train_sources() for item in self._load(*source)]

    def load_tests(self) -> dict[str, list[CoreferenceItem]]:
        return {name: self._load(*source) for name, source in self.args.test_sources().items()}

    def _load(self, kind: str, path: str) -> list[CoreferenceItem]:
        items = load_coreference(kind, path)
        if kind == "open_sesame" and self.args.distractor != "none":
            items = add_distractors(items, self.args.distractor)
        return items

    def targets(self, item: CoreferenceItem) -> list[int | None]:
        return coreference_targets(item)

    def distances(self, item: CoreferenceItem) -> Iterator[int]:
        return (target - word for word, target in enumerate(self.targets(item)) if target is not None)

    def measure(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[CoreferenceItem]
    ) -> Measured:
        accuracy, counts, baselines = {}, {}, {}
        for mentions_only in (False, True):
            scores = coreference_accuracy(model, tokenizer, items, special_tokens=False, mentions_only=mentions_only)
            groups = list(scores.counts)
            for group in groups if len(groups) > 2 else groups[:1]:
                name = f"{group}, {AMONG_MENTIONS}" if mentions_only else group
                accuracy[name], counts[name] = scores.accuracy[group], scores.counts[group]
                baselines[name] = {one: scores.baselines[one.replace("_", " ")][group] for one in BASELINES}
                baselines[name][OFFSET] = self._offset_accuracy(
                    [item for item in items if group in (ALL, item.group)], mentions_only
                )
        return Measured(accuracy, counts, baselines)

    def _offset_accuracy(self, items: list[CoreferenceItem], heads_only: bool) -> float:
        hits = 0
        for item in items:
            at = item.mention.head + self.offset
            hits += any(at == one.head if heads_only else one.start <= at < one.stop for one in item.antecedents)
        return hits / len(items)


def sampled(items: list[Item], number: int | None) -> list[Item]:
    """Random items in their order, the same ones for every seed of a run."""
    if number is None or number >= len(items):
        return items
    return [items[index] for index in sorted(random.Random(0).sample(range(len(items)), number))]


def divided(items: Iterable[Item], every: int) -> tuple[list[Item], list[Item]]:
    """Items without every n-th one, and these."""
    items = list(items)
    return [item for index, item in enumerate(items, 1) if index % every], items[every - 1 :: every]


SUPERVISED_TASKS: dict[str, type[SupervisedTask]] = {"parsing": Parsing, "antecedents": Antecedents}
