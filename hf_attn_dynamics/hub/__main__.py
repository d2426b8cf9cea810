# Licensed under the Apache License, Version 2.0.
"""`python -m hf_attn_dynamics.hub`: pushes a model that is on disk."""

from .push import main


main()
