# Licensed under the Apache License, Version 2.0.
# The public names: `_stub.py` reads them from here when the package is imported, and type checkers do.

from .text_view import HeadView as HeadView
from .text_view import show_contributions as show_contributions
from .text_view import show_heads as show_heads
