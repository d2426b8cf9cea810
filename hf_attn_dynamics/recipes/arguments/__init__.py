# Licensed under the Apache License, Version 2.0.
"""Arguments of recipes: what is read of YAML and flags, and checked before PyTorch is imported.

A recipe whose arguments are in a module of its name here is refused, or explained by `--help`, within a second.
"""
