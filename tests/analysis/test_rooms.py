# Licensed under the Apache License, Version 2.0.
"""Within `analysis`, imports point one way; results import their pictures when they are drawn."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import hf_attn_dynamics.analysis


ROOT = Path(hf_attn_dynamics.analysis.__file__).parent


def imports_at_the_top(path: Path) -> set[str]:
    """Modules of `analysis` that a file imports when it is imported, as paths without suffix."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            place = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            if place.is_relative_to(ROOT):
                found.add(str(place.relative_to(ROOT)))
    return found


def test_modules_and_rooms_import_one_way():
    modules = {str(path.relative_to(ROOT).with_suffix("")): imports_at_the_top(path) for path in ROOT.rglob("*.py")}
    assert len(modules) > 40
    rooms = {}
    for module, imported in modules.items():
        room = module.split("/")[0]
        rooms.setdefault(room, set()).update(other.split("/")[0] for other in imported)
        rooms[room].discard(room)
    for graph in (modules, rooms):
        # Raises CycleError, which names the modules.
        assert list(TopologicalSorter(graph).static_order())
