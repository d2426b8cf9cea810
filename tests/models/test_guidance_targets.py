"""Guidance to targets that a batch brings, and losses other than the squared error."""

import math

import pytest
import torch
from dense_guidance import dense_attention, dense_guidance_loss, dense_hits, dense_target_loss
from gradients import (
    assert_checkpointing_keeps_gradients,
    assert_compilation_keeps_loss_and_gradients,
    gradients,
)
from tiny_models import no_dropout, padded_batch, ragged_sentences, tiny_model, vivid

import hf_attn_dynamics as had
from hf_attn_dynamics.models import guidance_loss
from hf_attn_dynamics.models.batch_targets import rows_of_target
from hf_attn_dynamics.models.guidance_loss import guide_heads
from hf_attn_dynamics.models.guidance_settings import COLUMN_PREFIX, LOSSES, RESERVED_TARGETS, GuidanceSettings
from hf_attn_dynamics.models.guidance_targets import GuidanceTargets, Tokens
from hf_attn_dynamics.models.headwise_call import OWN_ARGUMENTS


FORMS = {"one": "keys", "all": "weights", "some": "sparse"}
LAYOUT = {"one": [1], "all": [5, 2], "some": [7]}
LENGTHS = [6, 11, 1, 3]
ROW_LENGTHS = [4, 2, 7, 5]  # of the queries, in cross-attention


def matrices(rows, keys, seed):
    """Target matrices of one sentence, by name; rows without a target are 0."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.zeros(rows, keys, dtype=torch.float64)
    one[torch.arange(rows), torch.randint(keys, (rows,), generator=generator)] = 1
    one[torch.rand(rows, generator=generator) < 0.3] = 0
    one[0, 0] = max(one[0, 0], float(not one[0].any()))
    whole = torch.rand(keys, generator=generator, dtype=torch.float64)
    whole = whole * (torch.rand(keys, generator=generator) < 0.5)
    if seed == 1:
        whole[:] = 0  # a sentence without a target
    some = torch.rand(rows, keys, generator=generator, dtype=torch.float64)
    some = some * (torch.rand(rows, keys, generator=generator) < 0.4)
    some[-1] = 0
    some[0, 0] = 0.5
    normal = lambda matrix: matrix / matrix.sum(-1, keepdim=True).clamp(min=1e-9)  # noqa: E731
    return {"one": one, "all": normal(whole).expand(rows, keys), "some": normal(some)}


def columns_of(targets, rows, keys, left=False):
    """The columns of a padded batch with these matrices."""
    batch = len(targets)
    one = torch.full((batch, rows), -100)
    whole = torch.zeros(batch, keys)
    some, weights = torch.full((batch, rows, keys), -100), torch.zeros(batch, rows, keys)
    for sentence, of_sentence in enumerate(targets):
        n, m = of_sentence["one"].shape
        at, to = (rows - n, keys - m) if left else (0, 0)
        for row in range(n):
            for key in range(m):
                if of_sentence["one"][row, key]:
                    one[sentence, at + row] = to + key
                if of_sentence["some"][row, key]:
                    # Unused slots are at any place, and other weights have the same proportions.
                    some[sentence, at + row, key] = to + key
                    weights[sentence, at + row, key] = 3 * of_sentence["some"][row, key]
        whole[sentence, to : to + m] = 2 * of_sentence["all"][0]
    return {
        "guidance_one": one,
        "guidance_all": whole,
        "guidance_some": some,
        "guidance_some_weights": weights,
    }


def padded_tokens(lengths, left=False, extra=0):
    length = max(lengths) + extra
    places = torch.arange(length)
    real = torch.stack([places >= length - n if left else places < n for n in lengths])
    return Tokens(None, real.long(), real.shape, torch.device("cpu"))


def settings_of(loss="squared", reduction="row_mean", **changes):
    return GuidanceSettings(targets=FORMS, loss=loss, reduction=reduction, **changes)


class Batch:
    """Vectors and targets of a batch; a sentence has the same ones wherever it stands."""

    def __init__(self, cross=False, left=False, extra=0, key_heads=8, chosen=slice(None)):
        self.lengths = LENGTHS[chosen]
        self.row_lengths = ROW_LENGTHS[chosen] if cross else self.lengths
        self.keys = padded_tokens(self.lengths, left, extra)
        self.queries = padded_tokens(self.row_lengths, left, extra) if cross else None
        rows = self.queries or self.keys
        numbers = list(range(len(LENGTHS)))[chosen]
        self.query = self._vectors(rows, self.row_lengths, 8, numbers, 10)
        self.key = self._vectors(self.keys, self.lengths, key_heads, numbers, 20)
        self.targets = [matrices(n, m, seed) for n, m, seed in zip(self.row_lengths, self.lengths, numbers)]
        self.columns = columns_of(self.targets, rows.shape[1], self.keys.shape[1], left)

    @staticmethod
    def _vectors(tokens, lengths, heads, numbers, seed):
        found = torch.randn(len(lengths), heads, tokens.shape[1], 5, dtype=torch.float64) * 9
        for row, (length, number) in enumerate(zip(lengths, numbers)):
            generator = torch.Generator().manual_seed(seed + number)
            found[row][:, tokens.real()[row]] = 3 * torch.randn(
                heads, length, 5, generator=generator, dtype=torch.float64
            )
        return found.requires_grad_()

    def losses(self, settings, causal=False, window=None, softcap=0.0, sinks=None, counts=None, layout=LAYOUT):
        self.guidance = GuidanceTargets(
            settings, {0: layout}, self.keys, self.queries, causal=causal, columns=self.columns, counts=counts
        )
        layer = self.guidance.layer(0, self.query.dtype, self.query.device, window)
        losses = guide_heads(self.query, self.key, 0.7, layer, softcap=softcap, sinks=sinks)[2]
        return dict(zip(layer.names, losses))

    def loss(self, settings, **call):
        return sum(self.losses(settings, **call).values())

    def slow_loss(self, settings, causal=False, window=None, softcap=0.0, sinks=None, weights=None):
        data = []
        for row, (n, m) in enumerate(zip(self.row_lengths, self.lengths)):
            vectors = self.query[row, :, :n], self.key[row, :, :m]
            attention = dense_attention(*vectors, 0.7, causal, window, softcap, sinks)[None]
            data.append((attention, list(range(n)), self.targets[row]))
        losses = {name: settings.loss_of(name) for name in FORMS}
        return dense_target_loss(data, {0: LAYOUT}, losses, settings.reduction, causal, window, weights)


MIXED = {"one": "cross_entropy", "all": "avoid", "some": "mass"}


@pytest.mark.parametrize("loss", [*LOSSES, MIXED], ids=[*LOSSES, "mixed"])
@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("key_heads", "softcap", "has_sinks"), [(8, 0.0, False), (2, 1.5, False), (4, 0.0, True)])
def test_loss_and_gradients_equal_the_dense_definition(
    loss, reduction, window, causal, key_heads, softcap, has_sinks, monkeypatch
):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", 200)
    batch, settings = Batch(key_heads=key_heads), settings_of(loss, reduction)
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) if has_sinks else None
    leaves = [batch.query, batch.key, *([sinks.requires_grad_()] if has_sinks else [])]
    call = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
    weights = {"one": 0.5, "all": 2.0, "some": 1.0}
    found = sum(weights[name] * one for name, one in batch.losses(settings, **call).items())
    expected = batch.slow_loss(settings, **call, weights=weights)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert found.abs() > 1e-3
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("elements", [2**20, 8 * 11 * 3, 8 * 11 * 7 * 2], ids=["whole", "rows of 3", "2 sentences"])
def test_cross_attention_has_the_dense_loss_and_gradient(loss, elements, monkeypatch):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", elements)
    batch, settings = Batch(cross=True), settings_of(loss)
    found, expected = batch.loss(settings), batch.slow_loss(settings)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    leaves = batch.query, batch.key
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_agree_with_finite_differences(loss):
    batch = Batch(chosen=slice(2, 4))

    def value(query, key, sinks):
        batch.query, batch.key = query, key
        return batch.loss(settings_of(loss), causal=True, softcap=2.0, sinks=sinks)

    sinks = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (batch.query, batch.key, sinks))


@pytest.mark.parametrize("loss", LOSSES[1:])
@pytest.mark.parametrize("edge_rows", ["uniform", "zero"])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_other_losses_of_patterns_have_the_dense_value_and_gradient(
    loss, edge_rows, window, causal, has_sinks, monkeypatch
):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", 200)
    sentences = [[90, 3, 7, 5, 7, 91], [90, 7, 91], [14]]
    layout = {
        "prev": [1],
        "self": [5, 2],
        "first": [7],
        "delim": [4],
        "period": [6],
        **({} if causal else {"next": [0]}),
    }
    token_ids = {"delimiter_token_ids": [90, 91], "period_token_ids": [7]}
    settings = GuidanceSettings(loss=loss, edge_rows=edge_rows, **token_ids)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 8, 6, 5, generator=generator, dtype=torch.float64).mul_(3)
    sinks = torch.randn(8, generator=generator, dtype=torch.float64) if has_sinks else None
    leaves = [leaf.requires_grad_() for leaf in (query, key, *([sinks] if has_sinks else []))]
    ids = torch.tensor([sentence + [1] * (6 - len(sentence)) for sentence in sentences])
    tokens = Tokens(ids, (ids != 1).long(), ids.shape, ids.device)
    targets = GuidanceTargets(settings, {0: layout}, tokens, causal=causal)
    found = guide_heads(query, key, 0.7, targets.layer(0, query.dtype, query.device, window), sinks=sinks)[2].sum()
    maps = [
        (row, dense_attention(q[:, : len(row)], k[:, : len(row)], 0.7, causal, window, 0.0, sinks)[None])
        for row, q, k in zip(sentences, query, key)
    ]
    kinds = {"delimiters": [90, 91], "periods": [7], "losses": dict.fromkeys(layout, loss)}
    expected = dense_guidance_loss(maps, {0: layout}, "row_mean", edge_rows, causal, window=window, **kinds)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), rtol=1e-7, atol=1e-10
    )


def test_each_pattern_and_target_of_a_layer_has_its_own_loss():
    batch = Batch()
    apart = [batch.loss(settings_of(MIXED[name]), layout={name: LAYOUT[name]}) for name in FORMS]
    torch.testing.assert_close(batch.loss(settings_of(MIXED)), sum(apart), rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("left", "extra"), [(False, 5), (True, 0), (True, 3)])
@pytest.mark.parametrize("cross", [True, False])
def test_padding_changes_neither_loss_nor_gradient(loss, left, extra, cross):
    plain, more = Batch(cross), Batch(cross, left, extra)
    losses = [batch.loss(settings_of(loss)) for batch in (plain, more)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)
    for value in losses:
        value.backward()
    for name in ("query", "key"):
        grads = []
        for batch in (plain, more):
            real = (batch.keys if name == "key" or not cross else batch.queries).real()
            grads.append(getattr(batch, name).grad.transpose(1, 2)[real])
            assert (getattr(batch, name).grad.transpose(1, 2)[~real] == 0).all()
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
def test_parts_of_a_batch_with_the_counts_of_the_whole_add_up(reduction):
    settings = settings_of(reduction=reduction)
    whole = Batch()
    expected = whole.loss(settings)
    counts = whole.guidance.row_counts()
    assert {name: int(count) for name, count in counts.items()} == {
        f"guidance_{name}": sum(int((one[name].sum(-1) > 0).sum()) for one in whole.targets) for name in FORMS
    }
    found = 0
    for chosen in (slice(0, 1), slice(1, 4)):
        part = Batch(chosen=chosen)
        fraction = len(part.lengths) / 4
        found = found + fraction * part.loss(settings, counts={**counts, "fraction": fraction})
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_uniform_attention_has_losses_that_can_be_worked_out_by_hand():
    n = 8
    query = torch.zeros(1, 1, n, 4)
    tokens = Tokens(None, None, (1, n), query.device)
    members = torch.zeros(1, n)
    members[0, :2] = 1
    expected = {"squared": 1 / 2 - 1 / n, "cross_entropy": math.log(n), "mass": math.log(n / 2), "avoid": 2 / n}
    for loss, value in expected.items():
        settings = GuidanceSettings(targets={"why": "weights"}, loss=loss)
        targets = GuidanceTargets(settings, {0: {"why": [0]}}, tokens, columns={"guidance_why": members})
        found = guide_heads(query, query, 1.0, targets.layer(0, query.dtype, query.device))[2].sum()
        assert found.item() == pytest.approx(value), loss


@pytest.mark.parametrize("loss", ["cross_entropy", "mass"])
def test_logarithms_of_attention_that_underflows_are_exact(loss):
    # Scores differ by thousands: in single precision the softmax of the target is 0.
    batch, settings = Batch(), settings_of(loss)
    with torch.no_grad():
        batch.query *= 100
    expected = batch.loss(settings)
    exact = torch.autograd.grad(expected, batch.query)[0]
    assert expected > 100
    batch.query = batch.query.detach().float().requires_grad_()
    batch.key = batch.key.detach().float()
    found = batch.loss(settings)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, batch.query)[0].double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_low_precision_inputs_give_the_double_loss_within_their_rounding(loss, dtype, tolerance):
    batch, settings = Batch(), settings_of(loss)
    expected = batch.loss(settings)
    batch.query, batch.key = (one.detach().to(dtype).requires_grad_() for one in (batch.query, batch.key))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = batch.loss(settings)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)
    found.backward()
    assert batch.query.grad.dtype == dtype
    assert batch.query.grad.isfinite().all()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("elements", [2**20, 8 * 11 * 4 * 3], ids=["whole", "rows of 3"])
def test_hits_are_the_rows_whose_strongest_key_is_a_target(window, causal, key_heads, elements, monkeypatch):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", elements)
    for changes in ({}, {"left": True, "extra": 2}):
        batch = Batch(key_heads=key_heads, **changes)
        batch.loss(settings_of(), causal=causal, window=window)
        layer = batch.guidance.layer(0, batch.query.dtype, batch.query.device, window)
        found = guidance_loss.guided_hits(batch.query, batch.key, 0.7, layer)
        plain = Batch(key_heads=key_heads)
        for row, n in enumerate(LENGTHS):
            attention = dense_attention(plain.query[row, :, :n], plain.key[row, :, :n], 0.7, causal, window)
            for number, (name, heads) in enumerate(LAYOUT.items()):
                expected = dense_hits(attention, range(n), plain.targets[row][name], heads, causal, window)
                assert found[row, number].tolist() == expected
        assert found[..., 0].sum() > 0


def test_hits_are_counted_in_single_precision_under_autocast():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 8, 64, 5, generator=generator)
    columns = {"guidance_one": (query[:, 1] @ key[:, 1].transpose(1, 2)).argmax(-1)}
    tokens = Tokens(None, None, (4, 64), query.device)
    settings = GuidanceSettings(targets={"one": "keys"})
    layer = GuidanceTargets(settings, {0: {"one": [1]}}, tokens, columns=columns).layer(0, query.dtype, query.device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hits = guidance_loss.guided_hits(query, key, 1.0, layer)
    assert hits[:, 0].tolist() == [[64, 64]] * 4


def rows_of(form, columns, shape=(2, 3, 4)):
    return rows_of_target("why", form, columns, shape, torch.device("cpu"))


def test_weights_of_a_key_that_occurs_twice_are_summed():
    keys = torch.tensor([[[2, 1, 2, -100]]])
    columns = {"guidance_why": keys, "guidance_why_weights": torch.tensor([[[0.0, 1.0, 3.0, 9.0]]])}
    rows = rows_of("sparse", columns, (1, 1, 4))
    dense = torch.zeros(4, dtype=torch.float64).scatter_add_(0, rows.keys[0, 0], rows.weights[0, 0])
    assert dense.tolist() == [0, 0.25, 0.75, 0]
    columns["guidance_why_weights"] = torch.tensor([[[1.0, 2.0, 1.0, 9.0]]])
    rows = rows_of("sparse", columns, (1, 1, 4))
    assert sorted(rows.weights[0, 0].tolist()) == [0, 0, 0.5, 0.5]
    assert rows.weights.count_nonzero() == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_a_part_of_a_batch_without_slots_for_keys_has_no_loss(loss):
    settings = GuidanceSettings(targets={"why": "sparse"}, loss=loss)
    columns = {"guidance_why": torch.zeros(2, 3, 0, dtype=torch.long), "guidance_why_weights": torch.zeros(2, 3, 0)}
    tokens = Tokens(None, None, (2, 3), torch.device("cpu"))
    counts = {"guidance_why": 5, "fraction": 0.5}
    targets = GuidanceTargets(settings, {0: {"why": [0]}}, tokens, columns=columns, counts=counts)
    query = torch.randn(2, 1, 3, 4, requires_grad=True)
    found = guide_heads(query, query, 1.0, targets.layer(0, query.dtype, query.device))[2].sum()
    assert found == 0
    assert (torch.autograd.grad(found, query)[0] == 0).all()


def test_keys_without_a_column_of_weights_have_equal_weights():
    rows = rows_of("sparse", {"guidance_why": torch.tensor([[[2, 1, -100]]])}, (1, 1, 4))
    dense = torch.zeros(4, dtype=torch.float64).scatter_add_(0, rows.keys[0, 0], rows.weights[0, 0])
    assert dense.tolist() == [0, 0.5, 0.5, 0]


INTEGERS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("form", "columns", "message"),
    [
        ("keys", {}, r"target 'why' needs the column guidance_why of shape \(batch, rows\)"),
        ("weights", {}, r"guidance_why of shape \(batch, keys\)"),
        ("sparse", {}, r"guidance_why of shape \(batch, rows, k\)"),
        ("keys", {"guidance_why": INTEGERS[:, :2]}, r"\(batch, rows\) = \(2, 3\), got \(2, 2\)"),
        ("keys", {"guidance_why": INTEGERS[:1]}, r"\(batch, rows\) = \(2, 3\), got \(1, 3\)"),
        ("keys", {"guidance_why": INTEGERS[..., None]}, r"\(batch, rows\) = \(2, 3\), got \(2, 3, 1\)"),
        ("weights", {"guidance_why": torch.ones(2, 3)}, r"\(batch, keys\) = \(2, 4\), got \(2, 3\)"),
        ("sparse", {"guidance_why": INTEGERS}, r"\(batch, rows, k\) = \(2, 3, k\), got \(2, 3\)"),
        ("sparse", {"guidance_why": INTEGERS[:1, ..., None]}, r"\(batch, rows, k\) = \(2, 3, k\), got \(1, 3, 1\)"),
        ("keys", {"guidance_why": INTEGERS.float()}, r"indices of keys as integers, got torch.float32"),
        ("keys", {"guidance_why": INTEGERS + 4}, r"key 4 \(sentence 0, row 0\), but the sentence has the keys 0 to 3"),
        ("keys", {"guidance_why": INTEGERS - 1}, r"names key -1 .* rows without a target are -100"),
        ("weights", {"guidance_why": torch.ones(2, 4) - 2}, r"weights of at least 0, got -1.0"),
        ("weights", {"guidance_why": torch.full((2, 4), torch.nan)}, r"weights of at least 0, got nan"),
        (
            "sparse",
            {"guidance_why": INTEGERS[..., None], "guidance_why_weights": INTEGERS},
            r"guidance_why_weights must have the shape \(2, 3, 1\) of guidance_why, got \(2, 3\)",
        ),
        (
            "sparse",
            {"guidance_why": INTEGERS[..., None], "guidance_why_weights": torch.full((2, 3, 1), -0.5)},
            r"guidance_why_weights must contain weights of at least 0, got -0.5",
        ),
    ],
)
def test_invalid_columns_are_named(form, columns, message):
    with pytest.raises(ValueError, match=message):
        rows_of(form, columns)


@pytest.mark.parametrize(
    ("form", "column"),
    [("keys", [[0, 2, 0]]), ("weights", [[0.0, 1.0, 1.0]]), ("sparse", [[[0, -100], [0, 2], [0, 1]]])],
)
def test_targets_on_padding_are_refused(form, column):
    settings = GuidanceSettings(targets={"why": form})
    tokens = Tokens(None, torch.tensor([[1, 1, 0]]), (1, 3), torch.device("cpu"))
    with pytest.raises(ValueError, match="guidance_why names key 2 in sentence 0 of the batch, which is padding"):
        GuidanceTargets(settings, {0: {"why": [0]}}, tokens, columns={"guidance_why": torch.tensor(column)})


def test_rows_on_padding_do_not_count():
    batch, settings = Batch(), GuidanceSettings(targets={"one": "keys"})
    layout = {"one": [1]}
    expected = batch.loss(settings, layout=layout)
    batch.columns["guidance_one"][2, 1:] = 0
    assert torch.equal(batch.loss(settings, layout=layout), expected)


@pytest.mark.parametrize(("form", "column"), [("keys", [[-100, -100, 0]]), ("weights", [[0.0, 0.0, 0.0]])])
def test_a_batch_without_any_target_is_refused_unless_it_is_a_part_of_a_larger_one(form, column):
    settings = GuidanceSettings(targets={"why": form})
    tokens = Tokens(None, torch.tensor([[1, 1, 0]]), (1, 3), torch.device("cpu"))
    arguments = {"columns": {"guidance_why": torch.tensor(column)}}
    with pytest.raises(ValueError, match="guidance_why has no target for any row that counts: all are -100"):
        GuidanceTargets(settings, {0: {"why": [0]}}, tokens, **arguments)
    counts = {"guidance_why": torch.tensor(7), "fraction": torch.tensor(0.5)}
    targets = GuidanceTargets(settings, {0: {"why": [0]}}, tokens, **arguments, counts=counts)
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    loss = guide_heads(query, query, 1.0, targets.layer(0, query.dtype, query.device))[2].sum()
    loss.backward()
    assert loss == 0
    assert (query.grad == 0).all()


# ---- Models ----

SITES = {
    "encoder": {"heads": {"source": [0], "prev": [1]}, "targets": {"source": "keys"}, "loss": "cross_entropy"},
    "decoder": {"heads": {"target": [1]}, "targets": {"target": "sparse"}, "loss": {"target": "mass"}},
    "cross": {
        "heads": {0: {"aligned": [1]}, 1: {"aligned": [0], "why": [1]}},
        "targets": {"aligned": "keys", "why": "weights"},
    },
}
PAIRS = list(zip(ragged_sentences(4, seed=1), ragged_sentences(4, seed=2)[::-1]))


def translator(guidance=SITES, **changes):
    return vivid(tiny_model("marian", guidance=guidance, **changes)).double()


def translation_batch(chosen=slice(None)):
    """Pairs with targets, padded as a collator would."""
    sources, targets = zip(*PAIRS[chosen])
    batch, padded = padded_batch(sources), padded_batch(targets)
    batch["labels"] = padded["input_ids"].where(padded["attention_mask"].bool(), -100)
    shape = (len(sources), batch["labels"].shape[1])
    source = torch.full(batch["input_ids"].shape, -100)
    aligned, own = torch.full(shape, -100), torch.full((*shape, 2), -100)
    why = torch.zeros(source.shape)
    for row, (number, n, m) in enumerate(zip(range(4)[chosen], map(len, sources), map(len, targets))):
        generator = torch.Generator().manual_seed(number)
        source[row, :n] = torch.randint(n, (n,), generator=generator)
        aligned[row, : m - 1] = torch.randint(n, (m - 1,), generator=generator)  # the end has no partner
        own[row, :m] = torch.randint(m, (m, 2), generator=generator)
        why[row, : n // 2] = 1
        if m > 2:
            batch["labels"][row, 1] = -100  # a row that does not count
    batch |= {"guidance_source": source, "guidance_aligned": aligned, "guidance_why": why}
    return {**batch, "guidance_target": own, "guidance_target_weights": torch.ones(own.shape)}


def dense_loss_of_sites(model, reduction="row_mean", weights=None):
    maps = {kind: [] for kind in SITES}
    model.set_attn_implementation("eager")
    for number in range(4):
        alone = translation_batch(slice(number, number + 1))
        outputs = model(**alone, output_attentions=True)
        n, m = alone["guidance_source"].shape[1], alone["labels"].shape[1]
        matrices = {name: torch.zeros(m, n) for name in ("aligned", "why")}
        matrices |= {"source": torch.zeros(n, n), "target": torch.zeros(m, m)}
        for name in ("source", "aligned"):
            for row, key in enumerate(alone[f"guidance_{name}"][0].tolist()):
                if key >= 0:
                    matrices[name][row, key] = 1
        for row, keys in enumerate(alone["guidance_target"][0].tolist()):
            for key in keys:
                matrices["target"][row, key] += 0.5
        matrices["why"] += alone["guidance_why"] / alone["guidance_why"].sum().clamp(min=1)
        counted = (alone["labels"][0] != -100).nonzero().flatten().tolist()
        for kind, name in {"encoder": "encoder", "decoder": "decoder", "cross": "cross"}.items():
            rows = list(range(n)) if kind == "encoder" else counted
            maps[kind].append((torch.stack(outputs[f"{name}_attentions"])[:, 0], rows, matrices))
    total = 0
    for kind, settings in SITES.items():
        losses = settings.get("loss", {})
        layouts = model.config.guided_heads(kind)
        of_targets = {
            layer: {name: heads for name, heads in layout.items() if name != "prev"}
            for layer, layout in layouts.items()
        }
        losses = dict.fromkeys(("source", "prev"), losses) if isinstance(losses, str) else losses
        more = {"causal": kind == "decoder", "weights": weights}
        total = total + dense_target_loss(maps[kind], of_targets, losses, reduction, **more)
        if kind == "encoder":
            own = [(range(len(rows)), attention) for attention, rows, _ in maps[kind]]
            layouts = {layer: {"prev": [1]} for layer in layouts}
            total = total + dense_guidance_loss(own, layouts, reduction, losses=losses, weights=weights)
    model.set_attn_implementation("sdpa")
    return total


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
def test_all_sites_of_a_translator_have_the_dense_loss_and_gradients(reduction):
    model = translator({kind: {**settings, "reduction": reduction} for kind, settings in SITES.items()})
    slow = dense_loss_of_sites(model, reduction)
    expected = gradients(model, slow)
    fast = model(**translation_batch(), output_guidance_loss=True).guidance_loss
    torch.testing.assert_close(fast, slow, rtol=1e-7, atol=0)
    found = gradients(model, fast)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


# Of each pattern and target of SITES.
WEIGHTS = {"source": 0.5, "prev": 3.0, "target": 0.0, "aligned": 2.0, "why": 0.25}


def test_every_pattern_and_target_has_its_own_loss():
    model = translator()
    outputs = model(**translation_batch(), output_guidance_loss=True)
    assert outputs.guidance_losses.keys() == WEIGHTS.keys()
    for name, found in outputs.guidance_losses.items():
        expected = dense_loss_of_sites(model, weights={**dict.fromkeys(WEIGHTS, 0.0), name: 1.0})
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(sum(outputs.guidance_losses.values()), outputs.guidance_loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
def test_weights_by_name_have_the_dense_loss_and_gradients(reduction):
    model = translator({kind: {**settings, "reduction": reduction} for kind, settings in SITES.items()})
    task_loss = model(**translation_batch()).loss
    slow = task_loss + dense_loss_of_sites(model, reduction, WEIGHTS)
    expected = gradients(model, slow)
    outputs = model(**translation_batch(), guidance_weight=WEIGHTS)
    torch.testing.assert_close(outputs.loss, slow, rtol=1e-7, atol=0)
    torch.testing.assert_close(outputs.task_loss, task_loss)
    found = gradients(model, outputs.loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    # The weight of a tensor, and the losses in a loop of one's own.
    outputs = model(**translation_batch(), guidance_weight={name: torch.tensor(w) for name, w in WEIGHTS.items()})
    torch.testing.assert_close(outputs.loss, slow, rtol=1e-7, atol=0)
    outputs = model(**translation_batch(), output_guidance_loss=True)
    own = gradients(model, outputs.loss + sum(WEIGHTS[n] * loss for n, loss in outputs.guidance_losses.items()))
    assert all(torch.equal(own[name], gradient) for name, gradient in found.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_weights_by_name_have_the_gradients_of_one_weight(dtype):
    model = translator().to(dtype)
    one = gradients(model, model(**translation_batch(), guidance_weight=0.37).loss)
    by_name = gradients(model, model(**translation_batch(), guidance_weight=dict.fromkeys(WEIGHTS, 0.37)).loss)
    assert all(torch.equal(by_name[name], gradient) for name, gradient in one.items())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({**WEIGHTS, "syntax": 1.0}, "guidance_weight names 'syntax', but heads are guided to source, prev, target"),
        ({"prev": 1.0, "source": 1.0, "target": 2.0, "why": 1.0}, "and lacks 'aligned'; a weight of 0 leaves"),
        ({}, r"guidance_weight needs a weight for each name: it has those of \[\], and lacks '\w+'"),
    ],
)
def test_weights_of_other_names_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        translator()(**translation_batch(), guidance_weight=weights)


def test_weights_by_name_need_guidance_and_a_task_loss():
    batch = translation_batch()
    plain = {name: value for name, value in batch.items() if "guidance" not in name}
    with pytest.raises(ValueError, match="guidance loss is requested, but config.guidance is None"):
        tiny_model("marian", guidance=None)(**plain, guidance_weight={"prev": 1.0})
    del batch["labels"]
    with pytest.raises(ValueError, match="guidance_weight needs a task loss: pass labels"):
        translator()(**batch, guidance_weight=WEIGHTS)


def test_a_name_whose_heads_are_all_removed_needs_no_weight():
    model, batch = translator(pruned_heads={"decoder": {0: [1], 1: [1]}}), translation_batch()
    outputs = model(**batch, guidance_weight=WEIGHTS)
    left = {name: weight for name, weight in WEIGHTS.items() if name != "target"}
    assert outputs.guidance_losses.keys() == left.keys()
    assert torch.equal(model(**batch, guidance_weight=left).loss, outputs.loss)
    everything = {"encoder": {0: [0, 1], 1: [0, 1]}, "decoder": {0: [1], 1: [1]}, "cross": {0: [1], 1: [0, 1]}}
    outputs = translator(pruned_heads=everything)(**batch, guidance_weight={})
    assert outputs.guidance_losses == {}
    assert torch.equal(outputs.loss, outputs.task_loss)


def test_hits_of_all_sites_are_those_of_the_attention_maps():
    model, batch = translator(), translation_batch()
    found = model(**batch, output_guided_hits=True)
    assert "guidance_loss" not in found
    assert found.guided_hits.keys() == {"source", "aligned", "why", "target"}
    counts = model.count_guided_rows(batch)
    # Both layers have one head for each of these targets.
    for name in ("source", "aligned"):
        assert found.guided_hits[name].sum(0)[1] == 2 * counts[f"guidance_{name}"]
    aligned = []
    model.set_attn_implementation("eager")
    for number in range(4):
        alone = translation_batch(slice(number, number + 1))
        maps = model(**alone, output_attentions=True).cross_attentions
        rows = ((alone["labels"] != -100) & (alone["guidance_aligned"] != -100))[0]
        keys = alone["guidance_aligned"][0, rows]
        hits = sum((maps[layer][0, head, rows].argmax(-1) == keys).sum().item() for layer, head in ((0, 1), (1, 0)))
        aligned.append([hits, 2 * len(keys)])
    assert found.guided_hits["aligned"].tolist() == aligned
    assert "guided_hits" not in model(**batch, output_guidance_loss=True)
    both = model(**batch, output_guided_hits=True, guidance_weight=1.0)
    assert both.guided_hits["why"].equal(found.guided_hits["why"])
    del batch["guidance_why"]
    assert "why" not in model(**batch, output_guided_hits=True).guided_hits


def test_losses_of_micro_batches_add_up_with_the_counts_of_the_whole():
    model = translator()
    whole = translation_batch()
    counts = {**model.count_labels(whole), **model.count_guided_rows(whole), "sentences": torch.tensor(4)}
    expected = model(**whole, output_guidance_loss=True)
    found = [
        model(**translation_batch(chosen), num_items_in_batch=counts, output_guidance_loss=True)
        for chosen in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(one.guidance_loss for one in found), expected.guidance_loss, rtol=1e-7, atol=0)
    torch.testing.assert_close(sum(one.loss for one in found), expected.loss, rtol=1e-7, atol=0)
    for name, loss in expected.guidance_losses.items():
        torch.testing.assert_close(sum(one.guidance_losses[name] for one in found), loss, rtol=1e-7, atol=0)
    weighted = [
        model(**translation_batch(chosen), num_items_in_batch=counts, guidance_weight=WEIGHTS).loss
        for chosen in (slice(0, 1), slice(1, 4))
    ]
    in_one = model(**whole, guidance_weight=WEIGHTS).loss
    torch.testing.assert_close(sum(weighted), in_one, rtol=1e-7, atol=0)
    counts.pop("labels")
    apart = [
        model(**translation_batch(chosen), guidance_counts=counts, output_guidance_loss=True).guidance_loss
        for chosen in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(apart[0] / 4 + apart[1] * 3 / 4, expected.guidance_loss, rtol=1e-7, atol=0)


@pytest.mark.parametrize("weight", [2.5, WEIGHTS, {**dict.fromkeys(WEIGHTS, 0.0), "aligned": 1.0}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(reentrant, weight):
    model = translator(**no_dropout("marian")).train()
    assert_checkpointing_keeps_gradients(model, translation_batch(), reentrant, weight)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_loss_of_one_name_has_its_gradient_under_gradient_checkpointing(reentrant):
    model = translator(**no_dropout("marian")).train()

    def loss(name):
        return model(**translation_batch(), output_guidance_loss=True, use_cache=False).guidance_losses[name]

    expected = {name: gradients(model, loss(name)) for name in ("why", "prev")}
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for target, of_target in expected.items():
        found = gradients(model, loss(target))
        for name, gradient in of_target.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("weight", [1.0, WEIGHTS])
def test_a_compiled_model_has_the_same_loss_and_gradients(weight):
    model = translator(use_cache=False, encoder_layers=1, decoder_layers=2).float()
    assert_compilation_keeps_loss_and_gradients(model, translation_batch(), weight)


def test_targets_are_saved_with_the_model(tmp_path):
    model = translator().float()
    model.save_pretrained(tmp_path)
    back = had.HeadwiseMarianMTModel.from_pretrained(tmp_path).eval()
    assert back.config.guidance == model.config.guidance
    assert back.target_columns == {name for name in translation_batch() if name.startswith("guidance_")}
    expected = model(**translation_batch(), output_guidance_loss=True).guidance_loss
    assert torch.equal(back(**translation_batch(), output_guidance_loss=True).guidance_loss, expected)
    assert (tmp_path / "batch_targets.py").exists()


def test_columns_change_nothing_where_the_loss_is_not_requested():
    model, batch = translator(), translation_batch()
    plain = {name: value for name, value in batch.items() if not name.startswith("guidance_")}
    found, expected = model(**batch), model(**plain)
    assert torch.equal(found.loss, expected.loss)
    assert "guidance_loss" not in found


@pytest.mark.parametrize("name", ["guidance_source", "guidance_aligned", "guidance_why", "guidance_target"])
def test_a_missing_column_is_named(name):
    batch = translation_batch()
    del batch[name]
    with pytest.raises(ValueError, match=f"needs the column {name} of shape"):
        translator()(**batch, output_guidance_loss=True)
    with pytest.raises(ValueError, match=f"needs the column {name} of shape"):
        translator().count_guided_rows(batch)


def test_a_column_that_no_target_reads_is_refused():
    batch = {"input_ids": torch.tensor([[4, 5]]), "guidance_syntax": torch.tensor([[0, 0]])}
    with pytest.raises(TypeError, match="has no argument 'guidance_syntax'; it would be ignored"):
        tiny_model()(**batch, output_guidance_loss=True)


def test_targets_of_another_length_are_refused():
    batch = translation_batch()
    batch["guidance_aligned"] = batch["guidance_aligned"][:, :-1]
    with pytest.raises(ValueError, match=r"guidance_aligned must have shape \(batch, rows\) = \(4, \d+\), got"):
        translator()(**batch, output_guidance_loss=True)


def test_targets_on_the_padding_of_the_source_are_refused():
    batch = translation_batch()
    shortest = batch["attention_mask"].sum(1).argmin()
    batch["guidance_aligned"][shortest, 0] = batch["attention_mask"].shape[1] - 1
    with pytest.raises(ValueError, match="guidance_aligned names key .* which is padding"):
        translator()(**batch, output_guidance_loss=True)


def test_a_target_whose_heads_are_all_removed_needs_no_column():
    model = translator(pruned_heads={"decoder": {0: [1], 1: [1]}})
    batch = translation_batch()
    expected = model(**batch, output_guidance_loss=True).guidance_loss
    del batch["guidance_target"]
    assert torch.equal(model(**batch, output_guidance_loss=True).guidance_loss, expected)
    assert "guidance_target" not in model.count_guided_rows(batch)


def test_names_of_arguments_and_outputs_are_no_names_of_targets():
    outputs = ("guidance_loss", "guidance_losses")
    own = {name for name in (*OWN_ARGUMENTS, *outputs) if name.startswith(COLUMN_PREFIX)}
    assert {COLUMN_PREFIX + name for name in RESERVED_TARGETS} == own


def test_targets_of_two_sites_with_one_name_are_refused():
    guidance = {kind: {"heads": {"why": [0]}, "targets": {"why": "keys"}} for kind in ("encoder", "cross")}
    with pytest.raises(ValueError, match=r"'why' and 'why' \(cross\) both read the column 'guidance_why'"):
        translator(guidance)
