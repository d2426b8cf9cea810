# Licensed under the Apache License, Version 2.0.
"""Which queries [`masked_heads`] changes: chosen tokens, and chosen steps of `generate()`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...models.head_roles import HeadLayer
from ...models.number_checks import is_integer
from ...models.pruned_attention import given_cache
from ..model_views import ModelView, generates, parts_of
from ..running import named_arguments


Positions = Iterable[int] | torch.Tensor


class ChosenQueries:
    """Chooses the queries of each forward pass by their indices in the sequence, and by the step of `generate()`.

    Args:
        positions (`dict`, *optional*): Chosen indices, or masks of shape `(length,)` or `(batch, length)`, by kind of
            site; all queries of other kinds are chosen.
        steps (iterable of `int`, *optional*): Chosen steps; all by default.

    Raises:
        ValueError: if an index or a step is no number of at least 0, or a mask is not boolean or has another shape.
    """

    def __init__(self, positions: Mapping[str, Positions] | None, steps: Iterable[int] | None):
        self.positions = {kind: _checked_positions(kind, value) for kind, value in (positions or {}).items()}
        self.steps = None if steps is None else _checked_numbers("steps", steps)
        self.depth, self.start, self.step = 0, 0, 0
        self.has_cache = False

    def follow(self, view: ModelView, model: nn.Module) -> None:
        """Follows the forward passes of a model; passes of its parts belong to them."""
        for part in parts_of(model):
            view.before(part, self._begin, first=True)
            view.after(part, self._end, always=True)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.depth += 1
        if self.depth == 1:
            cache = given_cache(named_arguments(module, args, kwargs))
            self.has_cache = cache is not None
            self.start = 0 if cache is None else int(cache.get_seq_length())
            self.step = self.step + 1 if self.start else 0

    def _end(self, module: nn.Module, inputs: tuple, outputs: Any) -> None:
        self.depth -= 1

    def mask(
        self, layer: HeadLayer, z: torch.Tensor, for_each_sequence: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        """Chosen queries of a layer, of shape `(batch or 1, length)`; `None` for all.

        Args:
            layer (`HeadLayer`): The layer.
            z (`torch.Tensor` of shape `(batch, length, heads, head_dim)`): Its head outputs.
            for_each_sequence (callable): Repeats values of examples for their beams.

        Raises:
            ValueError: if the step of `generate()` is not known, or a mask has another batch size.
        """
        kind, length = layer.site.kind, z.shape[1]
        chosen = None
        if kind in self.positions:
            given, start = self.positions[kind], 0 if kind == "encoder" else self.start
            if isinstance(given, frozenset):
                chosen = torch.tensor([[start + index in given for index in range(length)]], device=z.device)
            else:
                rows = given.to(z.device)[:, start : start + length]
                chosen = nn.functional.pad(rows, (0, length - rows.shape[1]), value=False)
                if len(chosen) > 1:
                    chosen = for_each_sequence(layer, "positions", chosen, z)
        if self.steps is None:
            return chosen
        if generates() and not self.has_cache:
            raise ValueError("steps of generate() are told apart by its cache: pass use_cache=True.")
        if self.start and length > 1:
            raise ValueError(
                f"steps count passes of one token, but this one reads {length} tokens after {self.start} cached ones: "
                "leave out assisted generation and prefill_chunk_size, or give positions instead of steps."
            )
        if self.step not in self.steps:
            return torch.zeros(1, length, dtype=torch.bool, device=z.device)
        return chosen


def _checked_positions(kind: str, value: Any) -> frozenset[int] | torch.Tensor:
    if not torch.is_tensor(value):
        return _checked_numbers("positions", value)
    if value.dtype != torch.bool or value.dim() not in (1, 2):
        raise ValueError(
            f"positions of the {kind} must be indices, or a boolean tensor of shape (length,) or (batch, length), got "
            f"{value.dtype} of shape {tuple(value.shape)}."
        )
    return value if value.dim() == 2 else value[None]


def _checked_numbers(name: str, values: Any) -> frozenset[int]:
    numbers = [*values] if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    for number in numbers:
        if not is_integer(number) or number < 0:
            raise ValueError(f"{name} must be integers of at least 0, got {number!r}.")
    return frozenset(map(int, numbers))
