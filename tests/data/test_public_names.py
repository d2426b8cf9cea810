"""The data package lists its names once and imports what is asked for."""

import ast
from pathlib import Path

import pytest
from fresh_processes import python

from hf_attn_dynamics import data


def test_every_name_is_there_and_told_to_type_checkers():
    assert {"load_texts", "sentence_pairs", "Tree", "train_byte_level_bpe"} <= {*data.__all__} <= {*dir(data)}
    for name in data.__all__:
        value = getattr(data, name)
        assert value is data.GLUE_TASKS or value.__module__.startswith("hf_attn_dynamics.data.")
    stub = ast.parse(Path(data.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    aliases = [alias for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    # Written `as` the same name, what a stub imports is public.
    assert sorted(alias.asname for alias in aliases) == sorted(alias.name for alias in aliases) == data.__all__
    with pytest.raises(AttributeError, match="module 'hf_attn_dynamics.data' has no attribute 'load_everything'"):
        data.load_everything  # noqa: B018


def test_no_name_is_that_of_a_module():
    """Importing a module makes it an attribute of its package, in place of what has its name."""
    assert not {path.stem for path in Path(data.__file__).parent.iterdir()} & {*data.__all__}


def test_libraries_are_imported_with_the_names_that_need_them():
    code = """
import sys
before = {*sys.modules}
import hf_attn_dynamics.data
print({"datasets", "transformers.modeling_utils"} & ({*sys.modules} - before))
from hf_attn_dynamics.data import load_texts, text
print(load_texts is text.load_texts, "datasets" in sys.modules)
"""
    (result,) = python(["-c", code], bare=True)
    assert result.stdout.splitlines() == ["set()", "True True"], result.stderr
