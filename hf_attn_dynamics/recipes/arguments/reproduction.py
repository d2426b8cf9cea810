# Licensed under the Apache License, Version 2.0.
"""Flags of `reproduction`."""

from dataclasses import dataclass

from .base import flag


@dataclass
class ReproductionArguments:
    """Files that are read and written."""

    ledger: str = flag("docs/reproduction.yaml", "YAML file with papers, items and comparisons.")
    results: str = flag("docs/results", "Folder of the summaries.")
    output: str = flag("docs/REPRODUCTION.md", "Markdown file to write.")
    failures: str = flag(
        "docs/what_did_not_replicate.md", "Markdown file to write, of items that do not come out, or were not run."
    )


ARGUMENTS, HAS_TRAINER, PRESETS = ReproductionArguments, False, None
