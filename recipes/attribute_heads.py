# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/attribute_heads.py`, as `hf-attn attribute_heads` does."""

from hf_attn_dynamics.recipes.attribute_heads import cli


if __name__ == "__main__":
    cli()
