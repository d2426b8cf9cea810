# Licensed under the Apache License, Version 2.0.
import ast
from pathlib import Path

import hf_attn_dynamics


ABOVE = {"training", "hub", "runs", "sweeps", "model_card"}


def test_analysis_imports_nothing_above_it():
    for path in Path(hf_attn_dynamics.__file__).with_name("analysis").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 2]
        assert not ABOVE & {module.split(".")[0] for module in modules}, path.name
