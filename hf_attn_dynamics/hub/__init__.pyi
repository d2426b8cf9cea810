# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from typing import Any

from .card import Metric as Metric
from .card import write_model_card as write_model_card
from .push import PushError as PushError
from .push import push_model as push_model

# Earlier names, which can be imported until 0.2.
def __getattr__(name: str) -> Any: ...
