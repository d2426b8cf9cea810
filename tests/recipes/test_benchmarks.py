# Licensed under the Apache License, Version 2.0.
"""That what benchmarks compare does the same work."""

import sys
from pathlib import Path

import pytest
import torch
from tiny_models import padded_batch, ragged_sentences, stock_config, vivid
from transformers import BertModel


sys.path.append(str(Path(__file__).parents[2] / "recipes" / "benchmarks"))
import analysis  # noqa: E402


@pytest.mark.parametrize("limit", [3, 63])
def test_statistics_of_maps_are_those_that_are_observed(limit):
    model = vivid(BertModel(stock_config("bert"))).eval()
    batches = [padded_batch(ragged_sentences(5, seed)) for seed in range(2)]
    ends = [5, 6, 7, 8, 9]
    seen, found = (analysis.run(name, model, batches, ends, limit) for name in ("observed", "eager"))
    distances = seen["distance"].distances["encoder"]
    expected = {
        "confidence": seen["confidence"]["encoder"],
        "entropy": seen["entropy"]["encoder"],
        "distance": distances[tuple(torch.triu_indices(len(distances), len(distances), 1))],
        "attention": seen["relative_positions"].attention["encoder"],
        "largest": seen["relative_positions"].largest["encoder"],
    }
    assert found.keys() == expected.keys()
    for name, table in expected.items():
        torch.testing.assert_close(found[name].double(), table, rtol=1e-5, atol=1e-6, equal_nan=True)
