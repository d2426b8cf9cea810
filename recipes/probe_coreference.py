# Licensed under the Apache License, Version 2.0.
"""Runs `hf_attn_dynamics/recipes/probe_coreference.py`, as `hf-attn probe_coreference` does."""

from hf_attn_dynamics.recipes.probe_coreference import cli


if __name__ == "__main__":
    cli()
