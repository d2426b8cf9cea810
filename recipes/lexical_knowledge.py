# Licensed under the Apache License, Version 2.0.
"""Runs the recipe `hf_attn_dynamics/recipes/lexical_knowledge.py`, as `hf-attn lexical_knowledge` does."""

from hf_attn_dynamics.cli import run


if __name__ == "__main__":
    run("lexical_knowledge")
