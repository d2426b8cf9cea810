# Licensed under the Apache License, Version 2.0.
"""Hard-coded Gaussian attention (You, Sun & Iyyer 2020): weights that depend on positions alone.

Row p attends with a normal density centered at position p + offset, restricted to its visible keys. The attention has
no query and key projections; values and outputs are projected as usual.
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
    """Replaces an unused query or key projection: returns hidden states, truncated to the size of the heads."""

    def __init__(self, out_features: int):
        super().__init__()
        self.out_features = out_features

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states[..., : self.out_features]


class GaussianAttention(nn.Module):
    """Hard-coded attention: weights from normal densities, applied to the values.

    Args:
        offsets (`list[int]`): Offsets, assigned to the heads in equal blocks.
        std (`float`): Standard deviation of the densities, in tokens.
        num_heads (`int`): Number of heads.
    """

    def __init__(self, offsets: list[int], std: float, num_heads: int):
        super().__init__()
        self.offsets = [offset for offset in offsets for _ in range(num_heads // len(offsets))]
        self.std = std

    def extra_repr(self) -> str:
        return f"offsets={self.offsets}, std={self.std}"

    def keep(self, indices: list[int]) -> None:
        """Removes all heads but those with these indices among the present ones."""
        self.offsets = [self.offsets[index] for index in indices]

    def forward(
        self,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        num_rows: int,
        is_causal: bool,
        dropout: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the weights to the values, with dropout as in the kernels.

        Args:
            value (`torch.Tensor` of shape `(batch, heads, keys, head_dim)`): Values, cached ones included.
            attention_mask (`torch.Tensor` of shape `(batch or 1, 1, rows or 1, keys)`, *optional*): True for visible
                keys, or the additive mask of eager attention.
            num_rows (`int`): Number of rows; without a mask they have the last positions of the keys.
            is_causal (`bool`): Whether attention is causal.
            dropout (`float`): Dropout probability of the weights.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: output of shape `(batch, rows, heads, head_dim)`, and weights of
            shape `(batch, heads, rows, keys)`.
        """
        visible = _visible_keys(value, attention_mask, num_rows, is_causal)
        # Positions count visible keys: padding on either side has none.
        positions = visible.cumsum(-1)
        own = positions[..., -1] if is_causal else positions.diagonal(dim1=-2, dim2=-1)
        dtype = torch.promote_types(value.dtype, torch.float32)
        distance = (positions - own.unsqueeze(-1)).to(dtype)
        weights = {}
        for offset in dict.fromkeys(self.offsets):
            scores = ((distance - offset) / self.std).square() / -2
            # Rows without visible keys are padding, but must not be NaN.
            scores = scores.masked_fill(~visible, torch.finfo(dtype).min)
            weights[offset] = scores.softmax(-1).to(value.dtype)
        by_head = torch.cat([weights[offset] for offset in self.offsets], dim=1).expand(value.shape[0], -1, -1, -1)
        by_head = nn.functional.dropout(by_head, dropout, training=dropout > 0)
        return (by_head @ value).transpose(1, 2), by_head


def _visible_keys(
    value: torch.Tensor, attention_mask: torch.Tensor | None, num_rows: int, is_causal: bool
) -> torch.Tensor:
    """Boolean mask of the visible keys of each row, of shape `(batch or 1, 1, rows, keys)`."""
    num_keys = value.shape[2]
    if attention_mask is None:
        visible = torch.ones(1, 1, num_rows, num_keys, dtype=torch.bool, device=value.device)
        return visible.tril(num_keys - num_rows) if is_causal else visible
    return may_attend(attention_mask).expand(-1, -1, num_rows, -1)


def install_hard_coded_attention(model: PreTrainedModel, settings: dict[str, HardCodedSettings]) -> None:
    """Replaces learned attention by hard-coded attention; checkpoints may still contain query and key projections.

    Args:
        model (`PreTrainedModel`): A headwise model.
        settings (`dict[str, HardCodedSettings]`): Settings by kind of site, where attention is hard-coded.
    """
    dropped = set()
    for layer in locate_heads(model):
        if layer.site.kind in settings:
            if not roles_of(layer.module).keys:
                raise ValueError(
                    f"hard_coded is set for the {layer.site}, but {type(layer.module).__name__} has a single "
                    "projection to queries, keys and values: set hard_coded=None."
                )
            own = settings[layer.site.kind]
            layer.module.hard_coded = GaussianAttention(own.offsets, own.std, layer.num_heads)
            for name in roles_of(layer.module).score_projections:
                setattr(layer.module, name, Unprojected(layer.num_heads * layer.head_dim))
                dropped.add(re.escape(f"{layer.name}.{name}."))
            # Stock initialisation would access the projections.
            mark_initialised(layer.module)
    if dropped:
        ignore_left_over(model, dropped)
