# Licensed under the Apache License, Version 2.0.
"""Imports point one way: cli → recipes → hub → training → analysis → data → models."""

import ast
from pathlib import Path

import hf_attn_dynamics
from hf_attn_dynamics._stub import public_names


PACKAGE = hf_attn_dynamics.__name__
ROOT = Path(hf_attn_dynamics.__file__).parent
# From below; modules of a row import what is in their own row and in those before.
ROWS = [
    {"_files", "_processes", "_tables", "_moved", "_refusals", "_stub"},
    {"models"},
    {"_auto_registration", "auto", "catalog"},
    {"data"},
    {"analysis"},
    {"training"},
    {"hub"},
    {"recipes"},
    {"cli", "__main__"},
]
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
# What may point upward: importing file, imported room.
EXCEPTIONS = {("recipes/sweeps.py", "cli")}


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, also within functions, without the name of the package."""
    module_of = public_names(PACKAGE).module_of
    inside = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = inside[: len(inside) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            # Of the package itself, the public names are looked up where they are.
            names = [
                module_of.get(alias.name, f"{PACKAGE}.{'models' if alias.name.startswith('Headwise') else alias.name}")
                if module == PACKAGE
                else module
                for alias in node.names
            ]
        found |= {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}
    return found - {"__version__"}


def upward_imports() -> set[tuple[str, str]]:
    found = set()
    # Packages import what their stubs list.
    for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")]):
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        if own == "__init__":
            continue  # it looks names up wherever they are
        for module in imported_modules(path):
            room = module.split(".")[0]
            if RANK[room] > RANK[own]:
                found.add((str(path.relative_to(ROOT)), room))
    return found


def test_every_room_has_its_place():
    rooms = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"__init__"} == {*RANK}


def test_imports_point_one_way():
    assert not upward_imports() - EXCEPTIONS


def test_models_import_their_siblings_alone():
    # They are saved beside checkpoints, one folder deep.
    for path in (ROOT / "models").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.ImportFrom) or node.level <= 1, path.name


def test_recipes_do_not_run_each_other():
    for path in (ROOT / "recipes").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "main" and isinstance(node.value, ast.Name):
                assert node.value.id not in {one.stem for one in (ROOT / "recipes").glob("*.py")}, path.name
