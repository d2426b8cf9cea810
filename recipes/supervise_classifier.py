# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/supervise_classifier.py`, as `hf-attn supervise_classifier` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("supervise_classifier")
