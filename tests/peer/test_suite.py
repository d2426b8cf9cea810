# Licensed under the Apache License, Version 2.0.
"""The verdicts of `PeerTests`, on a test whose outcomes are given."""

import unittest

import pytest
from transformers import RobertaModel

from . import suite


class Ours(RobertaModel):
    """Stands for a class of this package."""


def verdict(ours: str, stock: str, differences: dict) -> str:
    """Runs one test with these outcomes on `Ours` and on its stock parent."""

    class Case(suite.PeerTests, unittest.TestCase):
        models = {RobertaModel: Ours}

        def test_given(self):
            outcome = ours if self.all_model_classes[0] is Ours else stock
            with self.subTest("a part"):
                if outcome == "part skipped":
                    self.skipTest("asked to")
                if outcome == "part failed":
                    self.fail("asked to")
            if outcome == "skipped":
                self.skipTest("asked to")
            if outcome == "failed":
                self.fail("asked to")

    result = unittest.TestResult()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "DIFFERENCES", differences)
        Case("test_given").run(result)
    if result.errors:
        return "expected to fail" if pytest.xfail.Exception.__name__ in result.errors[0][1] else "error"
    return "failed" if result.failures else "skipped" if result.skipped else "passed"


@pytest.mark.parametrize(
    ("ours", "stock", "expected"),
    [
        ("passed", "passed", "passed"),
        ("passed", "failed", "passed"),
        ("failed", "passed", "failed"),
        ("part failed", "passed", "failed"),
        ("failed", "failed", "expected to fail"),
        ("failed", "skipped", "failed"),
        ("skipped", "skipped", "skipped"),
        ("skipped", "passed", "failed"),
        ("part skipped", "part skipped", "passed"),
        ("part skipped", "passed", "failed"),
    ],
)
def test_ours_must_pass_what_stock_passes(ours, stock, expected):
    assert verdict(ours, stock, {}) == expected


@pytest.mark.parametrize(
    ("ours", "expected"),
    [("failed", "expected to fail"), ("skipped", "expected to fail"), ("passed", "failed")],
)
@pytest.mark.parametrize("key", ["test_given", "Case.test_given"])
def test_a_listed_difference_is_expected_and_must_be_one(ours, expected, key):
    assert verdict(ours, "passed", {key: "is meant"}) == expected


def test_every_listed_difference_names_a_test():
    names = {name.rpartition(".")[2] for name in suite.DIFFERENCES}
    assert names <= set(dir(suite.PeerTests))
