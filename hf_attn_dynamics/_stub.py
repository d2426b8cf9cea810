# Licensed under the Apache License, Version 2.0.
"""Public names of a package, listed in its `__init__.pyi`."""

import ast
from pathlib import Path


def imports_of_stub(file: str) -> tuple[dict[str, str], list[str]]:
    """Modules of the public names, by name, and subpackages, read from the stub of a package's `__init__.py`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    nodes = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level]
    subpackages = [alias.name for node in nodes if node.module is None for alias in node.names]
    return {alias.name: node.module for node in nodes if node.module for alias in node.names}, subpackages
