# Licensed under the Apache License, Version 2.0.
"""Everything that a checkpoint needs to run.

`hf_attn_dynamics` looks up the names in `__init__.pyi`: the files here also run beside a checkpoint, without it.
"""
