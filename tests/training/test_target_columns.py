import copy
import pickle
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)

from hf_attn_dynamics import MaskedLanguageModelCollator, ReplacedTokenCollator
from hf_attn_dynamics.data import (
    align_sparse_targets,
    align_targets,
    embedded_trees,
    train_byte_level_bpe,
    tree_targets,
)
from hf_attn_dynamics.training import GuidanceCollator


N = -100


@pytest.fixture(params=["right", "left"])
def side(request):
    return request.param


@pytest.fixture
def tokenizer(side):
    tokenizer = train_byte_level_bpe(["the dog chased the cat", "a black cat"], vocab_size=275)
    tokenizer.padding_side = side
    return tokenizer


def sentences(tokenizer, seed=0, count=12):
    """Sentences whose rows have a random key of the sentence, or none."""
    draw = random.Random(seed)
    features = []
    for _ in range(count):
        length = draw.randint(2, 9)
        ids = [0, *(draw.randrange(5, len(tokenizer)) for _ in range(length)), 2]
        keys = [draw.choice([N, *range(len(ids))]) for _ in ids]
        features.append({"input_ids": ids, "attention_mask": [1] * len(ids), "guidance_syntax": keys})
    return features


def placed(values, width, fill, side):
    """A row of a batch by hand; keys are not shifted."""
    gap = [fill] * (width - len(values))
    return [*gap, *values] if side == "left" else [*values, *gap]


# ---------------------------------------------------------------------------------------------------------------------
# Padding
# ---------------------------------------------------------------------------------------------------------------------


def test_keys_by_hand():
    tokenizer = train_byte_level_bpe(["the dog"], vocab_size=262)
    features = [
        {"input_ids": [0, 7, 8, 2], "guidance_a": [N, 2, 1, N]},
        {"input_ids": [0, 2], "guidance_a": [1, N]},
        {"input_ids": [0, 9, 2], "guidance_a": None},
    ]
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer))(features)
    assert batch["guidance_a"].tolist() == [[N, 2, 1, N], [1, N, N, N], [N, N, N, N]]
    assert batch["guidance_a"].dtype == torch.long
    tokenizer.padding_side = "left"
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=5))(features)
    assert batch["guidance_a"].tolist() == [[N, N, 3, 2, N], [N, N, N, 4, N], [N] * 5]


@pytest.mark.parametrize("multiple", [None, 8])
def test_rows_name_the_same_tokens_as_in_their_example(multiple, tokenizer):
    features = sentences(tokenizer)
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple))(features)
    ids, keys, mask = batch["input_ids"], batch["guidance_syntax"], batch["attention_mask"].bool()
    assert keys.shape == ids.shape
    assert (keys[~mask] == N).all()
    assert multiple is None or keys.shape[1] % multiple == 0
    for number, feature in enumerate(features):
        own = keys[number][mask[number]].tolist()
        assert [key == N for key in own] == [key == N for key in feature["guidance_syntax"]]
        first = int(mask[number].int().argmax())
        assert [N if key == N else key - first for key in own] == feature["guidance_syntax"]


def test_all_other_columns_are_those_of_the_collator(tokenizer):
    features = sentences(tokenizer)
    for one in features:
        one["guidance_weight"] = 0.5  # an argument of the forward pass
    plain = [{name: value for name, value in one.items() if name != "guidance_syntax"} for one in features]
    collator = DataCollatorWithPadding(tokenizer)
    before = copy.deepcopy(features)
    batch, expected = GuidanceCollator(collator)(features), collator(plain)
    assert features == before
    assert batch.keys() == expected.keys() | {"guidance_syntax"}
    for name, value in expected.items():
        assert torch.equal(batch[name], value)
    assert GuidanceCollator(collator)(plain).keys() == expected.keys()


def test_weights_belong_to_keys_and_are_padded_with_0(tokenizer, side):
    features = sentences(tokenizer)
    for one in features:
        one["guidance_words"] = [0.5 * at for at in range(len(one["input_ids"]))]
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer))(features)
    width = batch["input_ids"].shape[1]
    assert batch["guidance_words"].dtype == torch.float32
    assert batch["guidance_words"].tolist() == [placed(one["guidance_words"], width, 0, side) for one in features]


@pytest.mark.parametrize("number", [int, float])
def test_sparse_targets_are_padded_to_the_most_keys(number, tokenizer, side):
    features = [
        {"input_ids": [0, 7, 2], "guidance_a": [[0, 2], [], [1]], "guidance_a_weights": [[1, 3], [], [2]]},
        {"input_ids": [0, 2], "guidance_a": [[], [0, 1, N]], "guidance_a_weights": [[], [1, 1, 0]]},
        {"input_ids": [0, 2], "guidance_a": None, "guidance_a_weights": None},
    ]
    for one in features:
        if one["guidance_a"]:
            one["guidance_a_weights"] = [[number(weight) for weight in row] for row in one["guidance_a_weights"]]
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer))(features)
    gap = int(side == "left")
    none = [N, N, N]
    assert batch["guidance_a"].tolist() == [
        [[0, 2, N], none, [1, N, N]],
        placed([none, [gap, 1 + gap, N]], 3, none, side),
        [none] * 3,
    ]
    assert batch["guidance_a_weights"].tolist() == [
        [[1, 3, 0], [0, 0, 0], [2, 0, 0]],
        placed([[0, 0, 0], [1, 1, 0]], 3, [0, 0, 0], side),
        [[0, 0, 0]] * 3,
    ]
    assert batch["guidance_a_weights"].is_floating_point()


@pytest.mark.parametrize("none", [None, [[], []], [[N, N], [N, N]]])
def test_sparse_targets_of_a_batch_without_any_are_still_sparse(none, tokenizer):
    empty = None if none is None else [[0.0] * len(row) for row in none]
    features = [{"input_ids": [0, 2], "guidance_a": none, "guidance_a_weights": empty}] * 2
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer))(features)
    slots = max(1, len(none[0]) if none else 0)
    assert batch["guidance_a"].tolist() == [[[N] * slots] * 2] * 2
    assert batch["guidance_a_weights"].tolist() == [[[0.0] * slots] * 2] * 2
    assert (batch["guidance_a"].dtype, batch["guidance_a_weights"].dtype) == (torch.long, torch.float32)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("subword", ["first", "all"])
def test_sparse_columns_of_datasets_name_the_tokens_of_target_words(subword, streaming, tokenizer, side):
    trees = embedded_trees()[:12]
    dependents = [tree_targets(tree, direction="dependent", several="all") for tree in trees]
    weights = [[[1.0 + target for target in own] for own in tree] for tree in dependents]
    data = {"text": [tree.text for tree in trees], "spans": [tree.spans for tree in trees]}
    data = Dataset.from_dict({**data, "targets": dependents, "weights": weights})
    data = data.to_iterable_dataset(num_shards=2) if streaming else data

    def encode(rows):
        encoding = tokenizer(rows["text"], truncation=True, max_length=20)
        encoding["guidance_a"], encoding["guidance_a_weights"] = align_sparse_targets(
            encoding, rows["targets"], subword, weights=rows["weights"], spans=rows["spans"]
        )
        return encoding

    data = data.map(encode, batched=True, batch_size=5, remove_columns=["text", "spans", "targets", "weights"])
    examples = list(data)
    batch = GuidanceCollator(DataCollatorWithPadding(tokenizer))(examples)
    assert {max(len(row) for row in one["guidance_a"]) for one in examples} != {1}
    for number, one in enumerate(examples):
        gap = len(batch["input_ids"][number]) - len(one["input_ids"]) if side == "left" else 0
        expected = torch.zeros(2 * [batch["input_ids"].shape[1]])
        for row, own in enumerate(zip(one["guidance_a"], one["guidance_a_weights"])):
            for key, weight in zip(*own):
                if key != N:
                    expected[gap + row, gap + key] += weight
        found = torch.zeros_like(expected)
        keys = batch["guidance_a"][number]
        found.scatter_add_(1, keys.clamp(0), batch["guidance_a_weights"][number].where(keys != N, 0.0))
        torch.testing.assert_close(found, expected)


def test_rows_of_cross_attention_are_labels(tokenizer, side):
    features = [
        {"input_ids": [0, 7, 8, 2], "labels": [0, 2], "guidance_alignment": [3, N]},
        {"input_ids": [0, 2], "labels": [0, 9, 9, 9, 2], "guidance_alignment": [1, 0, N, 1, N]},
    ]
    collator = GuidanceCollator(
        DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=3), rows={"guidance_alignment": "labels"}
    )
    batch = collator(features)
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 6)
    shifts = (2, 4) if side == "left" else (0, 0)
    rows = [[N if key == N else key + by for key in one["guidance_alignment"]] for one, by in zip(features, shifts)]
    assert batch["guidance_alignment"].tolist() == [placed(row, 6, N, side) for row in rows]


def test_keys_can_be_labels_too(tokenizer, side):
    features = [{"input_ids": [0, 7, 8, 2], "labels": [0, 9, 2], "guidance_own": [2, N, 1]}]
    features += [{"input_ids": [0, 2], "labels": [2], "guidance_own": [0]}]
    columns = {"guidance_own": "labels"}
    batch = GuidanceCollator(DataCollatorForSeq2Seq(tokenizer), rows=columns, keys=columns)(features)
    assert batch["guidance_own"].tolist() == [[2, N, 1], [N, N, 2] if side == "left" else [0, N, N]]


def test_examples_without_tokens_have_no_targets(tokenizer):
    features = [{"input_ids": [], "guidance_a": []}, {"input_ids": [7], "guidance_a": [0]}]
    assert GuidanceCollator(DataCollatorWithPadding(tokenizer))(features)["guidance_a"].tolist() == [[N], [0]]
    nothing = [{"input_ids": [7, 8], "guidance_a": None}]
    assert GuidanceCollator(DataCollatorWithPadding(tokenizer))(nothing)["guidance_a"].tolist() == [[N, N]]


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_arrays_and_tensors_are_lists(convert, tokenizer):
    features = sentences(tokenizer)
    collator = GuidanceCollator(DataCollatorWithPadding(tokenizer))
    expected = collator(features)["guidance_syntax"]
    arrays = [{**one, "guidance_syntax": convert(one["guidance_syntax"])} for one in features]
    assert torch.equal(collator(arrays)["guidance_syntax"], expected)


def test_a_function_that_stacks_is_a_collator(tokenizer):
    features = [{"input_ids": [0, 7, 2], "guidance_a": [N, 0, 1]}] * 2
    assert GuidanceCollator(default_data_collator)(features)["guidance_a"].tolist() == [[N, 0, 1]] * 2
    assert GuidanceCollator(default_data_collator).padding_side == "right"


# ---------------------------------------------------------------------------------------------------------------------
# Collators of this package, trainers and workers
# ---------------------------------------------------------------------------------------------------------------------


def own_collators(tokenizer):
    return [
        MaskedLanguageModelCollator(tokenizer, seed=1, pad_to_multiple_of=8),
        ReplacedTokenCollator(tokenizer, np.ones(len(tokenizer)), seed=1, pad_to_multiple_of=8),
    ]


def test_collators_of_the_package_pad_targets(tokenizer):
    features = sentences(tokenizer)
    plain = [{name: value for name, value in one.items() if name != "guidance_syntax"} for one in features]
    for collator in own_collators(tokenizer):
        batch, wrapped = collator(features), GuidanceCollator(collator)(features)
        expected = collator(plain)
        assert batch.keys() == wrapped.keys() == expected.keys() | {"guidance_syntax"}
        for name in batch:
            assert torch.equal(batch[name], wrapped[name])
            assert name == "guidance_syntax" or torch.equal(batch[name], expected[name])
        width = batch["input_ids"].shape[1]
        # They pad on the right, whatever the tokenizer does.
        assert batch["guidance_syntax"].tolist() == [placed(one["guidance_syntax"], width, N, "") for one in features]


def test_epochs_are_those_of_the_other_collator(tokenizer):
    masking, *_ = own_collators(tokenizer)
    collator = GuidanceCollator(masking)
    first = collator(sentences(tokenizer))["input_ids"]
    collator.set_epoch(3)
    assert masking.epoch == collator.epoch == 3
    assert not torch.equal(collator(sentences(tokenizer))["input_ids"], first)
    for name in ("set_epoch", "epoch"):
        assert not hasattr(GuidanceCollator(DataCollatorWithPadding(tokenizer)), name)


def test_masks_of_stock_collators_keep_the_targets(tokenizer):
    features = sentences(tokenizer)
    collator = GuidanceCollator(DataCollatorForLanguageModeling(tokenizer))
    expected = GuidanceCollator(DataCollatorWithPadding(tokenizer))(features)["guidance_syntax"]
    assert torch.equal(collator(features)["guidance_syntax"], expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_collators(copied, tokenizer, side):
    collator = copied(GuidanceCollator(DataCollatorWithPadding(tokenizer), rows={"guidance_a": "labels"}))
    assert isinstance(collator, GuidanceCollator)
    assert (collator.rows, collator.padding_side) == ({"guidance_a": "labels"}, side)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_columns_of_datasets_reach_batches(workers, streaming, tokenizer):
    trees = embedded_trees()[:12]
    data = Dataset.from_dict(
        {
            "text": [tree.text for tree in trees],
            "spans": [tree.spans for tree in trees],
            "heads": [tree_targets(tree) for tree in trees],
        }
    )
    data = data.to_iterable_dataset(num_shards=2) if streaming else data

    def encode(rows):
        encoding = tokenizer(rows["text"], truncation=True, max_length=20)
        return {**encoding, "guidance_syntax": align_targets(encoding, rows["heads"], spans=rows["spans"])}

    data = data.map(encode, batched=True, batch_size=5, remove_columns=["text", "spans", "heads"])
    collator = GuidanceCollator(DataCollatorWithPadding(tokenizer))
    rows = 0
    for batch in DataLoader(data, batch_size=4, collate_fn=collator, num_workers=workers):
        keys, mask = batch["guidance_syntax"], batch["attention_mask"]
        assert keys.shape == mask.shape
        has_key = keys != N
        assert mask[has_key].all()
        assert mask.gather(1, keys.clamp(0))[has_key].all()
        rows += int(has_key.sum())
    encoding = tokenizer([tree.text for tree in trees], truncation=True, max_length=20)
    heads, spans = [tree_targets(tree) for tree in trees], [tree.spans for tree in trees]
    assert rows == sum(key != N for row in align_targets(encoding, heads, spans=spans) for key in row)


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


class Truncating:
    """Pads, and truncates to four tokens on one side."""

    def __init__(self, tokenizer, truncation_side):
        self.tokenizer, self.inner = tokenizer, DataCollatorWithPadding(tokenizer)
        tokenizer.truncation_side = truncation_side
        self.kept = slice(4) if truncation_side == "right" else slice(-4, None)

    def __call__(self, features):
        return self.inner([{"input_ids": one["input_ids"][self.kept]} for one in features])


@pytest.mark.parametrize("truncation_side", ["right", "left"])
def test_truncation_that_loses_targets_is_refused(truncation_side, tokenizer, side):
    collator = GuidanceCollator(Truncating(tokenizer, truncation_side))
    ids = [0, 5, 6, 7, 8, 2]
    short = {"input_ids": [0, 2], "guidance_a": [1, N]}
    inside = [N, 3, 2, N, N, N] if truncation_side == "right" else [N, N, N, 4, N, 3]
    batch = collator([{"input_ids": ids, "guidance_a": inside}, short])
    kept = [N, 3, 2, N] if truncation_side == "right" else [N, 2, N, 1]
    assert batch["guidance_a"].tolist() == [kept, [N, N, 3, N] if side == "left" else [1, N, N, N]]
    # Two rows are not kept, and the key of one more: 5 on the right, 1 on the left.
    lost = [2, 0, 5, 1, 3, 3]
    with pytest.raises(ValueError, match="3 of 6 targets of guidance_a in example 1 would be lost, .* 6 tokens to 4"):
        collator([short, {"input_ids": ids, "guidance_a": lost}])
    weights = [1.0, 0, 0, 0, 0, 1.0]
    with pytest.raises(ValueError, match="1 of 2 targets of guidance_a in example 0 would be lost"):
        collator([{"input_ids": ids, "guidance_a": weights}])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([{"guidance_a": [0, N]}, {}], "example 1 has no guidance_a; set it to None if the example has no targets"),
        (
            [{"guidance_a": [0, N, N]}],
            "guidance_a of example 0 has 3 values, but its input_ids 2 tokens. If the .* tru",
        ),
        ([{"guidance_a": [0]}], "guidance_a of example 0 has 1 values, but its input_ids 2 tokens"),
        ([{"guidance_a": [1.0]}], "guidance_a of example 0 has 1 values, but its input_ids 2 tokens"),
        ([{"guidance_a": []}], "guidance_a of example 0 has 0 values, but its input_ids 2 tokens"),
        ([{"guidance_a": [0, 2]}], "guidance_a of example 0 has the key 2, but its input_ids has the keys 0 to 1"),
        ([{"guidance_a": [[0], [-1]]}], "guidance_a of example 0 has the key -1, but its input_ids has the keys 0 to"),
        ([{"guidance_a": [0, 1]}, {"guidance_a": [0.5, 1]}], "guidance_a has integers, which are keys, and weights"),
        (
            [{"guidance_a": [0, 1]}, {"guidance_a": [[0], [1]]}],
            "guidance_a must be lists of numbers, or lists of lists",
        ),
        ([{"guidance_a": ["the", "dog"]}], "guidance_a must be lists of numbers, or lists of lists of numbers"),
        ([{"guidance_a": [True, False]}], "guidance_a must be lists of numbers, or lists of lists of numbers"),
    ],
)
def test_targets_that_do_not_fit_are_refused(features, message):
    tokenizer = train_byte_level_bpe(["the dog"], vocab_size=262)
    with pytest.raises(ValueError, match=message):
        GuidanceCollator(DataCollatorWithPadding(tokenizer))([{"input_ids": [0, 2], **one} for one in features])


def test_sequences_that_are_missing_or_concatenated_are_refused():
    tokenizer = train_byte_level_bpe(["the dog"], vocab_size=262)
    features = [{"input_ids": [0, 2], "guidance_a": [0, N]}] * 2
    with pytest.raises(
        ValueError, match="the rows of guidance_a are the tokens of labels, a column that the examples"
    ):
        GuidanceCollator(DataCollatorWithPadding(tokenizer), rows={"guidance_a": "labels"})(features)
    with pytest.raises(
        ValueError, match="the keys of guidance_a are the tokens of source, a column that the examples"
    ):
        GuidanceCollator(DataCollatorWithPadding(tokenizer), keys={"guidance_a": "source"})(features)
    with pytest.raises(
        ValueError, match=r"makes input_ids of shape \(1, 4\) of 2 examples, but the rows of guidance_a"
    ):
        GuidanceCollator(DataCollatorWithFlattening())(features)
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'both'"):
        GuidanceCollator(DataCollatorWithPadding(tokenizer), padding_side="both")
