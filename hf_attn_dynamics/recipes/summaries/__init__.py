# Licensed under the Apache License, Version 2.0.
"""Summaries of recipes: one dataclass per `summary.json`, from which its keys, tables and documentation follow.

These modules import no PyTorch, so that `--help` explains the keys within a second.
"""
