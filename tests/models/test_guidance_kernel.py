# Licensed under the Apache License, Version 2.0.
"""The guidance loss in Triton, whose kernels run in its interpreter where there is no GPU."""

import logging

import pytest
import torch
from dense_guidance import dense_attention, dense_row_loss

from hf_attn_dynamics import (
    HeadwiseBertConfig,
    HeadwiseBertForMaskedLM,
    HeadwiseLlamaConfig,
    HeadwiseLlamaForCausalLM,
    HeadwiseMarianConfig,
    HeadwiseMarianMTModel,
    HeadwiseTrainer,
    HeadwiseTrainingArguments,
)
from hf_attn_dynamics.models import guidance_loss, guidance_triton
from hf_attn_dynamics.models.guidance_kernel import kernel_guidance, use_triton
from hf_attn_dynamics.models.guidance_loss import _guidance_blocks
from hf_attn_dynamics.models.guidance_settings import LOSSES


pytest.importorskip("triton")
# The interpreter computes with NumPy.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layer:
    """Random arguments of the operator, with two groups of two heads; a row counts if it sees one of its targets.

    Args:
        losses (`tuple[str, str]`): Losses of the groups.
        by_row (`tuple[bool, bool]`): Whether a group has keys of its own for each row.
        keys (`int`): Number of keys of a row of targets; the weight of the last one is 0 if there are several.
        padding (`str`): "some" of the keys, a "whole" sentence, or "none".
        uniform (`bool`): Whether every fifth row has a uniform target as well.
    """

    def __init__(
        self, batch=2, rows=37, length=37, head_dim=16, dtype=torch.float32, softcap=0.0, sinks=False,
        padding="some", band=(-1, -1), losses=("squared", "squared"), by_row=(True, False), uniform=False, keys=1,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.query = torch.randn(batch, 4, rows, head_dim).to(dtype)
        self.key = torch.randn(batch, 4, length, head_dim).to(dtype)
        self.sinks = torch.randn(4) if sinks else None
        self.softcap, self.band, self.names = softcap, band, losses
        self.mask = torch.ones(batch, length, dtype=torch.bool)
        if padding == "some":
            self.mask[0, -3:], self.mask[1, length // 2 :] = False, False
        elif padding == "whole":
            self.mask[1] = False
        row, key = torch.arange(rows)[:, None], torch.arange(length)
        before, after = (length + rows if one < 0 else one for one in band)
        self.visible = self.mask[:, None] & (key >= row - before) & (key <= row + after)
        self.groups = []
        for of_row in by_row:
            number = rows if of_row else 1
            chosen = torch.stack([torch.randperm(length)[:keys] for _ in range(batch * number)])
            chosen = chosen.view(batch, number, keys)
            weights = torch.rand(batch, number, keys) + 0.1
            if keys > 1:
                weights[..., -1] = 0
            scale, constant = torch.rand(batch, rows) + 0.5, torch.rand(batch, rows)
            even = torch.zeros(batch, rows if uniform else 1)
            even[:, ::5] = 0.03 * uniform
            seen = (self.visible.gather(2, chosen.expand(batch, rows, keys)) & (weights != 0)).any(-1)
            coefficient = torch.rand(batch, rows) * seen
            self.groups += [chosen, weights, scale, constant, even, coefficient]

    def arguments(self, dtype=None):
        tensors = [self.query, self.key, self.sinks, *self.groups]
        if dtype is not None:
            tensors = [t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors]
        query, key, sinks, *groups = (None if t is None else t.to(DEVICE) for t in tensors)
        mask = None if self.mask.all() else self.mask.to(DEVICE)
        losses = [LOSSES.index(name) for name in self.names]
        return query, key, sinks, 0.3, self.softcap, mask, self.band, [0, 2, 4], groups, losses

    def by_the_kernel(self, needs_gradient=True):
        return kernel_guidance(*self.arguments(), needs_gradient)

    def by_blocks(self):
        """In double precision, from the same rounded vectors."""
        return _guidance_blocks(*self.arguments(torch.float64), True)


def assert_close(found, expected, tolerance):
    for name, one, other in zip(("loss", "by query", "by key", "by sinks"), found, expected, strict=True):
        assert one.shape == other.shape, name
        if one.numel():
            assert (one.double() - other).abs().max() <= tolerance * max(other.abs().max(), 0.1), name


KINDS = {
    "squared": {},
    "squared, uniform rows and sinks": {"uniform": True, "sinks": True},
    "cross-entropy": {"losses": ("cross_entropy", "cross_entropy"), "keys": 3},
    "cross-entropy, uniform rows and sinks": {"losses": ("cross_entropy",) * 2, "uniform": True, "sinks": True},
    "mass": {"losses": ("mass", "mass"), "keys": 3, "sinks": True},
    "avoid": {"losses": ("avoid", "avoid"), "keys": 3, "sinks": True},
    "different losses": {"losses": ("mass", "squared"), "by_row": (False, True), "keys": 2},
}
MASKS = {
    "bidirectional": {},
    "causal": {"band": (-1, 0)},
    "causal window": {"band": (5, 0)},
    "window": {"band": (4, 4)},
    "no padding": {"padding": "none"},
    "a sentence of padding": {"padding": "whole"},
    "capped": {"softcap": 2.0},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_blocks_in_double_precision(kind, mask):
    layer = Layer(**KINDS[kind], **MASKS[mask])
    assert layer.by_blocks()[0].gt(0).all()
    assert_close(layer.by_the_kernel(), layer.by_blocks(), 3e-6)


@pytest.mark.parametrize("head_dim", [3, 32, 40, 64, 100, 256])
def test_all_head_sizes(head_dim):
    layer = Layer(head_dim=head_dim, rows=19, length=19, band=(-1, 0))
    assert_close(layer.by_the_kernel(), layer.by_blocks(), 3e-6)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 70), (64, 64), (65, 63), (130, 33)])
def test_all_lengths(rows, length):
    layer = Layer(rows=rows, length=length, padding="none", losses=("squared", "cross_entropy"))
    assert_close(layer.by_the_kernel(), layer.by_blocks(), 3e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_sums_over_several_tiles(loss):
    """The largest score of a row, and of its targets, is in any of four tiles."""
    layer = Layer(rows=33, length=200, losses=(loss, loss), by_row=(True, False), keys=8, sinks=True)
    layer.query *= 3
    assert_close(layer.by_the_kernel(), layer.by_blocks(), 2e-5)


def test_windows_that_leave_whole_tiles_out():
    """Of 200 tokens in tiles of 64."""
    for band in ((7, 0), (70, 3), (0, 90)):
        layer = Layer(
            batch=1, rows=200, length=200, head_dim=4, padding="none", band=band, by_row=(True, True), keys=4
        )
        assert_close(layer.by_the_kernel(), layer.by_blocks(), 3e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_is_within_its_rounding(dtype, tolerance):
    layer = Layer(dtype=dtype, band=(-1, 0), losses=("squared", "mass"))
    found = layer.by_the_kernel()
    assert [one.dtype for one in found[:3]] == [torch.float32, dtype, dtype]
    assert_close(found, layer.by_blocks(), tolerance)
    # Sums are in single precision.
    assert (found[0].double() - layer.by_blocks()[0]).abs().max() < 1e-6 * found[0].abs().max()


@pytest.mark.parametrize("loss", ["mass", "cross_entropy"])
@pytest.mark.parametrize("by_row", [True, False])
def test_attention_that_underflows_has_a_finite_loss_and_gradient(loss, by_row):
    layer = Layer(losses=(loss, loss), by_row=(by_row, by_row), padding="none")
    layer.query *= 40
    assert_close(layer.by_the_kernel(), layer.by_blocks(), 1e-5)


def test_vectors_may_be_views():
    """Guided heads are some of those of the layer, and heads are often the second to last dimension."""
    layer = Layer()
    query, key = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (layer.query, layer.key))
    wide = torch.cat([query, query], 1)
    expected = layer.by_blocks()
    layer.query, layer.key = wide[:, 2:6][:, [2, 3, 0, 1]], key
    assert_close(layer.by_the_kernel(), expected, 3e-6)


def test_the_loss_alone_needs_no_gradient():
    value, *gradients = Layer(sinks=True).by_the_kernel(needs_gradient=False)
    assert [one.numel() for one in gradients] == [0, 0, 0]
    torch.testing.assert_close(value.cpu(), Layer(sinks=True).by_the_kernel()[0].cpu())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_that_of_its_definition(loss):
    """Against dense attention in double precision, one row at a time, differentiated by autograd."""
    layer = Layer(batch=1, rows=9, length=9, head_dim=5, losses=(loss, loss), band=(-1, 0), padding="none", keys=2)
    query, key = (one[0].double().requires_grad_() for one in (layer.query, layer.key))
    attention = dense_attention(query, key, 0.3, causal=True)
    expected = 0
    for group, heads in enumerate(((0, 1), (2, 3))):
        keys, weights, scale, constant, _, coefficient = (one[0] for one in layer.groups[6 * group : 6 * group + 6])
        for head in heads:
            for row in range(9):
                if not coefficient[row]:
                    continue
                target = torch.zeros(9, dtype=torch.float64)
                of_row = row if len(keys) > 1 else 0
                target[keys[of_row]] = weights[of_row].double() * scale[row]
                target[row + 1 :] = 0
                error = dense_row_loss(loss, attention[head, row], target)
                if loss == "squared":
                    # The operator is given the part that does not depend on attention.
                    error = error - target.square().sum() + constant[row]
                expected = expected + error * coefficient[row]
    value, by_query, by_key, _ = layer.by_the_kernel()
    assert value.sum().item() == pytest.approx(expected.item(), rel=1e-5)
    for found, gradient in zip((by_query, by_key), torch.autograd.grad(expected, (query, key))):
        torch.testing.assert_close(found[0].double().cpu(), gradient, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 3], [7, 5, 3, 0, 0, 0]])


def encoder(**guidance):
    heads = {"next": [0], "first": [1], "delim": [2], "period": [3]}
    guidance = {"heads": heads, "delimiter_token_ids": [3], "period_token_ids": [7], **guidance}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = HeadwiseBertConfig(**SIZES, **dropout, pad_token_id=0, guidance=guidance)
    return HeadwiseBertForMaskedLM(config), {"input_ids": IDS, "attention_mask": IDS.ne(0).long()}


def decoder():
    guidance = {"heads": {"prev": [0, 1], "first": [2]}}
    config = HeadwiseLlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, guidance=guidance)
    return HeadwiseLlamaForCausalLM(config), {"input_ids": IDS, "attention_mask": IDS.ne(0).long()}


def translator():
    config = HeadwiseMarianConfig(
        vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16, pad_token_id=0,
        decoder_start_token_id=0, forced_eos_token_id=3, eos_token_id=3, dropout=0.0,
        guidance={"encoder": {"heads": {"next": [0], "prev": [1]}}, "cross": {"heads": {"next": [3], "first": [1]}}},
    )  # fmt: skip
    return HeadwiseMarianMTModel(config), {"input_ids": IDS, "attention_mask": IDS.ne(0).long(), "labels": IDS}


MODELS = {
    "encoder": encoder,
    "encoder, other losses": lambda: encoder(loss={"next": "mass", "first": "cross_entropy", "period": "avoid"}),
    "decoder with shared keys": decoder,
    "translator": translator,
}


def losses_and_gradients(model, batch, **arguments):
    model.zero_grad()
    output = model(**batch, output_guidance_loss=True, **arguments)
    output.guidance_loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {name: loss.item() for name, loss in output.guidance_losses.items()}, gradients


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["stored", "checkpointed", "reentrant"])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_loss_and_gradients_by_either_way(name, checkpointing):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model, batch = model.to(DEVICE).train(), {key: value.to(DEVICE) for key, value in batch.items()}
    if checkpointing is not None:
        model.activation_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    losses, gradients = losses_and_gradients(model, batch, guidance_kernel="triton")
    expected_losses, expected = losses_and_gradients(model, batch, guidance_kernel="blocks")
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert gradients.keys() == expected.keys()
    scale = max(one.abs().max() for one in expected.values())
    for parameter, gradient in gradients.items():
        assert (gradient - expected[parameter]).abs().max() <= 1e-5 * scale, parameter


def test_compiled_models_have_the_same_loss():
    torch.manual_seed(0)
    model, batch = encoder()
    model, batch = model.to(DEVICE).eval(), {key: value.to(DEVICE) for key, value in batch.items()}
    expected, gradients = losses_and_gradients(model, batch, guidance_kernel="blocks")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = compiled(**batch, output_guidance_loss=True, guidance_kernel="triton").guidance_losses
    assert {name: loss.item() for name, loss in found.items()} == pytest.approx(expected, rel=1e-5)
    model.zero_grad()
    torch.stack([*found.values()]).sum().backward()
    weight = "bert.encoder.layer.0.attention.self.query.weight"
    torch.testing.assert_close(dict(model.named_parameters())[weight].grad, gradients[weight], rtol=1e-4, atol=1e-7)


def test_trainers_pass_the_kernel_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(guidance_loss, "use_triton", lambda kernel, *_: asked.append(kernel) or False)
    model, batch = encoder()
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS[:1].tolist() * 2]
    for kernel in ("auto", "triton"):
        args = HeadwiseTrainingArguments(
            str(tmp_path / kernel), guidance_kernel=kernel, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        HeadwiseTrainer(model, args, train_dataset=rows).train()
    # The first batch is read more than once: α is set by its losses.
    half = len(asked) // 2
    assert half
    assert asked == ["auto"] * half + ["triton"] * half


# ---------------------------------------------------------------------------------------------------------------------
# The choice, and what is refused
# ---------------------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_loss_is_computed_in_blocks_by_default():
    query = torch.zeros(1, 1, 1, 8)
    assert not use_triton("auto", guidance_loss._agrees, query)
    assert not use_triton("blocks", guidance_loss._agrees, query)


def test_why_triton_cannot_be_used_is_said(monkeypatch):
    query = torch.zeros(1, 1, 1, 8)
    for other, reason in (
        (query.double(), "the kernels take float32, float16 and bfloat16, not float64"),
        (torch.zeros(1, 1, 1, 300), "heads have 300 dimensions, more than 256"),
    ):
        with pytest.raises(ValueError, match=f"guidance_kernel='triton', but {reason}; set it to 'auto' or 'blocks'"):
            use_triton("triton", guidance_loss._agrees, other.to(DEVICE))
    with monkeypatch.context() as patch:
        patch.setattr(guidance_triton, "triton", None)
        with pytest.raises(ValueError, match="but Triton is not installed; set it"):
            use_triton("triton", guidance_loss._agrees, query.to(DEVICE))
        assert not use_triton("auto", guidance_loss._agrees, query.to(DEVICE))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="but the tensors are on a CPU; set it"):
        use_triton("triton", guidance_loss._agrees, query)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda *_: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda *given: [2 * one for one in kernel_guidance(*given)], "they differ by 1e+00 from the exact loss"),
    ],
    ids=["does not compile", "is wrong"],
)
def test_kernels_that_do_not_work_are_left_out_with_one_warning(wrong, reason, monkeypatch, caplog):
    device = torch.device(DEVICE)
    guidance_loss._agrees.cache_clear()
    assert all(guidance_loss._agrees(device, dtype, 8) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert not caplog.text
    guidance_loss._agrees.cache_clear()
    monkeypatch.setattr(guidance_loss, "kernel_guidance", wrong)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not guidance_loss._agrees(device, torch.float32, 8)
    assert caplog.text.count(f"do not work on {device} in torch.float32 ({reason}); the loss is computed over") == 1
    guidance_loss._agrees.cache_clear()


def test_bad_values_are_refused_before_the_pass():
    model, batch = encoder()
    with pytest.raises(ValueError, match="guidance_kernel must be one of auto, triton, blocks, got 'flash'"):
        model(**batch, output_guidance_loss=True, guidance_kernel="flash")
    with pytest.raises(ValueError, match="guidance_kernel is given to HeadwiseBertForMaskedLM, but only the guidance"):
        model(**batch, guidance_kernel="triton")
    with pytest.raises(ValueError, match="guidance_kernel must be one of auto, triton, blocks, got 'flash'"):
        HeadwiseTrainingArguments("out", guidance_kernel="flash")
    with pytest.raises(ValueError, match="kernel"):
        HeadwiseBertConfig(**SIZES, guidance={"targets": {"kernel": "keys"}, "heads": {"kernel": [0]}}).check_heads()
