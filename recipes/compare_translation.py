# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/compare_translation.py`, as `hf-attn compare_translation` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("compare_translation")
