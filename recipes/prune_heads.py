# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/prune_heads.py`, as `hf-attn prune_heads` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("prune_heads")
