# Licensed under the Apache License, Version 2.0.
"""Targets of guided heads: patterns, masks and row weights of a batch, shared by all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .batch_targets import check_visible, rows_of_target
from .guidance_settings import LOSSES, GuidanceSettings, target_columns
from .packing import Packing
from .patterns import NEIGHBOURS, PatternRows, exact_dtype, pattern_function, token_set
from .token_mask import check_mask_shape, non_padding


@dataclass(frozen=True)
class Tokens:
    """Query or key tokens of a batch of sentences.

    Args:
        ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): `None` if only embeddings are given.
        mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 for padding; `None` for no padding.
        shape (`tuple[int, int]`): `(batch, length)`.
        device (`torch.device`): Device of the model's inputs.
        mask_name (`str`): Name of the mask, for messages.

    Raises:
        ValueError: if the mask is not of shape `(batch, length)`.
    """

    ids: torch.Tensor | None
    mask: torch.Tensor | None
    shape: tuple[int, int]
    device: torch.device
    mask_name: str = "attention_mask"

    def __post_init__(self):
        # The model also accepts masks with a row for each token.
        check_mask_shape(self.mask_name, self.mask, self.shape, needed_by="guidance")

    def real(self) -> torch.Tensor:
        """Mask of the non-padding tokens, a boolean tensor of shape `(batch, length)`."""
        return non_padding(self.mask, self.shape, self.device)


@dataclass(frozen=True)
class LayerTargets:
    """Targets of the guided heads of a layer, in the precision and on the device of its queries.

    Args:
        names (`tuple[str, ...]`): Pattern or target of each group.
        heads (`slice` or `torch.LongTensor`): The guided heads, grouped by pattern.
        starts (`list[int]`): Index of the first head of each pattern, followed by the number of guided heads.
        groups (`list[torch.Tensor]`): For each pattern in turn: `keys` and `weights` of shape `(batch, rows, k)`, see
            [`PatternRows`]; `scale` of shape `(batch, rows)`, a factor of the weights; `constant` of shape
            `(batch, rows)`, the part of a row's squared error that does not depend on attention (`Σ P²`, minus twice
            the overlap in uniform rows); `uniform` of shape `(batch, rows)`, the target weight of each visible key in
            uniform rows, 0 in others, which only attention with sinks needs; `coefficient` of shape `(batch, rows)`,
            the weight of each row's squared error divided by `unit`, 0 for ignored rows. All but the last may have a
            single row for all. `constant` is 0 for other losses than `squared`.
        losses (`list[int]`): Loss of each pattern, as an index into `LOSSES`.
        unit (`torch.Tensor`): Largest weight of a row. Gradients are stored divided by it: they are computed before
            the scale of the loss is known, and would underflow in half precision otherwise.
        key_mask (`torch.BoolTensor` of shape `(batch, keys)`, *optional*): True for non-padding keys.
        band (`tuple[int, int]`): Largest distance of visible keys before and after a row's position; -1 for no limit.
        packing (`Packing`, *optional*): Where the sentences are, if they share rows of the batch; all else is about
            the split sentences.
    """

    names: tuple[str, ...]
    heads: slice | torch.Tensor
    starts: list[int]
    groups: list[torch.Tensor]
    losses: list[int]
    unit: torch.Tensor
    key_mask: torch.Tensor | None
    band: tuple[int, int]
    packing: Packing | None = None


class GuidanceTargets:
    """Patterns, targets, masks and row weights of one batch, shared by all layers of a pass at one kind of site.

    Under causal attention and sliding windows, a pattern's target is restricted to the visible keys and rescaled to
    its original sum. Rows whose target has no visible key do not contribute to the loss of that pattern, nor does a
    sentence without "." contribute to `period`; means are still over all counted rows and sentences. For targets
    that the batch brings, `row_mean` and `code` are means over all rows of the batch that count and have a target.

    Args:
        guidance ([`GuidanceSettings`]): Settings of this kind of site.
        guided_heads (`dict[int, dict[str, list[int]]]`): Heads of each pattern in each guided layer.
        keys (`Tokens`): Key tokens.
        queries (`Tokens`, *optional*): Query tokens; defaults to `keys`.
        causal (`bool`): Whether attention is causal.
        counted (`torch.BoolTensor` of shape `(batch, rows)`, *optional*): Rows that the loss is averaged over;
            defaults to the non-padding tokens.
        sentences (`torch.BoolTensor` of shape `(batch,)`, *optional*): Sentences that the loss is averaged over;
            defaults to those with non-padding keys.
        columns (`dict[str, torch.Tensor]`, *optional*): The batch, with the columns of targets, see
            [`rows_of_target`].
        counts (`dict`, *optional*): For a part of an accumulated batch: the number of rows that count in the whole
            batch, by column of a target, and `fraction`, the fraction of its sentences that are in this part, by which
            the loss will be multiplied. By default the mean is over this batch.
        packing (`Packing`, *optional*): Where the sentences are, if they share rows of the batch; tokens and columns
            are those of the split sentences.

    Raises:
        ValueError: if a pattern needs token ids that are not given, or has several rows in cross-attention; if the
            column of a target is missing or invalid, or no row has a target and no counts are given.
    """

    def __init__(
        self,
        guidance: GuidanceSettings,
        guided_heads: dict[int, dict[str, list[int]]],
        keys: Tokens,
        queries: Tokens | None = None,
        *,
        causal: bool = False,
        counted: torch.Tensor | None = None,
        sentences: torch.Tensor | None = None,
        columns: Mapping[str, torch.Tensor] | None = None,
        counts: Mapping[str, Any] | None = None,
        packing: Packing | None = None,
    ):
        self.guidance, self.packing = guidance, packing
        self.reduction = guidance.reduction
        self.uniform_weight = 1.0 if guidance.edge_rows == "uniform" else 0.0
        self.guided_heads = guided_heads
        self.causal = causal
        self.real = keys.real()
        row_mask = None if queries is None else queries.real()
        names = {name for layer in guided_heads.values() for name in layer}
        forms = {name: form for name, form in (guidance.targets or {}).items() if name in names}
        self.rows = {name: self._rows(name, guidance, keys.ids, row_mask) for name in sorted(names - forms.keys())}

        with_keys = self.real.any(1)
        sentences = with_keys if sentences is None else sentences
        self.num_sentences = sentences.sum().clamp(min=1)
        if counted is None:
            counted = self.real if row_mask is None else row_mask
        self.counted = counted & (sentences & with_keys).unsqueeze(1)
        shape = (*(keys if queries is None else queries).shape, keys.shape[1])
        self.num_rows = {}
        for name, form in forms.items():
            self.rows[name] = rows_of_target(name, form, columns or {}, shape, self.real.device)
            self.num_rows[name] = self._number_of_rows(name, counts or {})
        # Number of visible keys of a row, without windows.
        self.visible = self._visible(None)
        self.key_mask = self.real
        # Accelerators would synchronise to tell that there is no padding.
        is_readable = self.real.device.type == "cpu" and not torch.compiler.is_compiling()
        if keys.mask is None or (is_readable and bool(self.real.all())):
            self.key_mask = None
        self._layers: dict[tuple, LayerTargets] = {}

    def _rows(
        self, name: str, guidance: GuidanceSettings, key_ids: torch.Tensor | None, row_mask: torch.Tensor | None
    ) -> PatternRows:
        if row_mask is not None and name in NEIGHBOURS:
            return pattern_function(name)(key_ids, self.real, row_mask)
        ids = guidance.token_ids(name)
        pattern = pattern_function(name) if ids is None else token_set(ids)
        rows = pattern(key_ids, self.real)
        if row_mask is not None and rows.keys.shape[1] != 1:
            raise ValueError(
                f"guidance pattern {name!r} returned {rows.keys.shape[1]} rows; at the cross site it must return a "
                "single row for all, with keys of shape (batch, 1, k)."
            )
        return rows

    def _number_of_rows(self, name: str, counts: Mapping[str, Any]) -> torch.Tensor:
        """Number of rows that the loss of a target is averaged over."""
        rows, column = self.rows[name], target_columns(name, "keys")[0]
        counted = self.counted & rows.counted
        check_visible(name, rows, self.real, counted)
        number = counted.sum()
        if column in counts:
            whole = torch.as_tensor(counts[column], device=number.device) * counts["fraction"]
            return torch.where(whole > 0, whole, 1)
        is_checked = not torch.compiler.is_compiling()
        if is_checked and not bool(number) and bool(self.counted.any()):
            raise ValueError(
                f"{column} has no target for any row that counts: all are -100, or weights of 0, or in rows that do "
                "not count, such as padding; leave such batches out."
            )
        return number.clamp(min=1)

    def row_counts(self) -> dict[str, torch.Tensor]:
        """Number of rows that count, a scalar for each column of a target."""
        return {
            target_columns(name, "keys")[0]: (self.counted & self.rows[name].counted).sum() for name in self.num_rows
        }

    def layer(
        self, layer: int, dtype: torch.dtype, device: torch.device, window: int | None = None
    ) -> LayerTargets | None:
        """Targets of one layer; `None` if it has no guided heads.

        Args:
            layer (`int`): Index of the layer.
            dtype (`torch.dtype`), device (`torch.device`): Dtype and device of the queries.
            window (`int`, *optional*): Size of a sliding window: visible keys are less than this distance away.
        """
        layout = self.guided_heads.get(layer)
        if not layout:
            return None
        key = (tuple((name, tuple(heads)) for name, heads in layout.items()), dtype, device, window)
        if key not in self._layers:
            dtype = torch.promote_types(dtype, torch.float32)
            self._layers[key] = self._layer_targets(layout, dtype, device, window)
        return self._layers[key]

    def _layer_targets(
        self, layout: dict[str, list[int]], dtype: torch.dtype, device: torch.device, window: int | None
    ) -> LayerTargets:
        heads, starts, groups = [], [0], []
        losses = [LOSSES.index(self.guidance.loss_of(name)) for name in layout]
        for name, of_pattern in layout.items():
            heads += of_pattern
            starts.append(len(heads))
            groups.append(self._group(name, len(of_pattern), window))
        largest = torch.stack([coefficient.max() for *_, coefficient in groups]).max()
        unit = torch.where(largest > 0, largest, 1.0)
        tensors = []
        for keys, *numbers, coefficient in groups:
            tensors += [keys.to(device), *(t.to(device, dtype) for t in (*numbers, coefficient / unit))]
        adjacent = heads == list(range(heads[0], heads[0] + len(heads)))
        index = slice(heads[0], heads[0] + len(heads)) if adjacent else torch.tensor(heads, device=device)
        key_mask = self.key_mask if self.key_mask is None else self.key_mask.to(device)
        reach = -1 if window is None else window - 1
        band = (reach, 0 if self.causal else reach)
        unit = unit.to(device, dtype)
        return LayerTargets(tuple(layout), index, starts, tensors, losses, unit, key_mask, band, self.packing)

    def _group(self, name: str, num_heads: int, window: int | None) -> tuple[torch.Tensor, ...]:
        """Tensors of a pattern as in `LayerTargets.groups`, before the division by `unit`."""
        rows = self.rows[name]
        exact = self.visible.dtype
        weights = rows.weights.to(exact)
        constant = weights.square().sum(-1)
        scale = torch.ones_like(constant)
        counted = self.counted if rows.counted is None else self.counted & rows.counted
        loss = self.guidance.loss_of(name)
        if self.causal or window is not None:
            whole, seen = weights.sum(-1), self._seen(rows.keys, weights, window)
            unseen = (whole != 0) & (seen == 0)
            scale = torch.where(seen == 0, 0, whole / torch.where(seen == 0, 1, seen))
            constant = self._seen(rows.keys, weights.square(), window) * scale.square()
            counted = counted & ~unseen
        uniform = torch.zeros_like(constant[:, :1])
        if rows.uniform is not None:
            # ‖H − 1/n‖² = ΣH² − 2/n + 1/n; a row of zeros instead (`edge_rows: zero`) leaves ΣH².
            uniform = self.uniform_weight * rows.uniform / self._visible(window)
            constant = constant - uniform
        if loss in ("mass", "avoid") and rows.uniform is not None:
            # These rows attend to no key in particular.
            counted = counted & ~rows.uniform
        if loss != "squared":
            constant = torch.zeros_like(constant)
        coefficient = self._weights_of(counted, num_heads, self.num_rows.get(name))
        if rows.included is not None:
            coefficient = coefficient * rows.included.unsqueeze(1)
        return rows.keys, rows.weights, scale, constant, uniform, coefficient

    def row_weights(self, num_heads: int) -> torch.Tensor:
        """Weight of the loss of each row in the reduction over heads, rows and sentences, of shape `(batch, rows)`.

        Args:
            num_heads (`int`): Number of heads that the loss is averaged over.
        """
        return self._weights_of(self.counted, num_heads)

    def _weights_of(self, counted: torch.Tensor, num_heads: int, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Weights of rows; `num_rows` is the number of rows that the loss of a target is averaged over."""
        exact = self.visible.dtype
        if self.reduction == "paper":
            return counted / self.num_sentences.to(exact)
        longest = (self.visible * self.counted).amax(1, keepdim=True).clamp(min=1) if self.reduction == "code" else 1
        if num_rows is not None:
            weights = counted / (num_heads * num_rows.to(exact))
            return weights if self.reduction != "code" else weights / longest
        elements = self.counted.sum(1, keepdim=True).clamp(min=1).to(exact) * longest
        return counted / self.num_sentences.to(exact) / (num_heads * elements)

    def _visible(self, window: int | None) -> torch.Tensor:
        """Number of visible non-padding keys of each row, at least 1, of shape `(batch, rows)` or `(batch, 1)`."""
        if self.causal or window is not None:
            visible = self._within_reach(self.real.long(), window)
        else:
            visible = self.real.sum(1, keepdim=True)
        return visible.clamp(min=1).to(exact_dtype(self.real.device))

    def _within_reach(self, by_key: torch.Tensor, window: int | None) -> torch.Tensor:
        """Sum of the values `by_key` over the visible keys of each row, both of shape `(batch, length)`."""
        sums = by_key.cumsum(1)
        if window is None:
            return sums
        before = nn.functional.pad(sums, (window, 0))[:, : sums.shape[1]]
        if self.causal:
            return sums - before
        last = torch.arange(sums.shape[1], device=sums.device).add(window - 1).clamp(max=sums.shape[1] - 1)
        return sums[:, last] - before

    def _seen(self, keys: torch.Tensor, weights: torch.Tensor, window: int | None) -> torch.Tensor:
        """Sum of the weights over the visible non-padding keys of each row, of shape `(batch, rows)`."""
        weights = weights * self.real.gather(1, keys.flatten(1)).view_as(keys)
        if keys.shape[1] == 1:
            # One row for all may have as many keys as there are rows: avoid a tensor of all pairs.
            by_key = weights.new_zeros(self.real.shape).scatter_add(1, keys[:, 0], weights[:, 0])
            return self._within_reach(by_key, window)
        own = torch.arange(keys.shape[1], device=keys.device)[:, None]
        seen = keys <= own if self.causal else torch.ones_like(keys, dtype=torch.bool)
        if window is not None:
            seen = seen & ((keys - own).abs() < window)
        return (weights * seen).sum(-1)
