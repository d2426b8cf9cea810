"""Global contributions: forward mode, by hand and by PyTorch, against reverse-mode differentiation."""

import pytest
import torch
from attribution import body_of, reverse_contribution, text_of, tiny
from live_memory import LiveMemory
from tiny_models import batch_for, padded_batch, tiny_model, vivid

from hf_attn_dynamics import global_contribution, local_contribution, prune_heads
from hf_attn_dynamics.analysis.attribution import across_layers
from hf_attn_dynamics.analysis.model_parts import block_of
from hf_attn_dynamics.models.head_roles import locate_heads


def first_block(body, number=0):
    return block_of(body, locate_heads(body)[number])


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "electra", "xlm-roberta", "distilbert", "gpt2", "gpt-oss", "marian"]
)
def test_exact_contributions_are_the_jacobian(name):
    model = tiny(name)
    batch = text_of(model, 5)
    expected = reverse_contribution(body_of(model), batch, first_block(body_of(model)))
    # The eager attention of gpt-oss takes its softmax in single precision.
    tolerance = 2e-6 if name == "gpt-oss" else 1e-9
    torch.testing.assert_close(global_contribution(model, batch), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["bert", "electra", "gpt2", "distilbert"])
def test_exact_contributions_in_the_spectral_norm_are_those_of_the_whole_jacobian(name):
    """ELECTRA's embeddings are of another size than its layers; GPT-2 and DistilBERT are differentiated by PyTorch."""
    model = tiny(name)
    batch = text_of(model, 5)
    expected = reverse_contribution(body_of(model), batch, first_block(body_of(model)), norm=2)
    found = global_contribution(model, batch, norm="spectral", chunk_size=7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert (found - global_contribution(model, batch)).abs().max() > 0.01


def test_exact_spectral_norms_have_no_standard_error_and_begin_at_their_source():
    model = tiny("bert")
    batch = text_of(model, 5)
    found, error = global_contribution(model, batch, source=1, norm="spectral", return_standard_error=True)
    assert found[0].isnan().all()
    assert error[0].isnan().all()
    assert not error[1].any()
    torch.testing.assert_close(found[1], local_contribution(model, batch, norm="spectral")[1], rtol=0, atol=1e-12)


def test_norms_that_cannot_be_had_are_refused():
    model, batch = tiny("bert"), text_of(tiny("bert"))
    with pytest.raises(ValueError, match="needs the whole Jacobian, of which probes are only some directions"):
        global_contribution(model, batch, "probes", probes=4, norm="spectral")
    with pytest.raises(ValueError, match="norm must be one of 'frobenius', 'spectral', got 2"):
        global_contribution(model, batch, norm=2)


@pytest.mark.parametrize(
    ("name", "is_pre_norm"), [("bert", False), ("distilbert", False), ("gpt2", True), ("llama", True)]
)
def test_local_begins_after_the_norm_of_a_pre_norm_layer_and_its_number_as_source_before_it(name, is_pre_norm):
    model = tiny(name)
    batch = text_of(model, 5)
    local, of_layer = local_contribution(model, batch)[0], global_contribution(model, batch, source=0)[0]
    if not is_pre_norm:
        torch.testing.assert_close(of_layer, local, rtol=0, atol=2e-6)
        return
    assert (of_layer - local).abs().max() > 1e-3
    # A norm that only scales and shifts, all positions alike, makes no difference to shares.
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.forward = lambda states: 3 * states + 1
    local, of_layer = local_contribution(model, batch)[0], global_contribution(model, batch, source=0)[0]
    torch.testing.assert_close(of_layer, local, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["llama", "modernbert", "qwen3", "t5"])
def test_models_that_compute_in_single_precision_inside_are_exact_to_1e_6(name):
    model = tiny(name)
    batch = text_of(model, 4)
    expected = reverse_contribution(body_of(model), batch, first_block(body_of(model)))
    torch.testing.assert_close(global_contribution(model, batch), expected, rtol=0, atol=2e-6)


def test_single_precision_is_exact_to_1e_5():
    model = tiny("bert")
    batch = text_of(model, 5)
    expected = reverse_contribution(body_of(model), batch, first_block(body_of(model)))
    found = global_contribution(model.float(), batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_bfloat16_is_close(name):
    model = tiny(name, torch.float32)
    batch = text_of(model)
    expected = global_contribution(model, batch)
    found = global_contribution(model.bfloat16(), batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_gated_and_pruned_models_are_differentiated_as_they_are(kind):
    model = vivid(
        tiny_model(kind, guidance=None, gates={"evaluation": "fractional"}, attn_implementation="eager")
    ).double()
    gates = [module for module in model.modules() if hasattr(module, "log_alpha")]
    for gate in gates:
        gate.log_alpha.data.copy_(torch.tensor([0.3, -0.4, 1.0, 0.1]))
    prune_heads(model, {0: [1, 3]})
    batch = batch_for(kind, [[5, 6, 7, 8], [9, 5]])
    expected = reverse_contribution(model.base_model, batch, first_block(model.base_model))
    torch.testing.assert_close(global_contribution(model, batch), expected, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("kind", ["bert", "electra"])
def test_gates_of_units_and_blocks_are_differentiated_as_they_are(kind):
    gates = {"evaluation": "fractional", "parts": ["heads", "units", "blocks"]}
    model = vivid(tiny_model(kind, guidance=None, gates=gates, attn_implementation="eager")).double()
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if hasattr(module, "log_alpha"):
            module.log_alpha.data.copy_(torch.randn(module.log_alpha.shape, generator=generator))
    batch = batch_for(kind, [[5, 6, 7, 8], [9, 5]])
    expected = reverse_contribution(model.base_model, batch, first_block(model.base_model))
    torch.testing.assert_close(global_contribution(model, batch), expected, rtol=0, atol=1e-9, equal_nan=True)


def test_layers_without_heads_pass_on_their_input():
    model = vivid(tiny_model("bert", guidance=None, attn_implementation="eager")).double()
    prune_heads(model, {0: [0, 1, 2, 3]})
    batch = batch_for("bert", [[5, 6, 7, 8], [9, 5]])
    expected = reverse_contribution(model.base_model, batch, first_block(model.base_model))
    found = global_contribution(model, batch)
    assert found[0].isnan().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, equal_nan=True)


def test_both_ways_agree(monkeypatch):
    model = tiny("roberta")
    batch = text_of(model)
    by_hand = global_contribution(model, batch)
    probed = global_contribution(model, batch, "probes", probes=5)
    monkeypatch.setattr(across_layers, "_POST_NORM_LAYERS", ())
    torch.testing.assert_close(global_contribution(model, batch), by_hand)
    torch.testing.assert_close(global_contribution(model, batch, "probes", probes=5), probed)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("chunk_size", [5, 64, 10_000])
def test_chunks_change_nothing(name, chunk_size):
    model = tiny(name)
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    torch.testing.assert_close(
        global_contribution(model, batch, chunk_size=chunk_size), global_contribution(model, batch)
    )


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_peak_memory_falls_with_the_size_of_chunks(name):
    model = tiny(name, torch.float32)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 4]])}
    peak = {}
    for chunk_size in (12, 48, 192, 10_000):  # 6 tokens of 32 dimensions have 192 tangents
        with LiveMemory() as memory:
            global_contribution(model, batch, chunk_size=chunk_size)
        peak[chunk_size] = memory.peak
    assert peak[12] < peak[192] / 4
    # Four times as many tangents more take four times as much memory more.
    assert (peak[192] - peak[48]) / (peak[48] - peak[12]) == pytest.approx(4, rel=0.15)
    assert peak[10_000] == pytest.approx(peak[192], rel=0.01)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("method", ["exact", "probes"])
def test_padding_and_other_sentences_change_nothing(name, method):
    model = tiny(name)
    sentences = [[5, 6, 7, 8], [9, 4], [7]]
    together = global_contribution(model, padded_batch(sentences), method, probes=4)
    for number, sentence in enumerate(sentences):
        alone = global_contribution(model, {"input_ids": torch.tensor([sentence])}, method, probes=4)
        length = len(sentence)
        torch.testing.assert_close(together[:, number, :, :length, :length], alone[:, 0])
        assert together[:, number, :, length:].eq(0).all()
        assert together[:, number, :, :, length:].eq(0).all()


def test_padding_is_not_run_with_every_tangent():
    model, shapes = tiny("gpt2"), []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    global_contribution(model, padded_batch([[5, 6, 7, 8], [9]]), "probes", probes=2)
    hook.remove()
    # Both sentences together, then two directions of each token of the first, and of the second.
    assert shapes == [(2, 4), (8, 4), (2, 1)]


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_from_its_own_layer_a_contribution_is_local(name):
    model = tiny(name)
    batch = text_of(model)
    local = local_contribution(model, batch)
    torch.testing.assert_close(global_contribution(model, batch)[0], local[0])
    later = global_contribution(model, batch, source=1)
    assert later[0].isnan().all()
    torch.testing.assert_close(later[1], local[1])


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_embeddings_can_be_taken_before_their_norm(name):
    model = tiny(name)
    batch = text_of(model, 4)
    expected = reverse_contribution(model.base_model, batch, model.base_model.embeddings.LayerNorm)
    found = global_contribution(model, batch, source="embedding_sum", chunk_size=30)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_feed_forward_layers_may_be_called_in_pieces():
    model = tiny("bert")
    batch = text_of(model)
    expected = global_contribution(model, batch)
    for layer in model.bert.encoder.layer:
        layer.chunk_size_feed_forward = 2
    torch.testing.assert_close(global_contribution(model, batch), expected)


def test_as_many_probes_as_dimensions_are_exact():
    model = tiny("bert")
    batch = text_of(model)
    exact, none = global_contribution(model, batch, return_standard_error=True)
    probed, error = global_contribution(model, batch, "probes", probes=32, return_standard_error=True)
    torch.testing.assert_close(probed, exact)
    assert none.eq(0).all()
    assert error.eq(0).all()


def test_standard_errors_are_what_other_seeds_show():
    model = tiny("bert", torch.float32)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    exact = global_contribution(model, batch)
    draws = [
        global_contribution(model, batch, "probes", 8, seed=seed, return_standard_error=True) for seed in range(60)
    ]
    estimates, errors = (torch.stack(one) for one in zip(*draws))
    spread = estimates.std(0)
    # Of 60 draws, a spread is known to about a tenth; means over all entries are to less.
    assert 0.9 < (errors.square().mean(0).sqrt() / spread).mean() < 1.1
    assert ((estimates.mean(0) - exact) / (spread / 60**0.5)).square().mean() < 2


def test_the_same_seed_gives_the_same():
    model = tiny("bert", torch.float32)
    batch = text_of(model)
    torch.manual_seed(1)
    once = global_contribution(model, batch, "probes", probes=3, seed=5)
    state = torch.get_rng_state()
    assert torch.equal(global_contribution(model, batch, "probes", probes=3, seed=5), once)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(global_contribution(model, batch, "probes", probes=3, seed=6), once)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_the_model_is_afterwards_as_before(name):
    model = tiny(name, torch.float32)
    model.set_attn_implementation("sdpa")
    model.train()
    global_contribution(model, text_of(model), "probes", probes=2)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "reverse"}, "method must be 'exact' or 'probes', got 'reverse'"),
        ({"method": "probes", "probes": 1}, "probes must be a whole number from 2 to 32, .*, got 1"),
        ({"method": "probes", "probes": 33}, "probes must be a whole number from 2 to 32, .*, got 33"),
        ({"chunk_size": 0}, "chunk_size must be .* at least 1, got 0"),
        ({"chunk_size": 1.5}, "chunk_size must be .* at least 1, got 1.5"),
        ({"source": "words"}, "source must be 'embeddings', 'embedding_sum' or the number of a layer, got 'words'"),
        ({"source": 2}, "source is layer 2, but the layers are 0 to 1"),
    ],
)
def test_what_is_not_possible_is_said(arguments, message):
    model = tiny("bert", torch.float32)
    with pytest.raises(ValueError, match=message):
        global_contribution(model, text_of(model), **arguments)


def test_the_sum_of_embeddings_is_not_known_everywhere():
    model = tiny("gpt2", torch.float32)
    with pytest.raises(ValueError, match="source='embedding_sum' is not supported for GPT2LMHeadModel"):
        global_contribution(model, text_of(model), source="embedding_sum")


def test_adapters_of_feed_forward_blocks_are_refused():
    model = tiny("bert")
    dense = first_block(body_of(model)).intermediate.dense

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = dense.weight, dense.bias

        def forward(self, states):
            return 2 * dense(states)

    first_block(body_of(model)).intermediate.dense = Adapted()
    with pytest.raises(ValueError, match="merge adapters first, by PEFT's merge_and_unload"):
        global_contribution(model, text_of(model))
