# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/keyword_drift.py`, as `hf-attn keyword_drift` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("keyword_drift")
