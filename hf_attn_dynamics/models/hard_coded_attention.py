# Licensed under the Apache License, Version 2.0.
"""Hard-coded Gaussian attention (You, Sun & Iyyer 2020): weights that depend on positions alone.

Head h of row p attends with a normal density centred at position p + offset, restricted to the keys that the row sees.
Nothing of it is learnt: projections to queries and keys are gone, those to values and outputs stay.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .number_checks import is_finite
from .token_mask import may_attend


HARD_CODED_OFFSETS = {"encoder": [-1, 1], "decoder": [-1, 0]}
HARD_CODED_STD = 1.0


def completed_hard_coded(settings: Any, kind: str, num_heads: int, where: str) -> dict[str, Any]:
    """Settings of the hard-coded attention of one kind of site, with defaults filled in.

    Args:
        settings (`dict`): Those given, see [`HeadwiseConfigMixin`].
        kind (`str`): `encoder` or `decoder`.
        num_heads (`int`): Number of heads that the offsets are shared out among.
        where (`str`): What they are called, for messages.

    Returns:
        `dict[str, Any]`: `offsets` and `std`.

    Raises:
        ValueError: names the key, the value and what is possible.

    Example:
        >>> completed_hard_coded({"std": 0.5}, "decoder", 8, "hard_coded")
        {'offsets': [-1, 0], 'std': 0.5}
    """
    if kind not in HARD_CODED_OFFSETS:
        raise ValueError(
            f"{where} is not possible: where a token's translation is in the source is for attention to learn; name "
            f"{' or '.join(HARD_CODED_OFFSETS)}."
        )
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} must be a dictionary or None, got {settings!r}.")
    completed = {"offsets": HARD_CODED_OFFSETS[kind], "std": HARD_CODED_STD}
    if unknown := sorted(str(key) for key in set(settings) - set(completed)):
        raise ValueError(f"{where} has no key {unknown[0]!r}; its keys are {', '.join(completed)}.")
    completed |= settings
    offsets, std = completed["offsets"], completed["std"]
    if not isinstance(offsets, (list, tuple)) or not offsets or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"{where} offsets must be a list of integers, got {offsets!r}.")
    if num_heads % len(offsets):
        raise ValueError(
            f"{where} has {len(offsets)} offsets, which cannot be shared out evenly among {num_heads} heads."
        )
    if not (is_finite(std) and std > 0):
        raise ValueError(f"{where} std must be a number greater than 0, got {std!r}.")
    return {"offsets": list(offsets), "std": std}


class Unprojected(nn.Module):
    """In place of a projection to queries or keys that nothing reads: hidden states, as far as heads have features."""

    def __init__(self, out_features: int):
        super().__init__()
        self.out_features = out_features

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[..., : self.out_features]


class GaussianAttention(nn.Module):
    """Weights of hard-coded attention, and what they make of the values.

    Args:
        offsets (`list[int]`): Offsets, shared out among the heads in equal blocks.
        std (`float`): Standard deviation of the densities, in tokens.
        num_heads (`int`): Number of heads.
    """

    def __init__(self, offsets: list[int], std: float, num_heads: int):
        super().__init__()
        self.offsets = [offset for offset in offsets for _ in range(num_heads // len(offsets))]
        self.std = std

    def extra_repr(self) -> str:
        return f"offsets={self.offsets}, std={self.std}"

    def keep(self, places: list[int]) -> None:
        """Keeps the heads at these places among those there are."""
        self.offsets = [self.offsets[place] for place in places]

    def forward(
        self,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        num_rows: int,
        is_causal: bool,
        dropout: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends as the kernels do, dropout of weights included.

        Args:
            value (`torch.Tensor` of shape `(batch, heads, keys, head_dim)`): Values, those in a cache included.
            attention_mask (`torch.Tensor` of shape `(batch or 1, 1, rows or 1, keys)`, *optional*): True for keys that
                a row sees, or of floating point, as eager attention adds it to the scores.
            num_rows (`int`): Number of rows; without a mask they are the last of the keys.
            is_causal (`bool`): Whether rows see no keys after their own position.
            dropout (`float`): Share of weights that is dropped.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: output of shape `(batch, rows, heads, head_dim)`, and weights of
            shape `(batch, heads, rows, keys)`.
        """
        visible = _visible_keys(value, attention_mask, num_rows, is_causal)
        # Positions count the keys that the row sees: padding, on either side, takes none.
        positions = visible.cumsum(-1)
        own = positions[..., -1] if is_causal else positions.diagonal(dim1=-2, dim2=-1)
        dtype = torch.promote_types(value.dtype, torch.float32)
        distance = (positions - own.unsqueeze(-1)).to(dtype)
        weights = {}
        for offset in dict.fromkeys(self.offsets):
            scores = ((distance - offset) / self.std).square() / -2
            # Rows that see no key are of padding, but must not be NaN.
            scores = scores.masked_fill(~visible, torch.finfo(dtype).min)
            weights[offset] = scores.softmax(-1).to(value.dtype)
        by_head = torch.cat([weights[offset] for offset in self.offsets], dim=1).expand(value.shape[0], -1, -1, -1)
        by_head = nn.functional.dropout(by_head, dropout, training=dropout > 0)
        return (by_head @ value).transpose(1, 2), by_head


def _visible_keys(
    value: torch.Tensor, attention_mask: torch.Tensor | None, num_rows: int, is_causal: bool
) -> torch.Tensor:
    """True where a row sees a key, of shape `(batch or 1, 1, rows, keys)`."""
    num_keys = value.shape[2]
    if attention_mask is None:
        visible = torch.ones(1, 1, num_rows, num_keys, dtype=torch.bool, device=value.device)
        return visible.tril(num_keys - num_rows) if is_causal else visible
    return may_attend(attention_mask).expand(-1, -1, num_rows, -1)
