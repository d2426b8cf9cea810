# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/train_lstm_translation.py`, as `hf-attn train_lstm_translation` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("train_lstm_translation")
