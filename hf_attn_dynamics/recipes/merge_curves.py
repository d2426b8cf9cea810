# Licensed under the Apache License, Version 2.0.
"""Merge several runs of `prune_heads`, such as its seeds, into one table and plot.

    python recipes/merge_curves.py runs/sst2-seed1 runs/sst2-seed2 runs/sst2-seed3 --output_dir runs/sst2

Prints a Markdown table with mean and standard deviation over the runs, and writes `curve.csv` (all rows of all runs),
`table.md`, `curve.png` and `curve.svg` to `--output_dir`. The runs must have the same metric, text and model, and
different seeds.
"""

import statistics
from pathlib import Path

from .._files import write_text
from .._refusals import refuse_bad_input
from .._tables import format_table
from ..analysis.plots.base import plot_pruning_curve
from .arguments.merge_curves import MergeArguments
from .pictures import draw
from .run import read_summaries, run_recipe, write_csv


ALIKE = ("metric", "heads_total", "text", "train_examples", "eval_examples")


def merge(folders: list[Path], output_dir: Path, title: str = "") -> str:
    """Writes the files and returns the table."""
    with refuse_bad_input():
        summaries = read_summaries(folders, alike=ALIKE)
        seeds = [summary["seed"] for summary in summaries]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"runs have the seeds {', '.join(map(str, seeds))}; name each seed once.")
        if output_dir.is_file():
            raise ValueError(f"output_dir {output_dir} is a file; name a folder.")
        if output_dir in folders:
            raise ValueError(f"output_dir {output_dir} is one of the runs; name another folder.")
    metric, total = summaries[0]["metric"], summaries[0]["heads_total"]
    dense = {"method": "dense", "heads": total}
    rows = [
        {"seed": summary["seed"], **row}
        for summary in summaries
        for row in ({**dense, metric: summary["metric_dense"]}, *summary["rows"])
    ]
    write_csv(output_dir / "curve.csv", rows, ("seed", "method", "heads", metric))
    draw(
        plot_pruning_curve,
        output_dir / "curve.png",
        [{key: row[key] for key in ("method", "heads", metric)} for row in rows if row["method"] != "dense"],
        title=title or f"{summaries[0]['text']}; {len(summaries)} seeds",
        metric=metric,
        dense=[summary["metric_dense"] for summary in summaries],
        total=total,
    )
    cells: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        cells.setdefault((row["method"], row["heads"]), []).append(row[metric])
    counts = sorted({heads for _, heads in cells}, reverse=True)
    methods = list(dict.fromkeys(method for method, _ in cells))
    percent = 1 if metric == "perplexity" else 100
    body = [[method, *(_mean(cells.get((method, heads)), percent) for heads in counts)] for method in methods]
    text = format_table([metric, *(f"{heads} heads" for heads in counts)], body)
    write_text(output_dir / "table.md", text + "\n")
    return text


def _mean(values: list[float] | None, factor: int) -> str:
    if not values:
        return "–"
    spread = f" ± {factor * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{factor * statistics.fmean(values):.1f}{spread}"


def main(args: MergeArguments) -> str:
    """Merges the runs; returns the table."""
    text = merge([Path(run) for run in args.runs], Path(args.output_dir), args.title)
    print(text)
    return text


if __name__ == "__main__":
    run_recipe(main)
