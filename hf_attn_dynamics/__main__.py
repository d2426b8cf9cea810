# Licensed under the Apache License, Version 2.0.
"""`python -m hf_attn_dynamics NAME …`: see [`cli`]."""

from .cli import main


main()
