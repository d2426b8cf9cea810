# Licensed under the Apache License, Version 2.0.
"""Public names of a package: listed in its `__init__.pyi`, imported on first use."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


ROOT = Path(__file__).parent


class PublicNames(NamedTuple):
    """Public names of a package.

    Attributes:
        module_of (`dict[str, str]`): Modules of the names, with the name of the package, by name.
        first (`tuple[str, ...]`): Names that stand above the first star import.
        subpackages (`tuple[str, ...]`): Modules that the stub imports from the package itself.
    """

    module_of: dict[str, str]
    first: tuple[str, ...]
    subpackages: tuple[str, ...]

    def modules_in(self, package: str) -> set[str]:
        """Modules and subpackages directly in the package that have public names."""
        inside = {module.removeprefix(f"{package}.") for module in self.module_of.values() if f"{package}." in module}
        return {module.partition(".")[0] for module in inside} | {*self.subpackages}


@cache
def public_names(package: str) -> PublicNames:
    """Reads the stub of a package, and those of the packages from which it imports; a module has no names."""
    stub = ROOT.joinpath(*package.split(".")[1:], "__init__.pyi")
    module_of, first, subpackages = {}, None, []
    for node in ast.parse(stub.read_text(encoding="utf-8")).body if stub.is_file() else ():
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        names = [alias.name for alias in node.names]
        if node.module is None:
            subpackages += names
            continue
        module = resolve_name("." * node.level + node.module, package)
        inner = public_names(module).module_of
        if names == ["*"]:
            first = (*module_of,) if first is None else first
            module_of |= inner
        else:
            module_of |= {name: inner.get(name, module) for name in names}
    return PublicNames(module_of, (*module_of,) if first is None else first, tuple(subpackages))


def import_on_first_use(
    package: str, more: Callable[[str], Any] | None = None, list_more: Callable[[], Iterable[str]] = tuple
) -> None:
    """Makes the public names of a package its attributes, which are imported when they are asked for.

    Args:
        package (`str`): Name of the imported package.
        more (`Callable[[str], Any]`, *optional*): Looks up other names; returns `None` for unknown ones.
        list_more (`Callable[[], Iterable[str]]`, *optional*): Other names that `dir()` lists.
    """
    names = public_names(package)
    modules = names.modules_in(package)

    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name in names.module_of:
                value = vars(self)[name] = import_name(names.module_of[name], name)
            elif name in modules:
                value = importlib.import_module(f"{package}.{name}")
            elif more is None or name.startswith("__") or (value := more(name)) is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            # Until 0.2: importing a module by its earlier name does not replace the function of that name.
            if name not in names.module_of or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*names.module_of, *modules, *list_more()})

    module = sys.modules[package]
    module.__class__ = Package
    module.__all__ = sorted(names.module_of)


def import_name(module: str, name: str) -> Any:
    """Imports a public name from its module.

    Raises:
        ModuleNotFoundError: if the module needs the library datasets, which is not installed.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ("datasets", "pyarrow"):
            raise
        message = f'{name} needs the library datasets: pip install "hf_attn_dynamics[recipes]".'
        raise ModuleNotFoundError(message, name=error.name) from error
