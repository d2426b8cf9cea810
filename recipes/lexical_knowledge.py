# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/lexical_knowledge.py`, as `hf-attn lexical_knowledge` does."""

from hf_attn_dynamics.recipes.lexical_knowledge import cli


if __name__ == "__main__":
    cli()
