"""The data package lists its names once and imports what is asked for."""

import importlib

import pytest
from fresh_processes import python

from hf_attn_dynamics import data


def test_every_name_is_there():
    assert {"load_texts", "sentence_pairs", "Tree", "align_targets", "tree_targets"} <= {*data.__all__} <= {*dir(data)}
    for name in data.__all__:
        value = getattr(data, name)
        assert value is data.GLUE_TASKS or value.__module__.startswith("hf_attn_dynamics.data.")
    with pytest.raises(AttributeError, match="module 'hf_attn_dynamics.data' has no attribute 'load_everything'"):
        data.load_everything  # noqa: B018


def test_a_module_that_has_moved_does_not_replace_the_function_of_its_name():
    with pytest.warns(FutureWarning, match="data.sentence_pairs is hf_attn_dynamics.data.documents now"):
        module = importlib.import_module("hf_attn_dynamics.data.sentence_pairs")
    assert data.sentence_pairs is module.sentence_pairs


def test_a_module_that_was_split_still_has_all_names():
    module = importlib.import_module("hf_attn_dynamics.data.word_targets")
    for name in ("align_targets", "align_weights", "pair_targets", "tree_targets", "pharaoh_targets"):
        assert getattr(module, name) is getattr(data, name)


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
