"""The keys of all summaries in docs/summaries.md; run it to write the page anew."""

import importlib
from importlib.util import find_spec
from pathlib import Path

from hf_attn_dynamics.recipes import JOBS
from hf_attn_dynamics.recipes.summaries.base import PROVENANCE, Summary


FILE = Path(__file__).parents[2] / "docs" / "summaries.md"
HEADER = """# Summaries

Each run of a recipe writes `summary.json` to `--output_dir` at its end. Words in capitals stand for names that depend
on the run; `rows[].loss` is the key `loss` of each entry of the list `rows`. `hf-attn NAME --help` has the same
descriptions (`python tests/reference/summary_tables.py` writes this page).

Every summary also has:

| key | |
|---|---|
"""


def lines(documentation: dict[str, str]) -> str:
    return "".join(
        f"| {', '.join(f'`{key}`' for key in keys.split(', '))} | {text.replace('|', chr(92) + '|')} |\n"
        for keys, text in documentation.items()
    )


def summaries() -> dict[str, type[Summary]]:
    """Summaries by the names of the recipes that write one."""
    names = {name: f"hf_attn_dynamics.recipes.summaries.{name}" for name in JOBS}
    return {name: importlib.import_module(path).SUMMARY for name, path in names.items() if find_spec(path)}


def page() -> str:
    text = HEADER + lines(PROVENANCE)
    for name, summary in summaries().items():
        own = {key: value for key, value in summary.documentation().items() if key not in PROVENANCE}
        about = (summary.__doc__ or "").partition("\n\n")[0]
        text += f"\n## {name}\n\n{' '.join(about.split())}\n\n| key | |\n|---|---|\n{lines(own)}"
    return text


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
