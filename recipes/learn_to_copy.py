# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/learn_to_copy.py`, as `hf-attn learn_to_copy` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("learn_to_copy")
