# Licensed under the Apache License, Version 2.0.
"""Earlier module of attention patterns and the guidance loss, kept for imports."""

from .guidance_loss import guide_heads  # noqa: F401
from .guidance_targets import GuidanceTargets, LayerTargets, Tokens  # noqa: F401
from .patterns import PatternRows, pattern_names, register_pattern, token_set  # noqa: F401
