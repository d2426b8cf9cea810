# Licensed under the Apache License, Version 2.0.
"""Questions asked of models, and the pictures of their answers."""
