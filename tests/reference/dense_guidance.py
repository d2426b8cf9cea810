"""The guidance loss as its definition reads: dense attention, dense patterns, one sentence and one row at a time."""

import torch


OFFSETS = {"next": 1, "prev": -1, "self": 0}


def dense_pattern(name, ids, num_rows=None, causal=False, edge_rows="uniform", delimiters=(), periods=(), window=None):
    """Target matrix (rows, keys) of one unpadded sentence with these tokens as keys; NaN in rows that are left out."""
    n = len(ids)
    num_rows = n if num_rows is None else num_rows
    pattern = torch.zeros(num_rows, n, dtype=torch.float64)
    for row in range(num_rows):
        seen = [key for key in range(row + 1 if causal else n) if window is None or abs(key - row) < window]
        if name in OFFSETS:
            wanted = [key for key in range(n) if key == row + OFFSETS[name]]
        else:
            tokens = delimiters if name == "delim" else periods
            wanted = [key for key in range(n) if (key == 0 if name == "first" else ids[key] in tokens)]
        members = [key for key in wanted if key in seen]
        if not wanted and name in OFFSETS:
            members = seen if edge_rows == "uniform" else []
        elif not members:
            pattern[row] = torch.nan  # it sees none of its target
        pattern[row, members] = 1 / max(len(members), 1)
    return pattern


def dense_row_loss(loss, attention, target):
    """Loss of one row of attention."""
    members = target > 0
    if loss == "squared":
        return ((attention - target) ** 2).sum()
    if loss == "cross_entropy":
        return -(target[members] * attention[members].log()).sum()
    mass = attention[members].sum()
    return -mass.log() if loss == "mass" else mass


def dense_guidance_loss(
    sentences,
    layouts,
    reduction="row_mean",
    edge_rows="uniform",
    causal=False,
    losses=None,
    weights=None,
    **token_sets,
):
    """Guidance loss of a batch at one kind of site.

    Args:
        sentences: list of `(ids, attention)` or `(ids, attention, rows)`: the tokens attended to, attention of shape
            (layers, heads, rows, keys) without any padding, and which of the rows count (all if not given).
        layouts: `{layer: {pattern: [heads]}}`.
        losses: `{pattern: loss}`, the squared error by default; rows that attend to no key in particular have a
            squared error and a cross-entropy only.
        weights: `{pattern: factor of its loss}`, 1 by default.
    """
    total = 0
    for ids, attention, *counted in sentences:
        rows = list(range(attention.shape[2])) if not counted else counted[0]
        columns = rows[-1] + 1 if causal else len(ids)
        for layer, layout in layouts.items():
            for name, heads in layout.items():
                pattern = dense_pattern(name, ids, attention.shape[2], causal, edge_rows, **token_sets).to(attention)
                loss = (losses or {}).get(name, "squared")
                edges = [row for row in rows if name in OFFSETS and not 0 <= row + OFFSETS[name] < len(ids)]
                error = sum(
                    dense_row_loss(loss, attention[layer, head, row], pattern[row])
                    for head in heads
                    for row in rows
                    if not pattern[row].isnan().any() and not (row in edges and loss in ("mass", "avoid"))
                )
                if reduction != "paper":
                    error = error / (len(heads) * len(rows))
                if reduction == "code":
                    error = error / columns
                total = total + (weights or {}).get(name, 1) * error
    return total / len(sentences)


def dense_target_loss(sentences, layouts, losses, reduction="row_mean", causal=False, window=None, weights=None):
    """Loss of targets that a batch brings, at one kind of site.

    Args:
        sentences: list of `(attention, rows, targets)`: attention of shape (layers, heads, rows, keys) without any
            padding, the rows that count, and `{name: matrix (rows, keys)}`, zeros in rows without a target.
        layouts: `{layer: {name: [heads]}}`.
        losses: `{name: loss}`.
        weights: `{name: factor of its loss}`, 1 by default.
    """
    total = 0
    for layer, layout in layouts.items():
        for name, heads in layout.items():
            errors, number = 0, 0
            for attention, rows, targets in sentences:
                columns = rows[-1] + 1 if causal else attention.shape[-1]
                for row in rows:
                    target = targets[name][row].to(attention)
                    if not target.sum():
                        continue
                    number += 1
                    seen = torch.arange(len(target))
                    seen = (seen <= row if causal else seen >= 0) & (window is None or (seen - row).abs() < window)
                    target = target * seen
                    if not target.sum():
                        continue
                    for head in heads:
                        error = dense_row_loss(
                            losses.get(name, "squared"), attention[layer, head, row], target / target.sum()
                        )
                        errors = errors + (error / columns if reduction == "code" else error)
            error = errors / (len(sentences) if reduction == "paper" else len(heads) * number)
            total = total + (weights or {}).get(name, 1) * error
    return total


def dense_hits(attention, rows, target, heads, causal=False, window=None):
    """Number of pairs of a head and a row whose strongest key has a target weight, and of all pairs that count."""
    hits = number = 0
    for row in rows:
        seen = [
            key
            for key in range(row + 1 if causal else attention.shape[-1])
            if window is None or abs(key - row) < window
        ]
        if target[row, seen].any():
            number += len(heads)
            hits += sum(bool(target[row, attention[head, row].argmax()]) for head in heads)
    return [hits, number]


def dense_attention(query, key, scaling=1.0, causal=False, window=None, softcap=None, sinks=None):
    """Attention of shape (heads, rows, keys) of one unpadded sentence; query heads in a row share a key head.

    With sinks, one score for each head, there is a further key, whose weight is left out.
    """
    scores = query @ key.repeat_interleave(len(query) // len(key), 0).transpose(1, 2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = torch.arange(scores.shape[1])[:, None], torch.arange(scores.shape[2])
    hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
    if causal:
        hidden |= keys > rows
    if window is not None:
        hidden |= (keys - rows).abs() >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:2], 1)], -1).softmax(-1)[..., :-1]
