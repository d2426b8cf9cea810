"""Missing columns of targets are found before training, as far as a dataset tells its columns."""

import pytest
from datasets import Dataset
from tiny_training import build, collate, guidance_to_targets, trainer, with_targets
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    default_data_collator,
)

from hf_attn_dynamics import MaskedLanguageModelCollator
from hf_attn_dynamics.data import train_byte_level_bpe
from hf_attn_dynamics.training import GuidanceCollator
from hf_attn_dynamics.training.trainer_checks import check_target_columns


TOKENIZER = train_byte_level_bpe(["the dog"], vocab_size=262)
SPARSE = {"heads": {"a": [0], "b": [1]}, "targets": {"a": "sparse", "b": "weights"}}


class Added(DataCollatorWithPadding):
    """Creates the columns itself."""

    def __call__(self, features):
        return {**super().__call__(features), "guidance_a": None}


def data(*names):
    return Dataset.from_dict({name: [[1], [1]] for name in names})


@pytest.mark.parametrize(
    "collator",
    [
        MaskedLanguageModelCollator(TOKENIZER),
        DataCollatorForLanguageModeling(TOKENIZER),
        default_data_collator,
        GuidanceCollator(DataCollatorWithPadding(TOKENIZER)),
        GuidanceCollator(DataCollatorForSeq2Seq(TOKENIZER), rows={"guidance_a": "labels"}),
        GuidanceCollator(MaskedLanguageModelCollator(TOKENIZER)),
    ],
)
@pytest.mark.parametrize("streaming", [True, False])
def test_columns_that_only_the_dataset_can_bring_must_be_there(streaming, collator):
    model = build("MaskedLM", guidance=SPARSE)
    for names, missing in (
        ([], ("a", "'a'")),
        (["guidance_b", "guidance_a_weights"], ("a", "'a'")),
        (["guidance_a"], ("b", "'b'")),
        (["guidance_a", "guidance_b"], None),
    ):
        one = data("input_ids", *names)
        one = one.to_iterable_dataset() if streaming else one
        if missing is None:
            check_target_columns(model, one, collator)
            continue
        message = (
            f"train_dataset has no column guidance_{missing[0]}, which guidance to the target {missing[1]} needs; its "
            f"columns are {', '.join(['input_ids', *names])}. Add it, .* or set guidance_weight=0"
        )
        with pytest.raises(ValueError, match=message):
            check_target_columns(model, one, collator)


@pytest.mark.parametrize(
    "collator",
    [
        collate,
        lambda features: {},
        Added(TOKENIZER),
        GuidanceCollator(Added(TOKENIZER)),
        type("Own", (GuidanceCollator,), {"__module__": "users"})(DataCollatorWithPadding(TOKENIZER)),
    ],
)
def test_collators_of_others_may_create_columns(collator):
    check_target_columns(build("MaskedLM", guidance=SPARSE), data("input_ids"), collator)


def test_columns_may_be_unknown():
    one, collator = data("input_ids"), GuidanceCollator(DataCollatorWithPadding(TOKENIZER))
    model = build("MaskedLM", guidance=SPARSE)
    streamed = one.to_iterable_dataset().map(lambda row: {**row, "guidance_a": [0], "guidance_b": [1.0]})
    assert streamed.column_names is None
    created = one.with_transform(lambda rows: {**rows, "guidance_a": [[0]], "guidance_b": [[1.0]]})
    for unknown in (None, [{"input_ids": [1]}], streamed, created):
        check_target_columns(model, unknown, collator)
    check_target_columns(build("MaskedLM", guidance={"fraction": 0.5}), one, collator)
    check_target_columns(build("MaskedLM", guidance=None), one, collator)


def test_no_batch_is_fetched_before_the_message(tmp_path):
    class Fails(DataCollatorWithPadding):
        def __call__(self, features):
            raise AssertionError("a batch was fetched")

    Fails.__module__ = "transformers"
    model = build("MaskedLM", guidance=guidance_to_targets())
    run = trainer(tmp_path, model, with_targets("MaskedLM").remove_columns("guidance_why"))
    run.data_collator = GuidanceCollator(Fails(TOKENIZER))
    with pytest.raises(
        ValueError, match="train_dataset has no column guidance_why, .* are input_ids, attention_mask, "
    ):
        run.train()
    assert run.optimizer is None
    run.args.guidance_weight = 0.0
    with pytest.raises(AssertionError, match="a batch was fetched"):
        run.train()


def test_evaluation_needs_no_columns(tmp_path):
    tokens = with_targets("MaskedLM").select_columns(["input_ids", "attention_mask", "labels"])
    run = trainer(tmp_path, build("MaskedLM", guidance=guidance_to_targets()), tokens, tokens)
    run.data_collator = MaskedLanguageModelCollator(TOKENIZER)
    assert run.evaluate()["eval_loss"] > 0
