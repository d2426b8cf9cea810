# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/score_norm.py`, as `hf-attn score_norm` does."""

from hf_attn_dynamics.recipes.score_norm import cli


if __name__ == "__main__":
    cli()
