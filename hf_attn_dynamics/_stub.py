# Licensed under the Apache License, Version 2.0.
"""Public names of a package, which are listed once: in its `__init__.pyi`."""

import ast
from pathlib import Path


def imports_of_stub(file: str) -> tuple[dict[str, str], list[str]]:
    """What the stub beside the `__init__.py` of a package imports from the package.

    Args:
        file (`str`): That `__init__.py`.

    Returns:
        `tuple[dict[str, str], list[str]]`: The module of each name, and the subpackages.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    nodes = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.level]
    subpackages = [alias.name for node in nodes if node.module is None for alias in node.names]
    return {alias.name: node.module for node in nodes if node.module for alias in node.names}, subpackages
