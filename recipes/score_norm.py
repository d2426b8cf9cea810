# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/score_norm.py`, as `hf-attn score_norm` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("score_norm")
