# Licensed under the Apache License, Version 2.0.
"""Make all runs of a grid, an ablation or a comparison over seeds, and one table of them.

    python recipes/sweep.py recipes/sweeps/robustness.yaml --output_dir runs/robustness
    python recipes/sweep.py recipes/sweeps/robustness.yaml --output_dir runs/robustness --resume    # after a stop
    python recipes/sweep.py recipes/sweeps/robustness.yaml --output_dir runs/robustness --tables_only

Keys of the YAML file are explained in `hf_attn_dynamics/recipes/sweeps.py`. Runs are processes of their own: one that
fails is reported, and the others go on. With --resume, finished runs are not made again, stopped ones go on from their
last checkpoint, and seeds, variants and values of the grid may have been added.

Writes to `--output_dir`: `runs/NAME/` as the recipe does, `logs/NAME.txt`, `sweep.yaml`, `table.md` (mean ± standard
deviation over seeds), `runs.csv` (every run and system), `heat_map.png` and `.svg` if the file asks for one, and
`summary.json`: `means` (rows of the table; a figure is [mean, sd, runs]), `runs` and `failed` (how many), versions.
"""

import argparse
import signal
import sys
from pathlib import Path

from .._files import write_text
from .run import SUMMARY, provenance, refuse_bad_input, write_csv, write_json
from .sweep_plots import plot_heat_maps
from .sweeps import Sweep, collect, over_seeds, run_sweep, table


def publish(sweep: Sweep, folder: Path, failed: int) -> str:
    """Writes all files about the runs; returns the table."""
    rows = collect(sweep, folder)
    means = over_seeds(sweep, rows)
    text = table(sweep, means)
    write_text(folder / "table.md", text + "\n")
    write_csv(folder / "runs.csv", rows)
    if sweep.heat_map:
        names = tuple(", ".join(sweep.heat_map[axis]).replace("_", " ") for axis in ("rows", "columns"))
        plot_heat_maps(*heat_maps(sweep, means), folder / "heat_map.png", names, digits=sweep.digits)
    runs = len({tuple(row[key] for key in ("variant", *sweep.grid, "seed")) for row in rows})
    origin = {key: value for key, value in provenance(sweep.seeds[0], "").items() if key not in ("seed", "device")}
    write_json(folder / SUMMARY, {"means": means, "runs": runs, "failed": failed, **origin})
    return text


def heat_maps(sweep: Sweep, means: list[dict]) -> tuple[dict, list[str], list[str], str]:
    """Panels, labels of rows and columns, and the name of the figure, as [`plot_heat_maps`] takes them."""
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


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sweep", type=Path, help="YAML file")
    parser.add_argument("--output_dir", type=Path, required=True, help="where to write; may not hold another sweep")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="go on with what is in output_dir")
    parser.add_argument("--tables_only", action="store_true", help="make no run, only the tables of those there are")
    args = parser.parse_args(argv)
    failed: dict[str, str] = {}
    with refuse_bad_input():
        sweep = Sweep.load(args.sweep)
        if not args.tables_only:
            failed = run_sweep(sweep, sweep.recipe, args.output_dir, args.jobs, args.resume)
            for name, line in failed.items():
                print(f"{name} failed: {line}")
        text = publish(sweep, args.output_dir, len(failed))
    print(text)
    print(f"\nEverything is in {args.output_dir}: {SUMMARY}, table.md, runs.csv.")
    if failed:
        raise SystemExit(1)
    return text


def cli() -> None:
    """Runs the recipe with the words of the command line."""
    # A sweep that is stopped stops its runs, too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        main()
    except SystemExit as end:
        if end.code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            sys.stderr.write("\nsweep.py: stopped; the same command with --resume makes what is missing.\n")
        raise


if __name__ == "__main__":
    cli()
