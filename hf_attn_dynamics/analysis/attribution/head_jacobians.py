# Licensed under the Apache License, Version 2.0.
"""Norms of the Jacobians of single heads, in closed form.

With weights a_ji, values v_i, queries q_j and keys k_m (both multiplied by the factor of the scores), the output
o_j = Σ_i a_ji v_i, and the derivatives V_i, K_i and Q_i of value, key and query, before that factor, by the input of
the layer at their position,

    ∂o_j/∂x_i = a_ji (V_i + c_ji (v_i − o_j)(K_iᵀ q_j)ᵀ)          for i ≠ j, and for i = j plus
                M_j Q_j,  M_j = Σ_m a_jm c_jm (v_m − o_j) k_mᵀ

where c_ji is the derivative of a capped score by the score (1 without a cap). In cross-attention, x_i are the outputs
of the encoder, on which queries do not depend, so that there is no second summand. Norms depend on V_i, K_i and Q_i
only through products of two of them, of size head_dim × head_dim.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


MAX_BLOCK = 2**18  # elements of an intermediate result, to fit into the CPU cache

# Takes two of "v", "k" and "q"; returns V_i K_iᵀ, for example, `(heads, length or 1, head_dim, head_dim)`.
Products = Callable[[str, str], torch.Tensor]


class LinearProducts:
    """Products of V, K and Q, which are the same at all positions, up to rotations.

    Args:
        query, key, value (`torch.Tensor` of shape `(heads, head_dim, hidden)`): The projections.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor):
        self._projections = {"q": query, "k": key, "v": value}
        self._products: dict[str, torch.Tensor] = {}

    def of(self, block: slice, turns: torch.Tensor | None) -> Products:
        """Products of some heads.

        Args:
            block (`slice`): Which heads.
            turns (`torch.Tensor` of shape `(length, head_dim, head_dim)`, *optional*): Rotary position embeddings.
        """

        def product(left: str, right: str) -> torch.Tensor:
            if left + right not in self._products:
                self._products[left + right] = self._projections[left] @ self._projections[right].mT
            found = self._products[left + right][block, None].double()
            if turns is not None and left != "v":
                found = turns @ found
            if turns is not None and right != "v":
                found = found @ turns.mT
            return found

        return product


def products_of(jacobians: dict[str, torch.Tensor]) -> Products:
    """Products of Jacobians, `(heads, length, head_dim, hidden)` by name."""
    return lambda left, right: jacobians[left] @ jacobians[right].mT


@dataclass(eq=False)
class Heads:
    """Heads in one sentence, in double precision; the first dimension of all tensors is heads.

    Args:
        query, key, value (`torch.Tensor` of shape `(heads, length, head_dim)`): Scaled queries, scaled keys, values.
        weights (`torch.Tensor` of shape `(heads, query, key)`): Attention weights.
        products (callable): See `Products`.
        slopes (`torch.Tensor` of shape `(heads, query, key)`, *optional*): c, the derivatives of capped scores.
        is_self (`bool`): Whether queries depend on the same inputs as keys, position by position.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor
    products: Products
    slopes: torch.Tensor | None = None
    is_self: bool = True

    @cached_property
    def output(self) -> torch.Tensor:
        """o_j."""
        return self.weights @ self.value

    @cached_property
    def score_weights(self) -> torch.Tensor:
        """a_ji c_ji."""
        return self.weights if self.slopes is None else self.weights * self.slopes

    @cached_property
    def moments(self) -> torch.Tensor:
        """M_j, `(heads, length, head_dim, head_dim)`."""
        outer = (self.value[..., :, None] * self.key[..., None, :]).flatten(2)
        moments = (self.score_weights @ outer).unflatten(-1, (self.value.shape[-1], -1))
        return moments - self.output[..., :, None] * (self.score_weights @ self.key)[..., None, :]

    def outward(self, vectors: torch.Tensor) -> torch.Tensor:
        """vectorsᵀ_j (v_i − o_j), `(heads, query, key)`."""
        return vectors @ self.value.mT - (vectors * self.output).sum(-1, keepdim=True)


def frobenius_norms(heads: Heads, is_constant: bool) -> torch.Tensor:
    """‖∂o_j/∂x_i‖_F of shape `(heads, query, key)`.

    Args:
        heads (`Heads`): The heads.
        is_constant (`bool`): Whether the products are the same at all positions and no score is capped, which is
            faster.
    """
    outward, lengths, through_query = (_constant_terms if is_constant else _positional_terms)(heads)
    value, output, slopes = heads.value, heads.output, heads.slopes
    if slopes is not None:
        outward, lengths = outward * slopes, lengths * slopes.square()
    distances = (output.square().sum(-1, keepdim=True) - 2 * output @ value.mT) + value.square().sum(-1)[:, None]
    size = heads.products("v", "v").diagonal(dim1=-2, dim2=-1).sum(-1)
    squares = heads.weights.square() * (size[:, None] + 2 * outward + distances * lengths)
    if through_query is not None:
        squares.diagonal(dim1=-2, dim2=-1).add_(through_query)
    # Rounding can make small squares negative.
    return squares.clamp(min=0).sqrt()


# Terms: (v_i − o_j)ᵀ V_i u_ji and ‖u_ji‖² with u_ji = K_iᵀ q_j, `(heads, query, key or 1)`; and what i = j adds.
Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _constant_terms(heads: Heads) -> Terms:
    """The terms if K_i = K and Q_i = Q: u_ji depends on the query alone.

    The terms of M_j Q are linear and quadratic forms in a_j, with the same matrices for all queries. Quadratic forms
    suffer cancellation for sharp attention, hence double precision.
    """
    query, key, value, weights, output = heads.query, heads.key, heads.value, heads.weights, heads.output
    outward = heads.outward(query @ heads.products("v", "k").squeeze(1).mT)
    lengths = (query @ heads.products("k", "k").squeeze(1) * query).sum(-1, keepdim=True)
    if not heads.is_self:
        return outward, lengths, None
    qq, kq, vq = (heads.products(*names).squeeze(1) for names in ("qq", "kq", "vq"))

    # ⟨V + (v_j − o_j) u_jᵀ, M_j Q⟩
    crossed = (weights @ (value @ vq * key).sum(-1, keepdim=True)).squeeze(-1)
    crossed -= (output @ vq * (weights @ key)).sum(-1)
    crossed += (weights * heads.outward(value - output) * (query @ kq @ key.mT)).sum(-1)
    # ‖M_j Q‖² = Σ_mp a_jm a_jp κ_mp (v_m − o_j)ᵀ(v_p − o_j) with κ_mp = k_mᵀ Q Qᵀ k_p
    kappa = key @ qq @ key.mT
    around = output.square().sum(-1, keepdim=True) - 2 * output @ value.mT
    squared = ((weights @ (kappa * (value @ value.mT)) + (weights * around) @ kappa) * weights).sum(-1)
    return outward, lengths, 2 * weights.diagonal(dim1=-2, dim2=-1) * crossed + squared


def _positional_terms(heads: Heads) -> Terms:
    """The terms if V_i, K_i and Q_i depend on the position, or scores are capped."""
    query, value, output = heads.query, heads.value, heads.output
    vk = heads.products("v", "k")
    outward = query @ (vk.mT @ value[..., None]).squeeze(-1).mT - _forms(output, vk, query)
    lengths = _forms(query, heads.products("k", "k"), query)
    if not heads.is_self:
        return outward, lengths, None

    # ⟨V_j + c_jj (v_j − o_j) u_jjᵀ, M_j Q_j⟩
    moments = heads.moments
    crossed = (moments * heads.products("v", "q")).sum((-2, -1))
    own = (query[..., None, :] @ heads.products("k", "q")).squeeze(-2)  # Q_j u_jj
    straight = ((value - output)[..., None, :] @ moments @ own[..., None]).flatten(-3)
    if heads.slopes is not None:
        straight = straight * heads.slopes.diagonal(dim1=-2, dim2=-1)
    squared = (moments @ heads.products("q", "q") * moments).sum((-2, -1))
    return outward, lengths, 2 * heads.weights.diagonal(dim1=-2, dim2=-1) * (crossed + straight) + squared


def _forms(left: torch.Tensor, matrices: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Bilinear forms leftᵀ_j A_i right_j of vectors `(heads, length, size)`, `(heads, length, matrices)`."""
    return (left[..., :, None] * right[..., None, :]).flatten(2) @ matrices.flatten(2).mT


def spectral_norms(heads: Heads) -> torch.Tensor:
    """Largest singular value of ∂o_j/∂x_i = L_ji P_i, of shape `(heads, query, key)`.

    P_i stacks V_i, K_i and Q_i, and L_ji = [a_ji 1, a_ji c_ji (v_i − o_j) q_jᵀ, M_j], where the last block is zero for
    i ≠ j. The singular values of the Jacobian follow from the d × d matrix L_ji P_i P_iᵀ L_jiᵀ.
    """
    query, value = heads.query, heads.value
    size = value.shape[-1]
    names = "vkq" if heads.is_self else "vk"
    products = iter(torch.broadcast_tensors(*(heads.products(*pair) for pair in itertools.product(names, names))))
    gram = torch.cat([torch.cat(row, -1) for row in zip(*[products] * len(names))], -2)
    unit = torch.eye(size, dtype=value.dtype, device=value.device)
    rows = []
    for position in range(query.shape[1]):
        away = value - heads.output[:, position, None]  # v_i − o_j
        left = value.new_zeros(*value.shape, len(names) * size)
        left[..., :size] = heads.weights[:, position, :, None, None] * unit
        straight = heads.score_weights[:, position, :, None] * away
        left[..., size : 2 * size] = straight[..., :, None] * query[:, position, None, None]
        if heads.is_self:
            left[:, position, :, 2 * size :] = heads.moments[:, position]
        rows.append(largest_singular_values(left @ gram @ left.mT))
    return torch.stack(rows, 1)


def largest_singular_values(products: torch.Tensor) -> torch.Tensor:
    """Largest singular values of matrices J, `(…)`, given J Jᵀ of shape `(…, size, size)`."""
    # Rounding can make small eigenvalues negative.
    return torch.linalg.eigvalsh(products)[..., -1].clamp(min=0).sqrt()
