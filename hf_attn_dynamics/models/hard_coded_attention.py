# Licensed under the Apache License, Version 2.0.
"""Hard-coded Gaussian attention (You, Sun & Iyyer 2020): weights that depend on positions alone.

Head h of row p attends with a normal density centred at position p + offset, restricted to the keys that the row sees.
Nothing of it is learnt: projections to queries and keys are gone, those to values and outputs stay.
"""

import re

import torch
from torch import nn
from transformers import PreTrainedModel

from .compat import ignore_left_over, mark_initialised
from .head_roles import locate_heads, roles_of
from .head_settings import HardCodedSettings
from .token_mask import may_attend


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


def install_hard_coded_attention(model: PreTrainedModel, settings: dict[str, HardCodedSettings]) -> None:
    """Takes the projections to queries and keys away where attention is hard-coded; checkpoints may still have them.

    Args:
        model (`PreTrainedModel`): A headwise model.
        settings (`dict[str, HardCodedSettings]`): Settings of each kind of site that has hard-coded attention.
    """
    dropped = set()
    for layer in locate_heads(model):
        if layer.site.kind in settings:
            own = settings[layer.site.kind]
            layer.module.hard_coded = GaussianAttention(own.offsets, own.std, layer.num_heads)
            for name in roles_of(layer.module).score_projections:
                setattr(layer.module, name, Unprojected(layer.num_heads * layer.head_dim))
                dropped.add(re.escape(f"{layer.name}.{name}."))
            # Initialisation by class would look for the projections.
            mark_initialised(layer.module)
    if dropped:
        ignore_left_over(model, dropped)
