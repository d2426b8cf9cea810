# Licensed under the Apache License, Version 2.0.
"""What a checkpoint may ask for; tests of files from elsewhere have the rest."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_attn_dynamics import headwise_model, load_pruned, prune_heads


SIZES = {
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def test_rotary_positions_take_no_memory_and_may_be_many(tmp_path):
    model = prune_heads(LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=10 * 2**20)).eval(), {0: [1]})
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert load_pruned(tmp_path)(ids).logits.equal(model(ids).logits)


@pytest.mark.parametrize("load", [load_pruned, headwise_model])
def test_as_many_learned_positions_have_to_be_in_the_weights(load, tmp_path):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 10 * 2**20}))
    with pytest.raises(ValueError, match="needs 83,886,080 elements that are missing from the weights"):
        load(tmp_path)
