import datasets
import numpy as np
import pytest
from datasets import Dataset, List, Value

from hf_attn_dynamics.data import token_counts


ROWS = [[1, 3, 3], [2], [], [3, 0]]


def dataset(kind):
    data = Dataset.from_dict({"input_ids": ROWS, "other": ["a", "b", "c", "d"]})
    return data.to_iterable_dataset() if kind == "stream" else data


@pytest.mark.parametrize("kind", ["table", "stream"])
@pytest.mark.parametrize(("limit", "expected"), [(None, [1, 1, 1, 3, 0]), (2, [0, 1, 1, 2, 0]), (9, [1, 1, 1, 3, 0])])
def test_tokens_of_the_first_examples_are_counted(kind, limit, expected):
    counts = token_counts(dataset(kind), 5, limit)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected


def test_rows_of_one_length_a_selection_and_a_mapped_stream_are_counted():
    features = datasets.Features({"input_ids": List(Value("int32"), length=2)})
    blocks = Dataset.from_dict({"input_ids": [[0, 1], [1, 1], [2, 2]]}, features=features)
    assert token_counts(blocks, 3).tolist() == [1, 3, 2]
    assert token_counts(blocks.select([2, 0]), 3).tolist() == [1, 1, 2]
    stream = blocks.to_iterable_dataset().map(lambda row: {"input_ids": row["input_ids"][:1]}, features=None)
    assert token_counts(stream, 3).tolist() == [1, 1, 1]


def test_the_sum_over_many_batches_is_that_of_all_tokens():
    rows = np.random.default_rng(0).integers(0, 7, (2500, 3))
    assert token_counts(Dataset.from_dict({"input_ids": rows}), 7).tolist() == np.bincount(rows.ravel()).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "limit", "message"),
    [
        (3, None, "vocab_size must be greater than all tokens, up to 3, got 3"),
        (5, 0, "limit must be at least 1, .* got 0"),
    ],
)
def test_impossible_arguments_are_named(vocab_size, limit, message):
    with pytest.raises(ValueError, match=message):
        token_counts(dataset("table"), vocab_size, limit)
