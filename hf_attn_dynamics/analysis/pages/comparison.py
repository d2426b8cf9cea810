# Licensed under the Apache License, Version 2.0.
"""What moved between the readings of two models: functions and scores of the same heads."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..head_scores import Head
from ..reading import FUNCTIONS, HeadReading
from ..sentence_maps import ATTENTION, MAX_CHARACTERS, SentenceMaps
from .head_explorer import MEASURES, head_names


LETTERS = ("A", "B")  # of the two models, where their names would not fit
COMPARED = "attention_compared"  # measure of sentences: the attention of the second model
MOST_CHANGED = 10  # heads that are listed for each measure


class MovedHead(NamedTuple):
    """The functions of a head in two models, among those that both readings measured; `None` if it is removed."""

    before: tuple[str, ...] | None
    after: tuple[str, ...] | None

    @property
    def gained(self) -> list[str]:
        """Functions that only the second model has."""
        return [name for name in self.after or () if name not in (self.before or ())]

    @property
    def lost(self) -> list[str]:
        """Functions that only the first model has."""
        return [name for name in self.before or () if name not in (self.after or ())]

    @property
    def is_removed(self) -> bool:
        """Whether one of the models lacks the head."""
        return self.before is None or self.after is None

    @property
    def mark(self) -> str:
        """`×` if one of the models lacks the head, else `+`, `−` or `±` for gained and lost functions."""
        if self.is_removed:
            return "×"
        return ("" if not self.lost else "−") if not self.gained else ("±" if self.lost else "+")

    @property
    def words(self) -> str:
        """The change in words; empty if there is none."""
        if self.is_removed:
            return f"removed in {LETTERS[self.after is None]}"
        parts = (("gained", self.gained), ("lost", self.lost))
        return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names)


class MovedFunction(NamedTuple):
    """Number of heads with a function in two models; `None` where it was not measured in both.

    Args:
        first, second (`int`, *optional*): Heads with the function in each model; `None` if it was not measured.
        kept, gained, lost (`int`, *optional*): Heads that have it in both, in the second only, in the first only.
        removed (`int`, *optional*): Those of the gained and lost ones that the other model lacks.
    """

    first: int | None
    second: int | None
    kept: int | None = None
    gained: int | None = None
    lost: int | None = None
    removed: int | None = None


class MovedScores(NamedTuple):
    """A measure in two models, over the heads that have a score in both.

    Args:
        heads (`int`): Number of these heads.
        first, second (`float`): Means over them.
        largest (`dict[Head, tuple[float, float]]`): Both scores of the ten heads whose score changed most.
    """

    heads: int
    first: float
    second: float
    largest: dict[Head, tuple[float, float]]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Two readings of models with the same numbers of layers and heads; removed heads keep their numbers.

    Args:
        first (`HeadReading`): The reading whose page it is.
        second (`HeadReading`): The reading that it is compared with.

    Raises:
        ValueError: if the models differ in their kinds of sites, layers or heads.
    """

    first: HeadReading
    second: HeadReading

    def __post_init__(self):
        tables = (self.first["confidence"], self.second["confidence"])
        shapes = [{kind: tuple(table.shape) for kind, table in one.items()} for one in tables]
        if shapes[0] != shapes[1]:
            texts = (
                f"{name!r} has {', '.join(f'{a} layers × {b} heads ({kind})' for kind, (a, b) in shape.items())}"
                for name, shape in zip(self.names, shapes)
            )
            raise ValueError(
                f"heads of these readings cannot be compared one by one: {', '.join(texts)}. Compare versions of one "
                "model; pruned ones keep the numbers of their heads."
            )

    @property
    def names(self) -> tuple[str, str]:
        """Names of the models, told apart if they are equal."""
        names = self.first.model, self.second.model
        return names if names[0] != names[1] else (f"{names[0]} (first)", f"{names[1]} (second)")

    @cached_property
    def heads(self) -> dict[Head, MovedHead]:
        """All heads, with their functions in both models; those that both models lack are left out."""
        own = [
            {head: tuple(name for name in names if name in self.functions_of_both) for head, names in found.items()}
            for found in (head_names(self.first), head_names(self.second))
        ]
        heads = (record[:3] for record in self.first["confidence"].records())
        return {head: MovedHead(*(one.get(head) for one in own)) for head in heads if any(head in one for one in own)}

    @cached_property
    def functions_of_both(self) -> list[str]:
        """Functions that both readings measured."""
        measured = [one.functions() for one in (self.first, self.second)]
        return [name for name in FUNCTIONS if all(functions[name] is not None for functions in measured)]

    def functions(self) -> dict[str, MovedFunction]:
        """Number of heads with each function in both models, and how many kept, gained and lost it."""
        measured = [one.functions() for one in (self.first, self.second)]
        moved = {}
        for name in FUNCTIONS:
            counts = [None if functions[name] is None else len(functions[name]) for functions in measured]
            moved[name] = MovedFunction(*counts)
            if name in self.functions_of_both:
                first, second = ({head[:3] for head in functions[name]} for functions in measured)
                removed = sum(self.heads[head].is_removed for head in first ^ second)
                changes = len(first & second), len(second - first), len(first - second), removed
                moved[name] = MovedFunction(*counts, *changes)
        return moved

    def moved_heads(self) -> dict[Head, MovedHead]:
        """Heads whose functions changed, and all heads that one of the models lacks."""
        return {head: moved for head, moved in self.heads.items() if moved.mark}

    def scores(self) -> dict[str, MovedScores]:
        """Measures that both readings have, over the heads that have a score in both."""
        moved = {}
        for name, label in MEASURES.items():
            tables = [one.results.get(name) for one in (self.first, self.second)]
            if any(one is None for one in tables):
                continue
            pairs = {}
            for *head, score in tables[0].records():
                kind, layer, number = head
                other = tables[1][kind][layer, number].item() if kind in tables[1] else math.nan
                if not math.isnan(score) and not math.isnan(other):
                    pairs[kind, layer, number] = (score, other)
            if pairs:
                means = (sum(values) / len(pairs) for values in zip(*pairs.values()))
                largest = sorted(pairs, key=lambda head: -abs(pairs[head][1] - pairs[head][0]))[:MOST_CHANGED]
                moved[label] = MovedScores(len(pairs), *means, {head: pairs[head] for head in largest})
        return moved

    def counts(self) -> dict[str, int]:
        """Number of heads of both models, removed in one of them, and with gained, lost, kept or no functions."""
        both = [moved for moved in self.heads.values() if not moved.is_removed]
        removed = [[moved for moved in self.heads.values() if moved[number] is None] for number in range(len(LETTERS))]
        unchanged = [moved for moved in both if not moved.mark]
        return {
            "heads": len(both),
            "removed_in_first": len(removed[0]),
            "removed_in_second": len(removed[1]),
            "removed_with_functions": sum(bool(moved.gained or moved.lost) for one in removed for moved in one),
            "gained": sum(bool(moved.gained) for moved in both),
            "lost": sum(bool(moved.lost) for moved in both),
            "gained_and_lost": sum(moved.mark == "±" for moved in both),
            "kept": sum(bool(moved.before) for moved in unchanged),
            "none": sum(not moved.before for moved in unchanged),
        }

    def to_dict(self) -> dict[str, Any]:
        """Counts of heads, of functions, and means of the measures, as JSON types."""
        scores = {name: {"first": one.first, "second": one.second} for name, one in self.scores().items()}
        functions = {name: moved._asdict() for name, moved in self.functions().items()}
        return {"names": list(self.names), **self.counts(), "functions": functions, "means": scores}

    def sentences(self, limit: int = MAX_CHARACTERS) -> list[SentenceMaps]:
        """The first sentences whose weights fit, with the attention of the second model where the tokens are equal.

        Args:
            limit (`int`): Largest number of characters of all packed weights together.
        """
        # Tokens of other scripts may all be written alike.
        other = {(one.text, _tokens(one)): one for one in self.second.sentence_maps}
        found: list[SentenceMaps] = []
        left = limit
        for one in self.first.sentence_maps:
            same = other.get((one.text, _tokens(one)))
            weights = {} if same is None else same.weights.get(ATTENTION, {})
            shared = {kind: packed for kind, packed in weights.items() if kind in one.shapes}
            if shared:
                one = one._replace(weights={**one.weights, COMPARED: shared})
            left -= one.characters
            if left < 0:
                break
            found.append(one)
        return found


def _tokens(sentence: SentenceMaps) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(side.tokens) for side in sentence.sides)
