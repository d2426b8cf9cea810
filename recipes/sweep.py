# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/sweep.py`, as `hf-attn sweep` does."""

from hf_attn_dynamics.recipes.sweep import cli


if __name__ == "__main__":
    cli()
