# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/reproduction.py`, as `hf-attn reproduction` does."""

from hf_attn_dynamics.recipes.reproduction import cli


if __name__ == "__main__":
    cli()
