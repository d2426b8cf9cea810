# Licensed under the Apache License, Version 2.0.
"""Merge several runs of `prune_heads`, such as its seeds, into one table and plot.

    python recipes/merge_curves.py runs/sst2-seed1 runs/sst2-seed2 runs/sst2-seed3 --output_dir runs/sst2

Prints a Markdown table with mean and standard deviation over the runs, and writes `curve.csv` (all rows of all runs),
`table.md`, `curve.png` and `curve.svg` to `--output_dir`. The runs must have the same metric, text, model and, if they
pruned to speed-ups, the same ones, and different seeds.
"""

import statistics
from pathlib import Path
from typing import Any

from .._files import write_text
from .._refusals import refuse_bad_input
from .._tables import format_table
from ..analysis.plots.base import plot_pruning_curve
from ..analysis.plots.parts import plot_speedup_curve
from .arguments.merge_curves import MergeArguments
from .pictures import draw
from .run import read_summaries, run_recipe, write_csv


ALIKE = (
    "metric",
    "task",
    "parameters_dense",
    "heads_total",
    "text",
    "train_examples",
    "eval_examples",
    "target_speedup",
    "latency_batch",
    "latency_length",
    "latency_device",
    "latency_threads",
)


def merge(folders: list[Path], output_dir: Path, title: str = "") -> str:
    """Writes the files and returns the table."""
    with refuse_bad_input():
        summaries = read_summaries(folders, alike=ALIKE)
        seeds = [summary["seed"] for summary in summaries]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"runs have the seeds {', '.join(map(str, seeds))}; name each seed once.")
        if output_dir.is_file():
            raise ValueError(f"output_dir {output_dir} is a file; name a folder.")
        if output_dir.resolve() in [folder.resolve() for folder in folders]:
            raise ValueError(f"output_dir {output_dir} is one of the runs; name another folder.")
    metric, title = summaries[0]["metric"], title or f"{summaries[0]['text']}; {len(summaries)} seeds"
    merged = _merged_speedups if summaries[0].get("target_speedup") else _merged_heads
    text = format_table(*merged(summaries, metric, title, output_dir))
    write_text(output_dir / "table.md", text + "\n")
    return text


def _merged_heads(
    summaries: list[dict], metric: str, title: str, output_dir: Path
) -> tuple[list[str], list[list[str]]]:
    """Writes the files of runs that kept numbers of heads; returns header and lines of the table."""
    total = summaries[0]["heads_total"]
    rows = _rows_of_all(summaries, metric, {"heads": total})
    write_csv(output_dir / "curve.csv", rows, ("seed", "method", "heads", metric))
    draw(
        plot_pruning_curve,
        output_dir / "curve.png",
        [{key: row[key] for key in ("method", "heads", metric)} for row in rows if row["method"] != "dense"],
        title=title,
        metric=metric,
        dense=[summary["metric_dense"] for summary in summaries],
        total=total,
    )
    counts = sorted({row["heads"] for row in rows}, reverse=True)
    body = [
        [method, *(_mean(_values(rows, metric, method=method, heads=heads), _factor(metric)) for heads in counts)]
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    return [metric, *(f"{heads} heads" for heads in counts)], body


def _merged_speedups(
    summaries: list[dict], metric: str, title: str, output_dir: Path
) -> tuple[list[str], list[list[str]]]:
    """Writes the files of runs that pruned to speed-ups; returns header and lines of the table."""
    rows = _rows_of_all(summaries, metric, {"target": 1.0, "speedup": 1.0})
    untrained = f"{metric}_untrained"
    has_untrained = any(row.get(untrained) is not None for row in rows)
    columns = ("seed", "method", "target", "speedup", metric, *[untrained] * has_untrained)
    write_csv(output_dir / "curve.csv", rows, columns)
    # Before training, random models are far below the others.
    shown = [(row["method"], row, metric) for row in rows if row["method"] != "dense"]
    shown += [
        (f"{row['method']}, untrained", row, untrained)
        for row in rows
        if row.get(untrained) is not None and row["method"] != "random"
    ]
    points = [
        {"method": method, "target": row["target"], "speedup": row["speedup"], metric: row[key]}
        for method, row, key in shown
    ]
    latency = summaries[0]
    length = f" × {latency['latency_length']} tokens" * (latency.get("latency_length") is not None)
    title = f"{title}; batch {latency.get('latency_batch')}{length}"
    dense = [summary["metric_dense"] for summary in summaries]
    draw(plot_speedup_curve, output_dir / "curve.png", points, title=title, metric=metric, dense=dense)
    factor = _factor(metric)
    body = [["dense", "1 ×", "1.00", _mean(dense, factor), "–"]]
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "dense"):
        for target in dict.fromkeys(row["target"] for row in rows if row["method"] == method):
            measured, own, before = (
                _values(rows, key, method=method, target=target) for key in ("speedup", metric, untrained)
            )
            body.append([method, f"{target:g} ×", _mean(measured, 1, 2), _mean(own, factor), _mean(before, factor)])
    header = ["method", "target", "measured speed-up", metric, f"{metric}, untrained"]
    return (header, body) if has_untrained else (header[:-1], [line[:-1] for line in body])


def _rows_of_all(summaries: list[dict], metric: str, dense: dict[str, float]) -> list[dict]:
    """Rows of all runs, with the seed and the dense model."""
    return [
        {"seed": summary["seed"], **row}
        for summary in summaries
        for row in ({"method": "dense", **dense, metric: summary["metric_dense"]}, *summary["rows"])
    ]


def _values(rows: list[dict], key: str, **chosen: Any) -> list[float]:
    """Values of the rows of a model, one for each seed."""
    own = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    return [row[key] for row in own if row.get(key) is not None]


def _factor(metric: str) -> int:
    return 1 if metric == "perplexity" else 100


def _mean(values: list[float], factor: int, digits: int = 1) -> str:
    if not values:
        return "–"
    spread = f" ± {factor * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{factor * statistics.fmean(values):.{digits}f}{spread}"


def main(args: MergeArguments) -> str:
    """Merges the runs; returns the table."""
    text = merge([Path(run) for run in args.runs], Path(args.output_dir), args.title)
    print(text)
    return text


if __name__ == "__main__":
    run_recipe(main)
