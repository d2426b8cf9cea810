# Licensed under the Apache License, Version 2.0.
"""Pictures of results: each function returns a matplotlib figure, and saves it if it is given a path."""

from ..._moved import names_of
from ..._stub import import_on_first_use


import_on_first_use(__name__, names_of(__name__, "base", "figures", "heads", "attribution", "dynamics"))
