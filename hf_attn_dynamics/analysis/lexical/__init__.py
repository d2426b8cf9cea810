# Licensed under the Apache License, Version 2.0.
"""What attention knows of words: probe, saliency, agreement, alignment (Snell et al. 2021)."""
