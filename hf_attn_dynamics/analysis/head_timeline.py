# Licensed under the Apache License, Version 2.0.
"""Statistics of heads over the steps of training, as a table."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._files import write_text
from .head_scores import HeadScores
from .notebook import html_table
from .results import import_pandas


if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class HeadRecord(NamedTuple):
    """One number of one head at one step; `site`, `layer` and `head` are `None` for a metric of the whole model."""

    step: int
    statistic: str
    site: str | None
    layer: int | None
    head: int | None
    value: float


@dataclass
class HeadTimeline:
    """Statistics of heads over training; iteration yields a [`HeadRecord`] for each number.

    Args:
        measurements (`dict[int, dict[str, HeadScores | float]]`): By optimizer step and name of the statistic: scores
            of the heads, or a metric of the whole model, such as the guidance weight.

    Example:
        >>> timeline = HeadTimeline()
        >>> timeline.record(0, "confidence", HeadScores({"encoder": [[0.25, 0.5]]}))
        >>> timeline.record(50, "confidence", HeadScores({"encoder": [[0.875, 0.5]]}))
        >>> timeline.first_step("confidence", 0.8)["encoder"].tolist()
        [[50.0, nan]]
        >>> list(timeline)[-1]
        HeadRecord(step=50, statistic='confidence', site='encoder', layer=0, head=1, value=0.5)
    """

    measurements: dict[int, dict[str, HeadScores | float]] = field(default_factory=dict)

    def record(self, step: int, statistic: str, value: HeadScores | float) -> None:
        """Sets the value of a statistic at a step: scores of all heads, or a metric of the whole model."""
        self.measurements.setdefault(step, {})[statistic] = value

    @property
    def statistics(self) -> list[str]:
        """Names of all statistics, in order of first occurrence."""
        return list(dict.fromkeys(name for _, values in sorted(self.measurements.items()) for name in values))

    def of(self, statistic: str) -> dict[int, HeadScores | float]:
        """Values of one statistic by step.

        Raises:
            ValueError: if there is no such statistic.
        """
        found = {step: values[statistic] for step, values in sorted(self.measurements.items()) if statistic in values}
        if not found:
            raise ValueError(
                f"the timeline has no statistic {statistic!r}, but {', '.join(self.statistics) or 'nothing'}."
            )
        return found

    def first_step(self, statistic: str, at_least: float) -> HeadScores:
        """The first step at which each head has a score of at least `at_least`; NaN if there is none.

        Raises:
            ValueError: if there is no such statistic, or it is a metric of the whole model.
        """
        first: dict[str, torch.Tensor] = {}
        for step, scores in self.of(statistic).items():
            if not isinstance(scores, HeadScores):
                raise ValueError(
                    f"{statistic!r} is a metric of the whole model; first_step needs one number per head."
                )
            for kind, table in scores.items():
                steps = first.setdefault(kind, torch.full_like(table, math.nan))
                steps[steps.isnan() & (table >= at_least)] = step
        return HeadScores(first)

    def __iter__(self) -> Iterator[HeadRecord]:
        for step, values in sorted(self.measurements.items()):
            for statistic, scores in values.items():
                if not isinstance(scores, HeadScores):
                    yield HeadRecord(step, statistic, None, None, None, scores)
                    continue
                for record in scores.records():
                    yield HeadRecord(step, statistic, *record)

    def __len__(self) -> int:
        """Number of records."""
        return sum(1 for _ in self)

    def to_csv(self) -> str:
        """The table as CSV, `step,statistic,site,layer,head,value`; the value of a removed head is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(HeadRecord._fields)
        # Python writes floats with all digits, so from_csv() restores them exactly.
        writer.writerows(record._replace(value=None) if math.isnan(record.value) else record for record in self)
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> "HeadTimeline":
        """The inverse of `to_csv`.

        Raises:
            ValueError: if the text is not such a table.
        """
        try:
            header, *lines = list(csv.reader(io.StringIO(text))) or [[]]
        except csv.Error as error:
            raise ValueError(f"the table is not CSV: {error}.") from error
        if tuple(header) != HeadRecord._fields:
            raise ValueError(f"the columns must be {','.join(HeadRecord._fields)}, got {','.join(header)}.")
        measurements: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(lines, start=2):
            try:
                step, statistic, site, layer, head, written = line
                value = float(written) if written else math.nan
                values = measurements.setdefault(int(step), {})
                if not site:
                    values[statistic] = value
                    continue
                layers = values.setdefault(statistic, {}).setdefault(site, [])
                # Rows are ordered by layer and head.
                if int(head) == 0:
                    layers.append([])
                is_next = (int(layer), int(head)) == (len(layers) - 1, len(layers[-1]))
                layers[-1].append(value)
            except (AttributeError, IndexError, ValueError) as error:
                raise ValueError(f"line {number} is not a record of a head: {','.join(line)}.") from error
            if not is_next:
                raise ValueError(
                    f"line {number} has head {head} of layer {layer}, but the heads before it are missing."
                )
        for values in measurements.values():
            values |= {name: HeadScores(sites) for name, sites in values.items() if isinstance(sites, dict)}
        return cls(measurements)

    def save(self, path: str | Path) -> None:
        """Writes the table as CSV, see `to_csv`."""
        write_text(path, self.to_csv())

    @classmethod
    def load(cls, path: str | Path) -> "HeadTimeline":
        """Reads a file that `save` wrote.

        Raises:
            ValueError: if the file does not hold a timeline.
        """
        try:
            return cls.from_csv(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} does not hold a timeline of heads: {error}") from error

    def _repr_html_(self) -> str:
        """The mean of each statistic over the heads at its first and its last step, for notebooks."""
        rows = []
        for statistic in self.statistics:
            values = self.of(statistic)
            first, last = min(values), max(values)
            ends = (
                values[step].mean() if isinstance(values[step], HeadScores) else values[step] for step in (first, last)
            )
            rows.append([statistic, len(values), first, last, *ends])
        header = ["statistic", "records", "first step", "last step", "mean at first", "mean at last"]
        return html_table(header, rows, "Heads over training")

    def plot(self, path: str | Path | None = None, title: str = "", **settings: Any) -> "Figure":
        """Draws the statistics of the heads over the steps of training.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
            settings: `statistics` and `thresholds` of `plot_head_dynamics`.
        """
        from .plots.dynamics import plot_head_dynamics

        return plot_head_dynamics(self, path, title, **settings)

    def save_page(self, path: str | Path, title: str = "", thresholds: Mapping[str, float] | None = None) -> None:
        """Writes an HTML page in which a slider over the steps moves the grid of heads; it needs no network.

        The page shows values with four digits. It stays below about 1 MB: of very long timelines, grid and curves
        show a part of the steps, at even distances.

        Args:
            path (`str` or `Path`): The file.
            title (`str`): Model and data.
            thresholds (`dict[str, float]`, *optional*): Thresholds by statistic, see `plot_head_dynamics`.

        Raises:
            ValueError: if no statistic has scores of heads, or a threshold names none of them.
        """
        from .pages.timeline_page import timeline_page

        timeline_page(self, title, thresholds).save(path)

    def to_pandas(self) -> "pandas.DataFrame":
        """A table with a row for each number, and the columns of [`HeadRecord`].

        Raises:
            ImportError: if pandas is not installed.
        """
        table = import_pandas("to_csv()").DataFrame(list(self), columns=HeadRecord._fields)
        return table.astype({"layer": "Int64", "head": "Int64"})
