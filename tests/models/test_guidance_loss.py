import pytest
import torch
from dense_guidance import dense_attention, dense_guidance_loss, dense_pattern

from hf_attn_dynamics.models import guidance_loss
from hf_attn_dynamics.models.guidance_loss import guide_heads
from hf_attn_dynamics.models.guidance_settings import GuidanceSettings
from hf_attn_dynamics.models.guidance_targets import GuidanceTargets, Tokens
from hf_attn_dynamics.models.patterns import (
    PatternRows,
    next_token,
    pattern_names,
    previous_token,
    register_pattern,
    token_set,
)


DELIMITERS, PERIODS = [90, 91], [7]
LAYOUT = {"next": [0], "prev": [1], "first": [2, 3], "delim": [5], "period": [6], "self": [4]}
SENTENCES = [
    [90, 3, 4, 7, 5, 91],
    [90, 7, 8, 7, 9, 10, 7, 11, 12, 13, 91],
    [14],
    [90, 15, 91],
]


def guidance(**changes):
    return GuidanceSettings(delimiter_token_ids=DELIMITERS, period_token_ids=PERIODS, **changes)


def padded(sentences, left=False, extra=0):
    length = max(map(len, sentences)) + extra
    ids, mask = torch.full((len(sentences), length), 1), torch.zeros(len(sentences), length, dtype=torch.long)
    for row, sentence in enumerate(sentences):
        place = slice(length - len(sentence), length) if left else slice(0, len(sentence))
        ids[row, place], mask[row, place] = torch.tensor(sentence), 1
    return ids, mask


def unmasked(batch, length):
    """Sentences given as embeddings, none of them padded."""
    return Tokens(None, None, (batch, length), torch.device("cpu"))


def queries_and_keys(sentences, left=False, extra=0, dtype=torch.float64, heads=7, head_dim=5):
    """The same vectors for a sentence wherever it stands; noise at padding."""
    length = max(map(len, sentences)) + extra
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, len(sentences), heads, length, head_dim, generator=generator, dtype=torch.float64) * 9
    for row, sentence in enumerate(sentences):
        vectors = torch.Generator().manual_seed(hash(tuple(sentence)) % 2**31)
        own = torch.randn(2, heads, len(sentence), head_dim, generator=vectors, dtype=torch.float64)
        place = slice(length - len(sentence), length) if left else slice(0, len(sentence))
        query[row, :, place], key[row, :, place] = own[0], own[1]
    return query.to(dtype).requires_grad_(), key.to(dtype).requires_grad_()


def fast_loss(sentences, settings, layout=LAYOUT, left=False, extra=0, dtype=torch.float64):
    ids, mask = padded(sentences, left, extra)
    query, key = queries_and_keys(sentences, left, extra, dtype)
    targets = GuidanceTargets(settings, {0: layout}, Tokens(ids, mask, ids.shape, ids.device))
    loss = guide_heads(query, key, 0.7, targets.layer(0, query.dtype, query.device))[2].sum()
    return loss, query, key


def slow_loss(sentences, settings, layout=LAYOUT, dtype=torch.float64):
    query, key = queries_and_keys(sentences, dtype=dtype)
    data = []
    for row, sentence in enumerate(sentences):
        n = len(sentence)
        scores = 0.7 * query[row, :, :n] @ key[row, :, :n].transpose(1, 2)
        data.append((sentence, scores.softmax(-1)[None]))
    loss = dense_guidance_loss(
        data, {0: layout}, settings.reduction, settings.edge_rows, delimiters=DELIMITERS, periods=PERIODS
    )
    return loss, query, key


@pytest.fixture(params=["whole", "rows of 4", "2 sentences"])
def block_size(request, monkeypatch):
    """Blocks that cover everything, cut sentences into rows, or take two sentences at a time."""
    elements = {"whole": 2**20, "rows of 4": 7 * 11 * 4, "2 sentences": 7 * 11 * 11 * 2}[request.param]
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", elements)


@pytest.mark.parametrize("edge_rows", ["uniform", "zero"])
@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
def test_loss_and_gradients_equal_the_dense_definition(reduction, edge_rows, block_size):
    settings = guidance(reduction=reduction, edge_rows=edge_rows)
    fast, fast_query, fast_key = fast_loss(SENTENCES, settings)
    slow, slow_query, slow_key = slow_loss(SENTENCES, settings)
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=0)
    fast.backward()
    slow.backward()
    torch.testing.assert_close(fast_query.grad, slow_query.grad, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(fast_key.grad, slow_key.grad, rtol=1e-8, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    ids, mask = padded([[90, 7, 3], [4]])
    targets = GuidanceTargets(
        guidance(), {0: {"next": [1], "period": [0, 2]}}, Tokens(ids, mask, ids.shape, ids.device)
    )
    query, key = torch.randn(2, 2, 3, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(query, key):
        return guide_heads(query, key, 0.7, targets.layer(0, query.dtype, query.device))

    assert torch.autograd.gradcheck(loss, (query.requires_grad_(), key.requires_grad_()))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_low_precision_inputs_give_the_double_loss_within_their_rounding(dtype, tolerance):
    fast, query, _ = fast_loss(SENTENCES, guidance(), dtype=dtype)
    exact, _, _ = slow_loss(SENTENCES, guidance())
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast.double(), exact, rtol=tolerance, atol=0)
    fast.backward()
    assert query.grad.dtype == dtype


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
def test_half_precision_keeps_small_gradients_for_a_loss_that_is_scaled(reduction):
    # 64 sentences of 200 tokens: without the scale, most gradients are below the smallest half-precision number.
    settings, shape = guidance(reduction=reduction), (64, 200)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, 64, 2, 200, 16, generator=generator).half()
    targets = GuidanceTargets(settings, {0: {"next": [0], "first": [1]}}, unmasked(*shape))
    grads = []
    for dtype in (torch.float16, torch.float32):
        query, key = vectors.to(dtype).unbind()
        query.requires_grad_()
        loss = guide_heads(query, key, 0.25, targets.layer(0, dtype, query.device))[2].sum()
        (loss * 2.0**24).backward() if reduction == "code" else (loss * 2.0**16).backward()
        grads.append(query.grad.double())
    assert (grads[0] - grads[1]).norm() < 5e-3 * grads[1].norm()


def test_the_loss_stays_in_single_precision_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _, _ = fast_loss(SENTENCES, guidance(), dtype=torch.float32)
    outside, _, _ = fast_loss(SENTENCES, guidance(), dtype=torch.float32)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize(("left", "extra"), [(False, 5), (True, 0), (True, 3)])
def test_padding_changes_neither_loss_nor_gradient(left, extra):
    plain, query, _ = fast_loss(SENTENCES, guidance())
    more, more_query, _ = fast_loss(SENTENCES, guidance(), left=left, extra=extra)
    torch.testing.assert_close(more, plain, rtol=1e-12, atol=0)
    plain.backward()
    more.backward()
    _, mask = padded(SENTENCES)
    _, more_mask = padded(SENTENCES, left, extra)
    pick = lambda grad, mask: grad.transpose(1, 2)[mask.bool()]  # noqa: E731
    torch.testing.assert_close(pick(more_query.grad, more_mask), pick(query.grad, mask), rtol=1e-9, atol=1e-14)
    assert (pick(more_query.grad, 1 - more_mask) == 0).all()


def test_a_batch_is_the_mean_of_its_sentences():
    together, _, _ = fast_loss(SENTENCES, guidance())
    alone = [fast_loss([sentence], guidance())[0] for sentence in SENTENCES]
    torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-12, atol=0)


def test_sentences_of_padding_alone_do_not_count():
    ids, mask = padded([*SENTENCES, [1]])
    mask[-1] = 0
    query, key = queries_and_keys([*SENTENCES, [1]])
    targets = GuidanceTargets(guidance(), {0: LAYOUT}, Tokens(ids, mask, ids.shape, ids.device))
    loss = guide_heads(query, key, 0.7, targets.layer(0, query.dtype, query.device))[2].sum()
    torch.testing.assert_close(loss, slow_loss(SENTENCES, guidance())[0], rtol=1e-8, atol=0)
    loss.backward()
    assert query.grad.isfinite().all()


def test_a_pattern_gets_the_same_row_mean_from_one_head_as_from_copies_of_it():
    ids, mask = padded(SENTENCES)
    query, key = queries_and_keys(SENTENCES)
    query, key = query.detach()[:, [0, 0, 0]], key.detach()[:, [0, 0, 0]]
    losses = []
    for heads in ([0], [0, 1, 2]):
        targets = GuidanceTargets(guidance(), {0: {"next": heads}}, Tokens(ids, mask, ids.shape, ids.device))
        losses.append(guide_heads(query, key, 1.0, targets.layer(0, query.dtype, query.device))[2].sum())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)


def test_uniform_attention_costs_what_the_patterns_say():
    # All scores equal: H = 1/n, so a one-hot row costs 1 − 1/n and a uniform row nothing.
    n = 8
    query = torch.zeros(1, 1, n, 4)
    for reduction, expected in (("row_mean", 1 - 1 / n), ("paper", n - 1), ("code", (1 - 1 / n) / n)):
        targets = GuidanceTargets(guidance(reduction=reduction), {0: {"first": [0]}}, unmasked(1, n))
        loss = guide_heads(query, query, 1.0, targets.layer(0, query.dtype, query.device))[2].sum()
        assert loss.item() == pytest.approx(expected)


def test_query_and_key_pass_through_with_the_gradient_of_what_follows_added():
    ids, mask = padded(SENTENCES)
    targets = GuidanceTargets(guidance(), {0: {"first": [1]}}, Tokens(ids, mask, ids.shape, ids.device))
    query, key = queries_and_keys(SENTENCES)
    passed_query, passed_key, loss = guide_heads(query, key, 0.7, targets.layer(0, query.dtype, query.device))
    assert torch.equal(passed_query, query)
    (2 * passed_query.sum() + 3 * passed_key.sum() + 5 * loss.sum()).backward()
    alone_query, alone_key = queries_and_keys(SENTENCES)
    guide_heads(alone_query, alone_key, 0.7, targets.layer(0, query.dtype, query.device))[2].sum().backward()
    torch.testing.assert_close(query.grad, 2 + 5 * alone_query.grad)
    torch.testing.assert_close(key.grad, 3 + 5 * alone_key.grad)
    assert (alone_query.grad[:, [0, 2, 3, 4, 5, 6]] == 0).all()


def test_memory_of_the_loss_does_not_grow_with_the_square_of_the_length(monkeypatch):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", 2**14)
    largest = 0
    empty = torch.empty

    def watching_empty(*size, **kwargs):
        nonlocal largest
        made = empty(*size, **kwargs)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(torch, "empty", watching_empty)
    query = torch.randn(1, 2, 1024, 4).requires_grad_()
    targets = GuidanceTargets(guidance(), {0: {"next": [0, 1]}}, unmasked(1, 1024))
    guide_heads(query, query, 1.0, targets.layer(0, query.dtype, query.device))[2].sum().backward()
    assert largest <= 2 * 2**14


@pytest.mark.parametrize("name", ["next", "prev"])
def test_neighbours_are_the_nearest_real_tokens(name):
    mask = torch.tensor([[0, 1, 1, 0, 1, 0]]).bool()
    rows = {"next": next_token, "prev": previous_token}[name](None, mask)
    dense = torch.zeros(6, 6).scatter_(1, rows.keys[0], rows.weights[0])
    dense[rows.uniform[0]] = mask[0].float() / 3
    expected = dense_pattern(name, [0, 0, 0]).float()
    assert torch.equal(dense[mask[0]][:, mask[0]], expected)


def test_a_token_set_is_uniform_over_its_members_and_leaves_other_sentences_out():
    ids, mask = padded(SENTENCES)
    rows = token_set(PERIODS)(ids, mask.bool())
    assert rows.included.tolist() == [True, True, False, False]
    dense = torch.zeros(4, 11).scatter_add_(1, rows.keys[:, 0], rows.weights[:, 0].float())
    assert dense[0].nonzero().flatten().tolist() == [3]
    assert dense[1].tolist() == pytest.approx([0, 1 / 3, 0, 1 / 3, 0, 0, 1 / 3, 0, 0, 0, 0])


def test_a_registered_pattern_is_used_and_can_be_dense():
    def uniform_over_all(input_ids, attention_mask):
        batch, n = attention_mask.shape
        keys = torch.arange(n).expand(batch, 1, n)
        return PatternRows(keys, (attention_mask / attention_mask.sum(1, keepdim=True)).unsqueeze(1))

    register_pattern("everything", uniform_over_all)
    assert "everything" in pattern_names()
    loss, _, _ = fast_loss(SENTENCES, guidance(), layout={"everything": [0]})
    query, key = queries_and_keys(SENTENCES)
    errors = []
    for row, sentence in enumerate(SENTENCES):
        n = len(sentence)
        attention = (0.7 * query[row, 0, :n] @ key[row, 0, :n].T).softmax(-1)
        errors.append(((attention - 1 / n) ** 2).sum() / n)
    torch.testing.assert_close(loss, torch.stack(errors).mean(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", ["next", "delim", "", 3])
def test_built_in_names_cannot_be_registered(name):
    with pytest.raises(ValueError, match="pattern name"):
        register_pattern(name, next_token)


def test_masks_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"attention_mask of shape \(batch, length\) = \(2, 5\), got \(2, 1, 5, 5\)"):
        Tokens(None, torch.ones(2, 1, 5, 5), (2, 5), torch.device("cpu"))


def test_token_patterns_need_token_ids():
    with pytest.raises(ValueError, match="input_ids"):
        GuidanceTargets(guidance(), {0: {"delim": [0]}}, unmasked(2, 5))


@pytest.mark.parametrize("reduction", ["row_mean", "paper", "code"])
@pytest.mark.parametrize("edge_rows", ["uniform", "zero"])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("key_heads", "softcap", "has_sinks"), [(8, 0.0, False), (2, 0.0, False), (4, 1.5, False), (4, 0.0, True)]
)
def test_rows_that_see_less_have_the_dense_loss_and_gradient(
    reduction, edge_rows, window, causal, key_heads, softcap, has_sinks, monkeypatch
):
    monkeypatch.setitem(guidance_loss.BLOCK_ELEMENTS, "cpu", 200)
    layout = {"prev": [1], "self": [5, 2], "first": [7], "delim": [4], "period": [6]}
    if not causal:
        layout["next"] = [0]
    settings = guidance(reduction=reduction, edge_rows=edge_rows)
    generator = torch.Generator().manual_seed(0)
    ids, mask = padded(SENTENCES)
    shapes = [(len(SENTENCES), heads, ids.shape[1], 5) for heads in (8, key_heads)]
    query, key = (torch.randn(shape, generator=generator, dtype=torch.float64).mul_(3) for shape in shapes)
    sinks = torch.randn(8, generator=generator, dtype=torch.float64) if has_sinks else None
    leaves = [query, key, *([sinks] if has_sinks else [])]
    for leaf in leaves:
        leaf.requires_grad_()

    targets = GuidanceTargets(settings, {0: layout}, Tokens(ids, mask, ids.shape, ids.device), causal=causal)
    of_layer = targets.layer(0, query.dtype, query.device, window)
    *passed, losses = guide_heads(query, key, 0.7, of_layer, softcap=softcap, sinks=sinks)
    # Each pattern has its own weight.
    weights = dict(zip(layout, (1.0, -0.5, 3.0, 0.0, 0.25, 2.0)))
    loss = losses @ losses.new_tensor([weights[name] for name in of_layer.names])
    found = torch.autograd.grad(loss, leaves)

    maps = [
        (row, dense_attention(q[:, : len(row)], k[:, : len(row)], 0.7, causal, window, softcap, sinks)[None])
        for row, q, k in zip(SENTENCES, query, key)
    ]
    kinds = {"delimiters": DELIMITERS, "periods": PERIODS, "weights": weights}
    expected = dense_guidance_loss(maps, {0: layout}, reduction, edge_rows, causal, window=window, **kinds)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves), rtol=1e-7, atol=1e-10)
    assert all(torch.equal(one, other) for one, other in zip(passed, (query, key)))
