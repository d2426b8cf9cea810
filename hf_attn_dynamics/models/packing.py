# Licensed under the Apache License, Version 2.0.
"""Packed batches: sentences that follow each other in one row, without padding, and do not attend to each other."""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .adapters import without_adapters
from .compat import flash_attention_forward, kernel_name
from .pruned_attention import given_cache
from .token_mask import num_sentences


BOUNDARIES = "cu_seq_lens_q"
# Keywords of kernels that describe packed sentences.
KERNEL_BOUNDARIES = (BOUNDARIES, "cu_seq_lens_k", "max_length_q", "max_length_k")
OWN_PACKAGE = __name__.split(".")[0]


@dataclass(frozen=True)
class Packing:
    """Where the sentences of a packed batch are.

    Sentences are split into a padded batch of shape `(sentences, longest)`, on which everything that is computed
    equals what is computed on sentences that were never packed.

    Args:
        first (`torch.LongTensor` of shape `(sentences,)`): Index of the first token of each sentence among the tokens
            of the batch, row by row.
        lengths (`torch.LongTensor` of shape `(sentences,)`): Number of tokens of each sentence. Together they are all
            tokens of the batch.
        rows (`tuple[int, int]`): Shape of the packed batch, `(batch, length)`.

    Example:
        >>> packing = Packing.of_positions(torch.tensor([[0, 1, 0, 1, 2]]), (1, 5))
        >>> packing.split(torch.tensor([[4, 5, 6, 7, 8]]), fill=0)
        tensor([[4, 5, 0],
                [6, 7, 8]])
    """

    first: torch.Tensor
    lengths: torch.Tensor
    rows: tuple[int, int]

    @classmethod
    def of_positions(cls, position_ids: torch.Tensor, rows: tuple[int, int]) -> "Packing | None":
        """Sentences that begin wherever a position is not the one after the last; `None` if each row is one sentence.

        Args:
            position_ids (`torch.Tensor` of shape `(batch, length)` or `(1, length)`): Positions of the tokens.
            rows (`tuple[int, int]`): `(batch, length)`.
        """
        begins = torch.ones(rows, dtype=torch.bool, device=position_ids.device)
        begins[:, 1:] = position_ids.diff(dim=1) != 1
        return cls._beginning_at(begins)

    @classmethod
    def of_lowest_positions(cls, position_ids: torch.Tensor, rows: tuple[int, int]) -> "Packing | None":
        """Sentences that begin at the lowest position of the batch, as flash attention finds them in a single row.

        See [`of_positions`] for the arguments.
        """
        begins = (position_ids == position_ids.min()).expand(rows).clone()
        begins[:, 0] = True
        return cls._beginning_at(begins)

    @classmethod
    def _beginning_at(cls, begins: torch.Tensor) -> "Packing | None":
        rows = tuple(begins.shape)
        first = begins.flatten().nonzero().flatten()
        if len(first) == rows[0]:
            return None
        end = first.new_tensor([rows[0] * rows[1]])
        return cls(first, first.diff(append=end), rows)

    @classmethod
    def of_boundaries(cls, boundaries: torch.Tensor, rows: tuple[int, int]) -> "Packing":
        """Sentences between boundaries.

        Args:
            boundaries (`torch.Tensor` of shape `(sentences + 1,)`): 0, and the number of tokens up to the end of each
                sentence, as in `cu_seq_lens_q`.
            rows (`tuple[int, int]`): `(batch, length)`.

        Raises:
            ValueError: if they do not rise from 0 to the number of tokens.
        """
        lengths = boundaries.long().diff()
        total = rows[0] * rows[1]
        if boundaries.dim() != 1 or not bool((boundaries[0] == 0) & (boundaries[-1] == total) & (lengths >= 0).all()):
            raise ValueError(
                f"{BOUNDARIES} must rise from 0 to {total}, the number of tokens of the batch, got "
                f"{boundaries.tolist()}."
            )
        filled = lengths > 0
        return cls(boundaries[:-1].long()[filled], lengths[filled], rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the split batch, `(sentences, longest)`."""
        return tuple(self.mask.shape)

    @cached_property
    def mask(self) -> torch.BoolTensor:
        """True for the tokens of the split batch, False for padding, of shape `(sentences, longest)`."""
        return torch.arange(int(self.lengths.max()), device=self.lengths.device) < self.lengths[:, None]

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """Index of each token of the split batch in the packed one; that of some token at padding."""
        within = torch.arange(self.mask.shape[1], device=self.first.device)
        return (self.first[:, None] + within).masked_fill(~self.mask, 0)

    @cached_property
    def _places(self) -> torch.Tensor:
        """Index of each token of the packed batch in the split one."""
        return self.mask.flatten().nonzero().flatten()

    def split(self, values: torch.Tensor, fill: float | None = None) -> torch.Tensor:
        """Splits values of tokens into sentences.

        Args:
            values (`torch.Tensor` of shape `(batch, length, ...)`): Values of the packed batch.
            fill (`float`, *optional*): Value at padding; by default those of some token.

        Returns:
            `torch.Tensor` of shape `(sentences, longest, ...)`
        """
        found = values.flatten(0, 1)[self._tokens.to(values.device)]
        if fill is None:
            return found
        mask = self.mask.to(values.device).reshape(*self.shape, *[1] * (found.dim() - 2))
        return found.masked_fill(~mask, fill)

    def split_heads(self, vectors: torch.Tensor) -> torch.Tensor:
        """[`split`] for queries or keys of shape `(batch, heads, length, head_dim)`."""
        return self.split(vectors.transpose(1, 2)).transpose(1, 2)

    def join_heads(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse of [`split_heads`]."""
        tokens = vectors.transpose(1, 2).flatten(0, 1)[self._places.to(vectors.device)]
        return tokens.unflatten(0, self.rows).transpose(1, 2)


def packing_of(model: PreTrainedModel, batch: Mapping[str, Any]) -> Packing | None:
    """Where the sentences of a batch are that a model with one stack keeps apart; `None` if each row is one sentence.

    Boundaries are `cu_seq_lens_q`, which some kernels read, or, in decoders without an attention mask, positions that
    begin anew. Flash attention reads these positions itself, in batches of one row.

    Args:
        model (`PreTrainedModel`): The model, which PEFT may have wrapped.
        batch (`dict`): Arguments of the forward pass.

    Raises:
        ValueError: if boundaries do not fit the batch or its attention mask; or if positions begin anew, but
            Transformers ignores that, since the model fills a cache or flash attention gets several rows, or it is
            not known whether the model makes its mask from them.
    """
    model = without_adapters(model)
    inputs = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if inputs is None or getattr(model.config, "is_encoder_decoder", False):
        return None
    rows, mask = tuple(inputs.shape[:2]), batch.get("attention_mask")
    if batch.get(BOUNDARIES) is not None:
        return _sentences_between(batch[BOUNDARIES], rows, mask)
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or given_cache(batch) is not None:
        return None
    if ALL_ATTENTION_FUNCTIONS.get(kernel_name(model.config)) is flash_attention_forward:
        return _sentences_of_flash_attention(model, positions, rows, mask)
    if mask is not None:
        return None
    packing = _sentences_by_position(model, positions, rows)
    if packing is not None and _fills_cache(model, batch):
        raise ValueError(
            "position_ids begin anew within a row, but sentences that share a row attend to each other while a cache "
            "is filled: pass use_cache=False, or padded sentences with an attention mask."
        )
    return packing


def _fills_cache(model: PreTrainedModel, batch: Mapping[str, Any]) -> bool:
    fills_cache = batch.get("use_cache")
    if fills_cache is None:
        fills_cache = getattr(model.config, "use_cache", False)
    # Transformers fills none while it checkpoints activations.
    return bool(fills_cache) and not (model.is_activation_checkpointing and model.training and torch.is_grad_enabled())


def count_sentences(model: PreTrainedModel, batch: Mapping[str, Any]) -> torch.Tensor:
    """[`number_of_sentences`] of a batch whose packing is not known yet.

    Args:
        model (`PreTrainedModel`): The model.
        batch (`dict`): Arguments of the forward pass, whose sentences may share rows.

    Raises:
        ValueError: see [`packing_of`].
    """
    return number_of_sentences(batch, packing_of(model, batch))


def number_of_sentences(batch: Mapping[str, Any], packing: Packing | None) -> torch.Tensor:
    """Number of non-empty sentences of a batch, a scalar, over which the guidance loss is averaged.

    Args:
        batch (`dict`): Arguments of the forward pass.
        packing ([`Packing`], *optional*): Where the sentences of a packed batch are.
    """
    return num_sentences(batch) if packing is None else torch.tensor(len(packing.lengths), device=packing.first.device)


# Compiled code cannot know the number of sentences.
@torch.compiler.disable
def _sentences_between(boundaries: torch.Tensor, rows: tuple[int, int], mask: torch.Tensor | None) -> Packing:
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            f"{BOUNDARIES} are given with an attention_mask that has padding, of which kernels read one or the other; "
            "leave one of them out."
        )
    return Packing.of_boundaries(boundaries, rows)


@torch.compiler.disable
def _sentences_by_position(model: PreTrainedModel, positions: torch.Tensor, rows: tuple[int, int]) -> Packing | None:
    by_position = masks_by_position(type(model))
    packing = None if by_position is False else Packing.of_positions(positions, rows)
    if packing is not None and by_position is None:
        raise ValueError(
            f"position_ids begin anew within a row, but the code of {type(model).__name__}, which may keep such "
            "sentences apart, cannot be read; pass padded sentences with an attention mask."
        )
    return packing


@torch.compiler.disable
def _sentences_of_flash_attention(
    model: PreTrainedModel, positions: torch.Tensor, rows: tuple[int, int], mask: torch.Tensor | None
) -> Packing | None:
    if mask is not None and not bool((mask != 0).all()):
        return None
    by_lowest = Packing.of_lowest_positions(positions, rows)
    begin_anew = by_lowest is not None or Packing.of_positions(positions, rows) is not None
    if begin_anew and (rows[0] > 1 or not masks_by_position(type(model))):
        why = "it reads them in batches of one row only" if rows[0] > 1 else "not all models pass them on to it"
        raise ValueError(
            f"position_ids begin anew within a row of flash attention, but {why}: pass {BOUNDARIES}, or padded "
            "sentences with an attention mask."
        )
    return by_lowest


@cache
def masks_by_position(model_class: type[PreTrainedModel]) -> bool | None:
    """Whether a model makes its causal mask from `position_ids`, so that packed sentences are kept apart.

    Returns:
        `bool`, *optional*: `None` for a class that is not of Transformers and whose code cannot be read.

    Example:
        >>> from transformers import LlamaModel, OPTModel
        >>> masks_by_position(LlamaModel), masks_by_position(OPTModel)
        (True, False)
    """
    is_read = True
    for cls in model_class.__mro__:
        if cls is PreTrainedModel:
            break
        if cls.__module__.split(".")[0] == OWN_PACKAGE:
            continue
        try:
            source = inspect.getsource(sys.modules[cls.__module__])
        except (OSError, TypeError, KeyError):
            is_read = False
            continue
        # As a keyword of the call, or of a dictionary that several calls take.
        calls = re.findall(r"(?:causal_mask|mask_function)\(([^()]*)", source)
        shared = re.findall(r"mask_kwargs = \{([^{}]*)", source)
        if any("position_ids" in arguments for arguments in calls + shared):
            return True
        if cls.__module__.startswith("transformers.models."):
            return False
    return False if is_read else None
