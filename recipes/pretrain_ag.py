# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/pretrain_ag.py`, as `hf-attn pretrain_ag` does."""

from hf_attn_dynamics.recipes.pretrain_ag import cli


if __name__ == "__main__":
    cli()
