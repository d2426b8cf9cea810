# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/finetune.py`, as `hf-attn finetune` does."""

from hf_attn_dynamics.recipes.finetune import cli


if __name__ == "__main__":
    cli()
