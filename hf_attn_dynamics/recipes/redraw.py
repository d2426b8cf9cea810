# Licensed under the Apache License, Version 2.0.
"""Draw the pictures of finished runs again, from the data that each run keeps beside them.

    python recipes/redraw.py runs/prune_heads
    python recipes/redraw.py docs/results/score_norm/*/*.plot.json

Reads `NAME.plot.json` and writes `NAME.png` and `NAME.svg` beside it; in folders, all such files.
"""

from pathlib import Path

from .._refusals import refuse_bad_input
from .arguments.redraw import RedrawArguments
from .pictures import ENDING, redraw
from .run import run_recipe


def records_in(path: Path) -> list[Path]:
    """The file itself, or all files of pictures in a folder.

    Raises:
        ValueError: if there is none.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    records = sorted(path.rglob(f"*{ENDING}")) if path.is_dir() else [path]
    if not records or not all(record.name.endswith(ENDING) for record in records):
        raise ValueError(f"{path} is no file NAME{ENDING}, and holds none.")
    return records


def main(args: RedrawArguments) -> list[Path]:
    """Draws the pictures; returns the PNG files."""
    with refuse_bad_input():
        pictures = [redraw(record) for path in args.paths for record in records_in(Path(path))]
    print("\n".join(map(str, pictures)))
    return pictures


if __name__ == "__main__":
    run_recipe(main)
