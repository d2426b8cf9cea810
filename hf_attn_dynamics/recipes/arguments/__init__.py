# Licensed under the Apache License, Version 2.0.
"""Flags of recipes, one module per recipe.

These modules import no PyTorch, so that `--help` and errors take less than a second.
"""
