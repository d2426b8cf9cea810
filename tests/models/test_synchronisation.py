# Licensed under the Apache License, Version 2.0.
"""What guidance and gates read from the device: nothing, so that the host need not wait for it.

The meta device has no values: whoever asks for one fails.
"""

import contextlib

import pytest
import torch
from stock_models import build_stock
from tiny_models import ALL_GATES, batch_for, tiny_model
from transformers import masking_utils

from hf_attn_dynamics import headwise_model


BY_POSITION = {"heads": {"next": [0], "prev": [1], "first": [2], "self": [3]}}


@pytest.fixture(autouse=True)
def without_values(monkeypatch):
    """Transformers itself reads masks, to leave them out; and autocast has no such device."""
    for name in ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"):
        monkeypatch.setattr(masking_utils, name, lambda *args, **kwargs: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())


def trained(model, batch, **weights):
    model.train().to("meta")
    outputs = model(**{name: value.to("meta") for name, value in batch.items()}, **weights)
    outputs.loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["roberta", "marian"])
def test_a_guided_and_gated_step_reads_no_value(kind, kernel):
    guidance = {"encoder": BY_POSITION} if kind == "marian" else BY_POSITION
    model = tiny_model(kind, gates=ALL_GATES[kind], guidance=guidance, attn_implementation=kernel)
    batch = {name: value for name, value in batch_for(kind).items() if not name.startswith("decoder")}
    batch["labels"] = batch["input_ids"]
    gradients = trained(model, batch, guidance_weight=0.5, gate_penalty_weight=0.1)
    assert all(one.device.type == "meta" for one in gradients if one is not None)


@pytest.mark.parametrize("name", ["llama", "gemma2", "modernbert", "gpt2"])
def test_classes_made_on_demand_read_no_value(name):
    kind = "encoder" if name == "modernbert" else "decoder"
    model = headwise_model(build_stock(name), gates={}, guidance={kind: {"heads": {"prev": [0], "first": [2]}}})
    ids = torch.full((2, 7), 5)
    trained(
        model,
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids},
        guidance_weight=0.5,
        gate_penalty_weight=0.1,
    )


def test_reading_a_value_fails():
    """A pattern of tokens reads once how many slots it needs, rather than one for each key."""
    model = tiny_model("roberta", guidance={"heads": {"period": [0]}, "period_token_ids": [7]})
    batch = {**batch_for("roberta"), "labels": batch_for("roberta")["input_ids"]}
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        trained(model, batch, guidance_weight=0.5)
