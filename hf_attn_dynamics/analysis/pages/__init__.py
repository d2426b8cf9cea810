# Licensed under the Apache License, Version 2.0.
"""Pages of results, and views of single texts: HTML that needs no network."""

from ..._stub import import_on_first_use


import_on_first_use(__name__)
