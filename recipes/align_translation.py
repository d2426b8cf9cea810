# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/align_translation.py`, as `hf-attn align_translation` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("align_translation")
