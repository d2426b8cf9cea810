# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/pretrain_ag.py`, as `hf-attn pretrain_ag` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("pretrain_ag")
