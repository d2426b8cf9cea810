# Licensed under the Apache License, Version 2.0.
"""Run a recipe over a grid, variants and seeds, and write one table of the results.

    python recipes/sweep.py recipes/sweeps/robustness.yaml --output_dir runs/robustness
    python recipes/sweep.py recipes/sweeps/robustness.yaml --output_dir runs/robustness --resume    # after a stop
    python recipes/sweep.py recipes/sweeps/robustness.yaml --output_dir runs/robustness --tables_only

`hf_attn_dynamics/recipes/sweeps.py` explains the keys of the YAML file. Each run is a process; a failed run is
reported, and the others continue. With `--resume`, finished runs are kept, stopped runs continue from their last
checkpoint, and the file may have new seeds, variants and values.

Writes to `--output_dir`: `runs/NAME/` as the recipe does, `logs/NAME.txt`, `sweep.yaml`, `table.md` (mean ± standard
deviation over seeds), `runs.csv` (every run and system), `heat_map.png` and `.svg` if the file asks for one, and
`summary.json`: `means` (rows of the table; a metric is [mean, sd, number of runs]), `runs` and `failed` (their
numbers), and versions.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from .._files import write_text
from .._refusals import refuse_bad_input
from .arguments.sweep import SweepArguments
from .pictures import draw
from .run import SUMMARY, provenance, run_recipe, write_csv, write_json
from .sweep_plots import plot_heat_maps
from .sweeps import Sweep, collect, over_seeds, run_sweep, table


def publish(sweep: Sweep, folder: Path) -> str:
    """Writes the tables, the heat map and the summary; returns the table."""
    rows = collect(sweep, folder)
    means = over_seeds(sweep, rows)
    text = table(sweep, means)
    write_text(folder / "table.md", text + "\n")
    write_csv(folder / "runs.csv", rows)
    if sweep.heat_map:
        names = tuple(", ".join(sweep.heat_map[axis]).replace("_", " ") for axis in ("rows", "columns"))
        seeds = f"mean of {len(sweep.seeds)} seed{'s' * (len(sweep.seeds) != 1)}"
        draw(plot_heat_maps, folder / "heat_map.png", *heat_maps(sweep, means), names, sweep.digits, seeds)
    runs = len({tuple(row[key] for key in ("variant", *sweep.grid, "seed")) for row in rows})
    origin = {key: value for key, value in provenance(sweep.seeds[0], "").items() if key not in ("seed", "device")}
    # Runs that were stopped count as well.
    failed = len(sweep.runs()) - runs
    write_json(folder / SUMMARY, {"means": means, "runs": runs, "failed": failed, **origin})
    return text


def heat_maps(sweep: Sweep, means: list[dict]) -> tuple[dict, list[str], list[str], str]:
    """Panels, labels of rows and columns, and the name of the metric: arguments of [`plot_heat_maps`]."""
    heading = next(h for h, key in sweep.figures.items() if key == sweep.heat_map["figure"])
    axes = {axis: sweep.heat_map[axis] for axis in ("rows", "columns")}

    def label(row: dict, axis: str) -> str:
        return ", ".join(str(row[name]) for name in axes[axis])

    panels: dict[str, dict[tuple[str, str], float]] = {}
    for row in means:
        if row[heading] is not None:
            panel = ", ".join(part for part in (row["variant"], row["system"]) if part)
            panels.setdefault(panel, {})[label(row, "rows"), label(row, "columns")] = row[heading][0]
    labels = [list(dict.fromkeys(label(row, axis) for row in means)) for axis in axes]
    return panels, *labels, heading


@contextlib.contextmanager
def stopping_runs() -> Iterator[None]:
    """Turns SIGINT and SIGTERM into `SystemExit`, so that the runs are terminated, and prints how to continue."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in numbers]
    try:
        yield
    except SystemExit:
        program = Path(sys.argv[0]).name
        sys.stderr.write(f"\n{program}: stopped; the same command with --resume true continues.\n")
        raise
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def main(args: SweepArguments) -> str:
    """Run the sweep; returns the table."""
    folder = Path(args.output_dir)
    failed: dict[str, str] = {}
    with refuse_bad_input():
        sweep = Sweep.load(args.sweep)
        if not args.tables_only:
            with stopping_runs():
                failed = run_sweep(sweep, sweep.recipe, folder, args.jobs, args.resume)
            for name, line in failed.items():
                print(f"{name} failed: {line}")
        text = publish(sweep, folder)
    print(text)
    print(f"\nEverything is in {folder}: {SUMMARY}, table.md, runs.csv.")
    if failed:
        raise SystemExit(1)
    return text


if __name__ == "__main__":
    run_recipe(main)
