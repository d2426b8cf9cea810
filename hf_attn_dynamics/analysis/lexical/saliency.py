# Licensed under the Apache License, Version 2.0.
"""Which words an output depends on, by the gradient."""

import torch


def word_saliency(losses: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """How much each input word lowers each loss: Δ of Snell et al. 2021, section 5.1.

    `Δ_tl = -∂L_t/∂m_l = -⟨∂L_t/∂e_l, e_l⟩` at m = 1, with m_l a factor that multiplies the embedding e_l. It is
    positive for a word that speaks for the correct output: more of it, less loss.

    One backward pass is made for each column of the losses, for all sentences at once: sentences must not see each
    other (no batch normalisation in training mode). Gradients of parameters stay as they are.

    Args:
        losses (`torch.Tensor` of shape `(batch,)` or `(batch, target length)`): Loss of each sentence, or of each
            output word, computed from the embeddings.
        embeddings (`torch.Tensor` of shape `(batch, source length, dim)`): What the model was given as
            `inputs_embeds`, with `requires_grad`.

    Returns:
        `torch.Tensor` of shape `(batch, source length)` or `(batch, target length, source length)`: Δ, detached. At
        padding it is 0 if the model ignores padding.

    Raises:
        ValueError: if shapes do not fit, or the losses do not depend on the embeddings.

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
