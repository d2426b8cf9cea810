# Licensed under the Apache License, Version 2.0.
"""Training of headwise models: trainers, arguments, collators, schedules and metrics."""

from .._stub import import_on_first_use


import_on_first_use(__name__)
