# Licensed under the Apache License, Version 2.0.
"""Texts and tasks that come with the package."""
