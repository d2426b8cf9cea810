# Licensed under the Apache License, Version 2.0.
"""Former place of attention patterns and the guidance loss."""

from .guidance_loss import guide_heads  # noqa: F401
from .guidance_targets import GuidanceTargets, LayerTargets, Tokens  # noqa: F401
from .patterns import PatternRows, pattern_names, register_pattern, token_set  # noqa: F401
