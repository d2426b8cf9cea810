# Licensed under the Apache License, Version 2.0.
"""`python -m hf_attn_dynamics.hub`: pushes a saved model to the Hub."""

from .push import main


main()
