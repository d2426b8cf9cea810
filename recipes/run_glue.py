# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/run_glue.py`, as `hf-attn run_glue` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("run_glue")
