# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/merge_curves.py`, as `hf-attn merge_curves` does."""

from hf_attn_dynamics.recipes.merge_curves import cli


if __name__ == "__main__":
    cli()
