# Licensed under the Apache License, Version 2.0.
"""Models of a user's own: headwise once their attention is registered, with nothing else."""

import copy
import pickle

import pytest
import torch
from dense_guidance import dense_guidance_loss
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_attn_dynamics as had
from hf_attn_dynamics.models import head_roles


class MyConfig(PreTrainedConfig):
    model_type = "my-own"
    vocab_size: int = 40
    hidden_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 32


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class MyAttention(nn.Module):
    is_causal = False

    def __init__(self, config):
        super().__init__()
        self.config, self.head_dim = config, config.hidden_size // config.num_attention_heads
        self.qkv, self.out = (
            nn.Linear(config.hidden_size, 3 * config.hidden_size),
            nn.Linear(*[config.hidden_size] * 2),
        )

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        parts = self.qkv(hidden_states).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention_interface(
            self, query, key, value, attention_mask, scaling=self.head_dim**-0.5, **kwargs
        )
        return self.out(output.flatten(2)), weights


class MyModel(PreTrainedModel):
    config_class = MyConfig
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([MyAttention(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None, output_attentions=False, **kwargs):
        hidden, maps = self.words(input_ids), ()
        for layer in self.layers:
            added, weights = layer(hidden, **kwargs)
            hidden, maps = hidden + added, (*maps, weights)
        return BaseModelOutput(hidden, attentions=maps if output_attentions else None)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(head_roles, "_REGISTERED", {})
    had.register_attention(MyAttention, had.HeadRoles(queries=("qkv",), keys=(), output="out"))


def build(**heads):
    cls = had.headwise_class(MyModel)
    torch.manual_seed(0)
    return cls(cls.config_class(**heads, attn_implementation="eager")).double().eval()


@pytest.mark.usefixtures("registered")
def test_an_own_model_is_guided_gated_pruned_saved_and_loaded(tmp_path):
    model = build(guidance={"heads": {"next": [0], "first": [2]}}, gates={})
    assert type(model) is had.headwise_class(MyModel)
    assert (type(model).__name__, model.config.model_type) == ("HeadwiseMyModel", "headwise-my-own")
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    outputs = model(ids, output_guidance_loss=True, output_gate_penalty=True, output_attentions=True)
    dense = dense_guidance_loss(
        [(row, torch.stack(outputs.attentions)[:, i]) for i, row in enumerate(ids.tolist())],
        model.config.guided_heads(),
    )
    torch.testing.assert_close(outputs.guidance_loss, dense)
    assert outputs.gate_penalty > 0
    model.head_gates()["encoder", 1].log_alpha.data[3] = -3.0
    expected = model(ids).last_hidden_state
    pruned = had.prune_closed_gates(copy.deepcopy(model))
    torch.testing.assert_close(pruned(ids).last_hidden_state, expected)
    pruned.save_pretrained(tmp_path)
    back = had.headwise_class(MyModel).from_pretrained(tmp_path)
    assert back.config.pruned_heads == {1: [3]}
    torch.testing.assert_close(back(ids).last_hidden_state, expected)


@pytest.mark.usefixtures("registered")
def test_what_is_made_is_the_same_object_each_time():
    first = had.headwise_class(MyModel)
    assert had.headwise_class(MyModel) is first
    assert had.headwise_class(type("Other", (MyModel,), {})).config_class is first.config_class
    model = build()
    assert torch.equal(pickle.loads(pickle.dumps(model.state_dict()))["words.weight"], model.words.weight)


def test_attention_that_is_not_registered_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(head_roles, "_REGISTERED", {})
    with pytest.raises(ValueError, match=r"attention of an unknown class, MyAttention .*register_attention"):
        build()


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (MyAttention, "model_class must be a class of models"),
        ("MyModel", "model_class must be a class of models"),
    ],
)
def test_what_is_no_class_of_models_is_refused(model_class, message):
    with pytest.raises(ValueError, match=message):
        had.headwise_class(model_class)


def test_stock_classes_have_their_twins():
    import transformers

    assert had.headwise_class(transformers.LlamaForCausalLM) is had.HeadwiseLlamaForCausalLM
    with pytest.raises(ValueError, match="XLNetModel has no headwise class; headwise_architectures"):
        had.headwise_class(transformers.XLNetModel)
