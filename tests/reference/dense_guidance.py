"""The guidance loss as its definition reads: dense attention, dense patterns, one sentence at a time."""

import torch


def dense_pattern(name, ids, delimiters=(), periods=()):
    """Target matrix (length, length) of one unpadded sentence, or None if the sentence has no token to attend to."""
    n = len(ids)
    pattern = torch.zeros(n, n, dtype=torch.float64)
    if name == "next":
        for row in range(n - 1):
            pattern[row, row + 1] = 1
        pattern[n - 1] = 1 / n
    elif name == "prev":
        for row in range(1, n):
            pattern[row, row - 1] = 1
        pattern[0] = 1 / n
    elif name == "first":
        pattern[:, 0] = 1
    elif name == "self":
        pattern.fill_diagonal_(1)
    else:
        members = [i for i, token in enumerate(ids) if token in (delimiters if name == "delim" else periods)]
        if not members:
            return None
        pattern[:, members] = 1 / len(members)
    return pattern


def dense_guidance_loss(sentences, layouts, reduction="row_mean", edge_rows="uniform", **token_sets):
    """Guidance loss of a batch.

    Args:
        sentences: list of `(ids, attention)`, `attention` of shape (layers, heads, n, n), without any padding.
        layouts: `{layer: {pattern: [heads]}}`.
    """
    total = 0
    for ids, attention in sentences:
        n = len(ids)
        for layer, layout in layouts.items():
            for name, heads in layout.items():
                pattern = dense_pattern(name, ids, **token_sets)
                if pattern is None:
                    continue
                if edge_rows == "zero" and name in ("next", "prev"):
                    pattern[n - 1 if name == "next" else 0] = 0
                errors = [((attention[layer, head] - pattern.to(attention)) ** 2).sum() for head in heads]
                error = torch.stack(errors).sum()
                if reduction == "row_mean":
                    error = error / (len(heads) * n)
                elif reduction == "code":
                    error = error / (len(heads) * n * n)
                total = total + error
    return total / len(sentences)
