# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/prune_heads.py`, as `hf-attn prune_heads` does."""

from hf_attn_dynamics.recipes.prune_heads import cli


if __name__ == "__main__":
    cli()
