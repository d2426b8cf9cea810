"""Local contributions: the closed form against reverse-mode differentiation."""

from types import SimpleNamespace

import pytest
import torch
from attribution import body_of, reverse_contribution, text_of, tiny
from stock_models import build_stock, stock_inputs
from tiny_models import batch_for, padded_batch, tiny_model, vivid

from hf_attn_dynamics import attention_maps, local_contribution, prune_heads
from hf_attn_dynamics.analysis.attribution import head_jacobians


# Rotary positions of stock models, the softmax of their eager attention and T5's norm are in single precision.
DOUBLE, SINGLE_INSIDE = 1e-9, 2e-6


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("bert", DOUBLE),
        ("electra", DOUBLE),
        ("roberta", DOUBLE),
        ("distilbert", DOUBLE),
        ("gpt2", DOUBLE),
        ("marian", DOUBLE),
        ("t5", SINGLE_INSIDE),
        ("llama", SINGLE_INSIDE),
        ("gpt-neox", SINGLE_INSIDE),
        ("mistral", SINGLE_INSIDE),
        ("modernbert", SINGLE_INSIDE),
        ("gpt-oss", SINGLE_INSIDE),
        ("opt", SINGLE_INSIDE),
        ("smollm3", SINGLE_INSIDE),
        ("qwen3", SINGLE_INSIDE),
        ("gemma2", SINGLE_INSIDE),
        ("gemma3", SINGLE_INSIDE),
        ("phi", SINGLE_INSIDE),
    ],
)
def test_the_closed_form_is_the_jacobian(name, tolerance):
    model = tiny(name)
    batch = text_of(model)
    expected = reverse_contribution(body_of(model), batch)
    torch.testing.assert_close(local_contribution(model, batch), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("bert", DOUBLE),
        ("gpt2", DOUBLE),
        ("marian", DOUBLE),
        ("t5", SINGLE_INSIDE),
        ("llama", SINGLE_INSIDE),
        ("opt", SINGLE_INSIDE),
        ("qwen3", SINGLE_INSIDE),
        ("gemma2", SINGLE_INSIDE),
    ],
)
def test_the_spectral_norm_is_that_of_the_whole_jacobian(name, tolerance):
    model = tiny(name)
    batch = text_of(model)
    expected = reverse_contribution(body_of(model), batch, norm=2)
    found = local_contribution(model, batch, norm="spectral")
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert (found - local_contribution(model, batch)).abs().max() > 0.01


def test_the_spectral_norm_of_a_model_with_gates_and_without_some_heads_is_that_of_the_heads_that_are_left():
    model = vivid(tiny_model("bert", guidance=None, gates={}, attn_implementation="eager")).double()
    prune_heads(model, {0: [1, 3]})
    batch = batch_for("bert", [[5, 6, 7, 8], [9, 5]])
    found = local_contribution(model, batch, norm="spectral")
    assert found[0, :, [1, 3]].isnan().all()
    expected = reverse_contribution(model.base_model, batch, norm=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=DOUBLE, equal_nan=True)


def test_a_norm_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="norm must be one of 'frobenius', 'spectral', got 'nuclear'"):
        local_contribution(tiny("bert"), {}, norm="nuclear")


def test_single_precision_is_exact_to_1e_5():
    model = tiny("bert")
    batch = text_of(model)
    expected = reverse_contribution(body_of(model), batch)
    found = local_contribution(model.float(), batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_bfloat16_is_close():
    model = tiny("bert", torch.float32)
    batch = text_of(model)
    expected = local_contribution(model, batch)
    found = local_contribution(model.bfloat16(), batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_sharp_attention_loses_no_digits():
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.query.weight.data *= 20
    batch = text_of(model)
    expected = reverse_contribution(body_of(model), batch)
    assert attention_maps(model, batch)["encoder"].amax(-1).median() > 0.99
    torch.testing.assert_close(local_contribution(model.float(), batch).double(), expected, rtol=0, atol=1e-5)


def test_rows_sum_to_one_over_tokens_and_padding_is_zero():
    model = tiny("roberta")
    batch = padded_batch([[0, 5, 6, 7, 2], [0, 9, 2], [8]])
    real = batch["attention_mask"].bool()
    for maps in (local_contribution(model, batch), attention_maps(model, batch)["encoder"]):
        sums = real[:, None].expand(2, -1, 4, -1).double()
        torch.testing.assert_close(maps.sum(-1), sums)
        assert maps.masked_select(~real[:, None, None]).eq(0).all()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_on_either_side_changes_nothing(name):
    model = tiny(name)
    ids = torch.tensor([[5, 6, 7, 8]])
    alone = local_contribution(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    longer = torch.tensor([[9, 8, 7, 6, 5, 4, 9], [1, 1, 5, 6, 7, 8, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 0]])
    padded = {"input_ids": longer, "attention_mask": mask, "position_ids": positions}
    together = local_contribution(model, padded)[:, 1:, :, 2:6, 2:6]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6 if name == "llama" else 1e-12)


def test_few_heads_at_a_time_give_the_same(monkeypatch):
    model = tiny("modernbert"), tiny("bert")
    whole = [local_contribution(one, text_of(one)) for one in model]
    monkeypatch.setattr(head_jacobians, "MAX_BLOCK", 1)
    torch.testing.assert_close([local_contribution(one, text_of(one)) for one in model], whole)


def test_without_queries_every_token_counts_the_same():
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.self.query.weight.data.zero_()
        layer.attention.self.query.bias.data.zero_()
        layer.attention.self.key.weight.data.zero_()
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    torch.testing.assert_close(local_contribution(model, batch), torch.full((2, 1, 4, 4, 4), 0.25).double())


def test_a_causal_row_depends_on_what_came_before():
    model = tiny("gpt2")
    maps = local_contribution(model, {"input_ids": torch.tensor([[5, 6, 7, 8]])})
    assert maps.triu(1).eq(0).all()
    assert maps.tril().sum(-1).allclose(torch.ones(1).double())


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_gates_cancel_and_removed_heads_are_nan(kind):
    plain = vivid(tiny_model(kind, guidance=None)).double()
    batch = batch_for(kind)
    expected = local_contribution(plain, batch)
    gated = vivid(tiny_model(kind, guidance=None, gates={"evaluation": "fractional"})).double()
    with torch.no_grad():
        for module in gated.modules():
            if hasattr(module, "log_alpha"):
                module.log_alpha.copy_(torch.tensor([0.3, -0.4, 1.0, 0.1]))
    # The first layer: later ones have other inputs.
    torch.testing.assert_close(local_contribution(gated, batch)[0], expected[0])
    pruned = local_contribution(prune_heads(plain, {0: [1, 3], 1: [0, 1, 2, 3]}), batch)
    assert pruned[1].isnan().all()
    assert pruned[0, :, [1, 3]].isnan().all()
    torch.testing.assert_close(pruned[0, :, [0, 2]], expected[0, :, [0, 2]])


def test_a_shared_module_counts_once_for_each_layer():
    model = tiny("albert")
    batch = text_of(model)
    maps = local_contribution(model, batch)
    assert len(maps) == len(attention_maps(model, batch)["encoder"]) == 8
    assert not torch.equal(maps[0], maps[4])


def test_images_have_contributions():
    model = build_stock("vit")
    maps = local_contribution(model, stock_inputs(model))
    torch.testing.assert_close(maps.sum(-1), torch.ones(3, 2, 4, 5))


def test_several_choices_are_refused():
    with pytest.raises(ValueError, match=r"got \(2, 3, 5\); flatten multiple choices"):
        local_contribution(tiny("bert", torch.float32), {"input_ids": torch.full((2, 3, 5), 5)})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_afterwards_as_before(implementation):
    model = tiny("bert", torch.float32)
    model.set_attn_implementation(implementation)
    model.train()
    model.bert.encoder.layer[0].eval()
    batch = text_of(model)
    local_contribution(model, {**batch, "labels": batch["input_ids"]})
    with pytest.raises(ValueError, match="positions for 64"):
        local_contribution(model, {"input_ids": torch.full((1, 65), 5)})
    assert model.config._attn_implementation == implementation
    assert model.training
    assert not model.bert.encoder.layer[0].training
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2-cross", "GPT2LMHeadModel has cross-attention"),
        ("deberta-v2", "DebertaV2Model computes attention by itself"),
    ],
)
def test_what_has_no_closed_form_is_refused_by_name(name, message):
    model = build_stock(name)
    with pytest.raises(ValueError, match=message):
        local_contribution(model, stock_inputs(model))


def test_queries_that_whisper_scales_are_read():
    model = build_stock("whisper", attn_implementation="eager").double()
    features = stock_inputs(model)["input_features"].double()
    found = local_contribution(model, {"input_features": features})
    batch = {"input_features": features, "attention_mask": torch.ones(len(features), found.shape[-1])}
    expected = reverse_contribution(model.get_encoder(), batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=SINGLE_INSIDE)


class Adapter(torch.nn.Module):
    """A projection with a bend: neither linear nor of a known class."""

    def __init__(self, projection):
        super().__init__()
        self.projection = projection

    def forward(self, states):
        return self.projection(states) + torch.sin(states)


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_adapters_are_differentiated(norm):
    model = tiny("bert")
    for name in ("query", "key", "value"):
        attention = model.bert.encoder.layer[0].attention.self
        setattr(attention, name, Adapter(getattr(attention, name)))
        batch = text_of(model)
        expected = reverse_contribution(body_of(model), batch, norm="fro" if norm == "frobenius" else 2)
        torch.testing.assert_close(local_contribution(model, batch, norm), expected, rtol=0, atol=DOUBLE)


def test_projections_of_several_positions_are_refused_by_name():
    class Shifted(Adapter):
        def forward(self, states):
            return self.projection(states + 0.5 * states.roll(1, 1))

    model = tiny("bert")
    attention = model.bert.encoder.layer[1].attention.self
    attention.key = Shifted(attention.key)
    with pytest.raises(ValueError, match="the key of BertSelfAttention depends on the inputs of several positions"):
        local_contribution(model, text_of(model))


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_differentiated_layers_neither_change_the_model_nor_depend_on_the_batch(name):
    model = tiny(name)
    batch = text_of(model)
    together = local_contribution(model, batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not together.requires_grad
    for number, row in enumerate(batch["attention_mask"]):
        size = int(row.sum())
        alone = local_contribution(model, {"input_ids": batch["input_ids"][number : number + 1, :size]})
        own = together[:, number, :, :size, :size]
        torch.testing.assert_close(own, alone[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize(("name", "tolerance"), [("marian", DOUBLE), ("bart", DOUBLE), ("t5", SINGLE_INSIDE)])
def test_every_site_of_an_encoder_decoder_has_contributions(name, tolerance, kind, norm):
    model = tiny(name)
    batch = text_of(model)
    batch |= {f"decoder_{part}": value[:, 1:].clone() for part, value in batch.items()}
    expected = reverse_contribution(model, batch, norm="fro" if norm == "frobenius" else 2, kind=kind)
    found = local_contribution(model, batch, norm, kind)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert found.shape[-2:] == {"encoder": (6, 6), "decoder": (5, 5), "cross": (5, 6)}[kind]


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
def test_cross_attention_whose_projections_are_adapters_is_differentiated(norm):
    model = tiny("marian")
    batch = text_of(model)
    batch |= {f"decoder_{part}": value[:, 1:].clone() for part, value in batch.items()}
    attention = model.model.decoder.layers[1].encoder_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, Adapter(getattr(attention, name)))
    expected = reverse_contribution(model, batch, norm="fro" if norm == "frobenius" else 2, kind="cross")
    torch.testing.assert_close(local_contribution(model, batch, norm, "cross"), expected, rtol=0, atol=DOUBLE)


def test_labels_are_what_a_decoder_reads_and_other_kinds_are_refused():
    model = tiny("marian")
    batch = text_of(model)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    given = {**batch, "decoder_input_ids": shifted, "decoder_attention_mask": batch["attention_mask"]}
    found = local_contribution(model, {**batch, "labels": labels}, kind="cross")
    torch.testing.assert_close(found, local_contribution(model, given, kind="cross"), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="kind must be one of 'encoder', 'decoder', 'cross' for MarianMTModel, got"):
        local_contribution(model, batch, kind="crossed")
    with pytest.raises(ValueError, match="kind must be one of 'encoder' for BertForMaskedLM, got 'cross'"):
        local_contribution(tiny("bert"), text_of(tiny("bert")), kind="cross")


class Tuner(torch.nn.Module):
    """What PEFT has between its wrapper and the model: it takes and hands on everything."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class Wrapper(torch.nn.Module):
    def __init__(self, model, **settings):
        super().__init__()
        self.base_model, self.config = Tuner(model), model.config
        self.active_peft_config = SimpleNamespace(**settings)

    def get_base_model(self):
        return self.base_model.model


@pytest.mark.parametrize("name", ["bert", "marian"])
def test_a_model_with_adapters_is_read_within_its_wrapper(name):
    model = tiny(name, torch.float32)
    batch = text_of(model)
    assert torch.equal(local_contribution(Wrapper(model), batch), local_contribution(model, batch))


def test_trained_prompts_are_refused():
    with pytest.raises(ValueError, match=r"Wrapper prepends trained vectors to the text, .*model.get_base_model\(\)"):
        local_contribution(Wrapper(tiny("bert"), is_prompt_learning=True), {})


def test_hard_coded_attention_is_refused():
    settings = {"guidance": None, "hard_coded": {"encoder": {}}}
    model = tiny_model("marian", **settings)
    with pytest.raises(ValueError, match="encoder layer 0 of HeadwiseMarianMTModel has hard-coded weights"):
        local_contribution(model, batch_for("marian"))
