# Licensed under the Apache License, Version 2.0.
"""Earlier names of modules and functions, which can be imported until version 0.2."""

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


PACKAGE = __name__.rpartition(".")[0]
MOVED = {
    "analysis.agreement": "analysis.lexical.agreements",
    "analysis.alignment": "analysis.lexical.alignment",
    "analysis.attention_maps": "analysis.heads.maps",
    "analysis.attention_statistics": "analysis.observers.confidence",
    "analysis.attribution_statistics": "analysis.attribution.statistics",
    "analysis.attribution_trace": "analysis.attribution.trace",
    "analysis.coreference": "analysis.heads.coreference",
    "analysis.excluded_tokens": "analysis.observers.excluded_tokens",
    "analysis.global_attribution": "analysis.attribution.across_layers",
    "analysis.head_distances": "analysis.observers.distances",
    "analysis.head_outputs": "analysis.heads.outputs",
    "analysis.html_page": "analysis.pages.html",
    "analysis.importance": "analysis.heads.importance",
    "analysis.integrated_gradients": "analysis.attribution.integrated_gradients",
    "analysis.interactive": "analysis.pages.head_explorer",
    "analysis.lexical.agreement": "analysis.lexical.agreements",
    "analysis.lexical.optimal_attention": "analysis.lexical.optimum",
    "analysis.lexical.source_rows": "analysis.lexical.rows",
    "analysis.lexical_probe": "analysis.lexical.probe",
    "analysis.observing": "analysis.observers.observation",
    "analysis.optimal_attention": "analysis.lexical.optimum",
    "analysis.page": "analysis.pages.html",
    "analysis.plots_attribution": "analysis.plots.attribution",
    "analysis.plots_copying": "recipes.copying_plots",
    "analysis.plots_dynamics": "analysis.plots.dynamics",
    "analysis.plots_heads": "analysis.plots.heads",
    "analysis.plots_lexical": "recipes.lexical_plots",
    "analysis.plots_score_norm": "recipes.score_norm_plots",
    "analysis.reading_page": "analysis.pages.reading_page",
    "analysis.relative_positions": "analysis.observers.positions",
    "analysis.relevance_propagation": "analysis.relevance.propagation",
    "analysis.relevance_rules": "analysis.relevance.rules",
    "analysis.report": "analysis.heads.pruning_report",
    "analysis.roles": "analysis.observers.roles",
    "analysis.rollout": "analysis.attribution.rollout",
    "analysis.saliency": "analysis.lexical.saliency",
    "analysis.source_rows": "analysis.lexical.rows",
    "analysis.syntactic_roles": "analysis.observers.syntactic_roles",
    "analysis.token_roles": "analysis.observers.token_roles",
    "data.copying": "data.demo.copying",
    "data.embedded": "data.demo.embedded",
    "data.numerals": "data.demo.numerals",
    "data.sentence_pairs": "data.documents",
    "data.topics": "data.demo.topics",
    "model_card": "hub.card",
    "runs": "recipes.run",
    "sweeps": "recipes.sweeps",
}
# Single names that have left their package: the module that has them.
MOVED_NAMES = {"analysis.plots.plot_heat_maps": "recipes.sweep_plots"}


class _MovedModules(MetaPathFinder, Loader):
    """Imports modules by their earlier names."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname.removeprefix(f"{PACKAGE}.") not in MOVED or not fullname.startswith(f"{PACKAGE}."):
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = f"{PACKAGE}.{MOVED[spec.name.removeprefix(f'{PACKAGE}.')]}"
        warnings.warn(f"{spec.name} is {name} now; the earlier name goes in 0.2.", FutureWarning, stacklevel=2)
        return importlib.import_module(name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module has been executed under its current name."""


def find_moved_modules() -> None:
    """Installs the finder of earlier names behind all others."""
    if not any(type(finder).__name__ == _MovedModules.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())


def names_of(package: str, *modules: str) -> Callable[[str], Any]:
    """Returns a function that looks up names of a package that was a single module, in modules of the package.

    It returns `None` for unknown names, and imports modules on demand: some need optional libraries.
    """

    def find(name: str) -> Any:
        moved = MOVED_NAMES.get(f"{package.removeprefix(f'{PACKAGE}.')}.{name}")
        places = [f"{PACKAGE}.{moved}"] if moved else [f"{package}.{module}" for module in modules]
        for place in places:
            module = importlib.import_module(place)
            if hasattr(module, name):
                return getattr(module, name)
        return None

    return find
