# Licensed under the Apache License, Version 2.0.
"""What training arguments show of themselves."""

import pytest

import hf_attn_dynamics as had


@pytest.mark.parametrize("name", ["HeadwiseTrainingArguments", "HeadwiseSeq2SeqTrainingArguments"])
def test_printed_arguments_hide_tokens_as_the_stock_ones_do(name, tmp_path):
    arguments = getattr(had, name)(tmp_path, hub_token="a secret", guidance_weight=2.5, use_cpu=True)
    for shown in (repr(arguments), str(arguments)):
        assert "a secret" not in shown
        assert "guidance_weight=2.5" in shown


@pytest.mark.parametrize("name", ["HeadwiseTrainingArguments", "HeadwiseSeq2SeqTrainingArguments"])
def test_the_older_spelling_of_activation_checkpointing_is_still_taken(name, tmp_path):
    with pytest.warns(FutureWarning, match="Use `activation_checkpointing` instead"):
        arguments = getattr(had, name)(tmp_path, gradient_checkpointing=True, use_cpu=True)
    assert arguments.activation_checkpointing
