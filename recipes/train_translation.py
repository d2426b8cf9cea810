# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/train_translation.py`, as `hf-attn train_translation` does."""

from hf_attn_dynamics.recipes.train_translation import cli


if __name__ == "__main__":
    cli()
