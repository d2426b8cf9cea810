# Licensed under the Apache License, Version 2.0.
"""Gradient-based saliency of words."""

import torch


def word_saliency(losses: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Saliency of each input word for each loss: Δ of Snell et al. 2021, section 5.1.

    `Δ_tl = -∂L_t/∂m_l = -⟨∂L_t/∂e_l, e_l⟩` at m = 1, where the factor m_l multiplies the embedding e_l. It is positive
    for words that lower the loss.

    Each column of the losses needs a backward pass, for all sentences at once: sentences must not depend on each other
    (no batch normalization in training mode). Gradients of parameters are not changed.

    Args:
        losses (`torch.Tensor` of shape `(batch,)` or `(batch, target length)`): Loss of each sentence, or of each
            output word, computed from the embeddings.
        embeddings (`torch.Tensor` of shape `(batch, source length, dim)`): The `inputs_embeds` of the model, with
            `requires_grad=True`.

    Returns:
        `torch.Tensor` of shape `(batch, source length)` or `(batch, target length, source length)`: Δ, detached; 0 at
        padding if the model ignores padding.

    Raises:
        ValueError: if the shapes do not match, or the losses do not depend on the embeddings.

    Example:
        >>> embeddings = torch.tensor([[[1.0, 2.0], [3.0, 0.0]]], requires_grad=True)
        >>> losses = -(embeddings * torch.tensor([1.0, 0.5])).sum((1, 2))
        >>> word_saliency(losses, embeddings)
        tensor([[2., 3.]])
    """
    if embeddings.dim() != 3:
        raise ValueError(f"embeddings must have shape (batch, length, dim), got {tuple(embeddings.shape)}.")
    if losses.dim() not in (1, 2) or len(losses) != len(embeddings):
        raise ValueError(
            f"losses must have shape (batch,) or (batch, target length) for {len(embeddings)} sentences, got "
            f"{tuple(losses.shape)}; ask the model for losses that are not reduced."
        )
    if not (losses.requires_grad and embeddings.requires_grad):
        raise ValueError("losses must be computed from embeddings that have requires_grad=True.")
    rows = []
    for column in losses.view(len(losses), -1).unbind(1):
        (gradient,) = torch.autograd.grad(column.sum(), embeddings, retain_graph=True, allow_unused=True)
        if gradient is None:
            raise ValueError("losses do not depend on embeddings; pass these very embeddings to the model.")
        rows.append(-(gradient * embeddings.detach()).sum(-1))
    return torch.stack(rows, 1) if losses.dim() == 2 else rows[0]
