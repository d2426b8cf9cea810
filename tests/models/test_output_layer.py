# Licensed under the Apache License, Version 2.0.
import pytest
import torch
from tiny_lstms import tiny_lexical
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from hf_attn_dynamics.models.output_layer import OutputLayer


with_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
SHAPES = [(1, 1, 6), (3, 5, 6), (2, 3, 4, 6), (0, 2, 6)]


def layer_and_inputs(shape, dtype=torch.float32):
    torch.manual_seed(0)
    return OutputLayer(6, 70).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_a_linear_layer_with_and_without_gradients(shape, dtype):
    layer, inputs = layer_and_inputs(shape, dtype)
    expected = linear(inputs, layer.weight, layer.bias)
    torch.testing.assert_close(layer(inputs), expected)
    for no_gradients in (torch.no_grad, torch.inference_mode):
        with no_gradients():
            found = layer(inputs)
        assert not found.requires_grad
        torch.testing.assert_close(found.clone(), expected.detach())


def test_strided_inputs_are_taken_as_they_are():
    layer, inputs = layer_and_inputs((4, 6, 5))
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs.mT), linear(inputs.mT.contiguous(), layer.weight, layer.bias))
        torch.testing.assert_close(layer(inputs.mT[:, ::2]), layer(inputs.mT)[:, ::2])


def test_new_weights_are_used_at_once():
    layer, inputs = layer_and_inputs((3, 6))
    with torch.no_grad():
        layer(inputs)
        layer.weight.zero_()
        torch.testing.assert_close(layer(inputs), layer.bias.expand(3, -1))


def test_hooks_see_its_outputs_and_autocast_its_type():
    layer, inputs = layer_and_inputs((3, 6))
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.no_grad():
        layer(inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(inputs)
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_values_and_derivatives_of_functions_are_those_of_a_linear_layer():
    layer, inputs = layer_and_inputs((4, 3, 6))
    plain = nn.Linear(6, 70)
    plain.load_state_dict(layer.state_dict())
    for one in (torch.vmap, lambda call: lambda values: torch.func.jvp(call, (values,), (values.cos(),))):
        with torch.no_grad():
            torch.testing.assert_close(one(layer)(inputs), one(plain)(inputs))


def test_inputs_of_another_size_are_refused_as_by_a_linear_layer():
    layer, inputs = layer_and_inputs((3, 5))
    for without_gradients in (torch.no_grad, torch.enable_grad):
        with without_gradients(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(inputs)


class Multiplications(TorchDispatchMode):
    """Whether each linear layer that PyTorch computes is one of oneDNN."""

    def __init__(self):
        super().__init__()
        self.by_onednn = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in function.name() for name in ("linear", "addmm")):
            self.by_onednn.append(any(one.is_mkldnn for one in args))
        return function(*args, **(kwargs or {}))


@with_onednn
@pytest.mark.parametrize(
    ("without_gradients", "dtype", "fast"),
    [
        (torch.no_grad, torch.float32, True),
        (torch.inference_mode, torch.float32, True),
        (torch.enable_grad, torch.float32, False),
        (torch.no_grad, torch.float64, False),
    ],
)
def test_onednn_multiplies_in_single_precision_without_gradients(without_gradients, dtype, fast):
    layer, inputs = layer_and_inputs((3, 6), dtype)
    with without_gradients(), Multiplications() as seen:
        layer(inputs)
    assert seen.by_onednn == [fast]


@with_onednn
def test_a_translator_goes_by_it_with_resized_embeddings_as_well():
    model = tiny_lexical("LstmSeq2SeqForConditionalGeneration").float()
    for words in (11, 14):
        model.resize_token_embeddings(words)
        with Multiplications() as seen:
            model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=1)
        assert any(seen.by_onednn)
