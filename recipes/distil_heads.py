# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/distil_heads.py`, as `hf-attn distil_heads` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("distil_heads")
