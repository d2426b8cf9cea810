# Licensed under the Apache License, Version 2.0.
"""Built-in datasets and synthetic tasks."""
