# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/analyze_heads.py`, as `hf-attn analyze_heads` does."""

from hf_attn_dynamics.recipes.analyze_heads import cli


if __name__ == "__main__":
    cli()
