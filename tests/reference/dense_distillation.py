"""Distillation of attention as its definition reads: dense attention in double precision, one row at a time."""

import torch


def dense_scores(left, right, scaling, softcap=0.0, key_mask=None, band=(-1, -1)):
    """Attention of shape (batch, heads, rows, keys); `band` as in the package, -1 for no limit."""
    scores = scaling * left.double() @ right.double().transpose(2, 3)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    before, after = band
    distance = torch.arange(scores.shape[3]) - torch.arange(scores.shape[2])[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if before >= 0:
        hidden |= distance < -before
    if after >= 0:
        hidden |= distance > after
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def row_divergence(loss, student, teacher):
    """Loss of one row of attention; keys that the student does not see are left out of the teacher's attention."""
    seen = student > 0
    teacher = teacher[seen] / teacher[seen].sum()
    if loss == "squared":
        return ((student[seen] - teacher) ** 2).sum()
    return (torch.xlogy(teacher, teacher) - teacher * student[seen].log()).sum()


def dense_distillation_loss(sentences, loss="kl", reduction="row_mean"):
    """Loss of a batch at the layers of one kind of site.

    Args:
        sentences: list of `(student, teacher, rows)`: attention of the heads of one layer that learn, and of those
            that they learn from, of shape (heads, rows, keys), and the rows that count.
    """
    total = 0
    for student, teacher, rows in sentences:
        errors = [row_divergence(loss, own[row], other[row]) for own, other in zip(student, teacher) for row in rows]
        error = torch.stack(errors).sum()
        if reduction != "paper":
            error = error / (len(student) * len(rows))
        if reduction == "code":
            error = error / student.shape[-1]
        total = total + error
    return total / len(sentences)


def relation(inputs, name, heads):
    """MiniLM's relation of the tokens of a batch, of shape (batch, heads, length, length)."""
    sides = {"query_key": ("query", "key")}.get(name, (name, name))
    vectors = []
    for side in sides:
        of_heads = getattr(inputs, side).double()
        if name == "query_key" and side == "key":
            of_heads = of_heads.repeat_interleave(inputs.query.shape[1] // of_heads.shape[1], 1)
        batch, _, length, _ = of_heads.shape
        vectors.append(of_heads.permute(0, 2, 1, 3).reshape(batch, length, heads, -1).permute(0, 2, 1, 3))
    left, right = vectors
    return left, right, left.shape[-1] ** -0.5
