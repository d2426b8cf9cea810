# Licensed under the Apache License, Version 2.0.
"""Resizing of vocabularies, with all embeddings and output layers of a model."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .compat import initialise, mark_initialised
from .number_checks import is_integer
from .precision import at_least_single


# Factor of the covariance of the old rows for the noise of new rows, as in Transformers.
_NOISE = 1e-9
# Special tokens that each vocabulary must contain.
_NAMED_TOKENS = {"vocab_size": ["pad_token_id"], "decoder_vocab_size": ["pad_token_id", "decoder_start_token_id"]}


def new_size(current: int, new_num_tokens: int | None, pad_to_multiple_of: int | None) -> int:
    """New size of a vocabulary.

    Args:
        current (`int`): Current size.
        new_num_tokens (`int`, *optional*): Requested size; defaults to `current`.
        pad_to_multiple_of (`int`, *optional*): Rounds the size up to a multiple of this.

    Raises:
        ValueError: if an argument is not an integer of at least 1.

    Example:
        >>> new_size(60, None, 8), new_size(60, 67, None)
        (64, 67)
    """
    if pad_to_multiple_of is not None and not (is_integer(pad_to_multiple_of) and pad_to_multiple_of >= 1):
        # The first sentence is Transformers' message, so that users find it.
        raise ValueError(
            f"Asking to pad the embedding matrix to a multiple of `{pad_to_multiple_of}`, which is not and integer. "
            "Please make sure to pass an integer, at least 1, as pad_to_multiple_of."
        )
    if new_num_tokens is not None and not (is_integer(new_num_tokens) and new_num_tokens >= 1):
        raise ValueError(f"new_num_tokens must be an integer of at least 1, or None, got {new_num_tokens!r}.")
    count = current if new_num_tokens is None else int(new_num_tokens)
    return count if pad_to_multiple_of is None else -(-count // pad_to_multiple_of) * pad_to_multiple_of


def check_new_sizes(config: PreTrainedConfig, check: str, **sizes: int | None) -> None:
    """Checks that a configuration stays valid with new sizes, without changing it.

    Args:
        config (`PreTrainedConfig`): The configuration.
        check (`str`): Name of its method that checks it.
        sizes: Its new values.

    Raises:
        ValueError: if a special token, such as padding, would be removed; or if `check` raises it.
    """
    for size, names in _NAMED_TOKENS.items():
        count = sizes.get(size)
        for name in names:
            token = getattr(config, name, None)
            if count is not None and token is not None and not token < count:
                raise ValueError(
                    f"{count} tokens do not include {name} {token}; keep more, or change it in the configuration."
                )
    changed = copy.deepcopy(config)
    for name, value in sizes.items():
        setattr(changed, name, value)
    getattr(changed, check)()


@torch.no_grad()
def resize_table(model: nn.Module, owner: nn.Module, name: str, count: int, mean_resizing: bool) -> None:
    """Resizes a table with a row for each word; keeps as many old rows as fit.

    Args:
        model (`nn.Module`): Model that initialises new rows.
        owner (`nn.Module`), name (`str`): Module and attribute of the table: an `nn.Embedding`, or an `nn.Linear` with
            an output for each word, or a subclass with the same constructor arguments.
        count (`int`): Number of rows.
        mean_resizing (`bool`): Whether new rows and biases start near the mean of the old ones, as in Transformers,
            instead of as in a new model.
    """
    old = getattr(owner, name)
    if len(old.weight) == count:
        return  # keep its parameters, which may be in an optimizer
    like = {"device": old.weight.device, "dtype": old.weight.dtype}
    if isinstance(old, nn.Embedding):
        new = type(old)(count, old.embedding_dim, old.padding_idx, **like)
    else:
        new = type(old)(old.in_features, count, bias=old.bias is not None, **like)
    setattr(owner, name, new)
    initialise(model, new)
    mark_initialised(new)  # otherwise `post_init` would initialise it again
    for (_, parameter), before in zip(new.named_parameters(), old.parameters()):
        kept = min(count, len(before))
        parameter[:kept] = before[:kept]
        if mean_resizing and count > kept:
            centered = at_least_single(before - before.mean(0))
            noise = torch.randn(count - kept, len(before), dtype=centered.dtype, device=centered.device)
            noise = noise @ centered.view(len(before), -1) * (_NOISE / len(before)) ** 0.5
            parameter[kept:] = before.mean(0) + noise.view(-1, *before.shape[1:]).to(before.dtype)
        parameter.requires_grad_(before.requires_grad)
    new.train(old.training)


class VocabularyMixin:
    """A model whose configuration has a `vocab_size`, and optionally a `target_vocab_size`.

    It is the first base of a class, which defines `_word_tables` and `_target_tables`.
    """

    def _word_tables(self) -> Iterable[tuple[nn.Module, str]]:
        """Owners and names of the tables with a row for each (source) word."""
        return [(self, "embeddings")]

    def _target_tables(self) -> Iterable[tuple[nn.Module, str]]:
        """Owners and names of the tables with a row for each target word."""
        return []

    def get_input_embeddings(self) -> nn.Embedding:
        owner, name = next(iter(self._word_tables()))
        return getattr(owner, name)

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        owner, name = next(iter(self._word_tables()))
        setattr(owner, name, value)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resizes the vocabulary and, if the configuration has no `target_vocab_size`, also that of the target.

        Args:
            new_num_tokens (`int`, *optional*): Number of words; words are added or removed at the end.
            pad_to_multiple_of (`int`, *optional*): Rounds the number up to a multiple of this.
            mean_resizing (`bool`): Whether new rows start near the mean of the old ones, instead of as in a new model.

        Returns:
            `nn.Embedding`: the input embeddings.

        Raises:
            ValueError: if an argument is not an integer of at least 1, or a special token would be removed.
        """
        if new_num_tokens is None and pad_to_multiple_of is None:
            return self.get_input_embeddings()
        count = new_size(self.config.vocab_size, new_num_tokens, pad_to_multiple_of)
        sizes: dict[str, Any] = {"vocab_size": count}
        tables = list(self._word_tables())
        if getattr(self.config, "share_encoder_decoder_embeddings", False):
            sizes["target_vocab_size"] = None
        if sizes.get("target_vocab_size", getattr(self.config, "target_vocab_size", None)) is None:
            tables += self._target_tables()
        self._resize(tables, count, sizes, mean_resizing)
        self.vocab_size = count  # as Transformers does
        return self.get_input_embeddings()

    def _resize(self, tables: list, count: int, sizes: dict[str, Any], mean_resizing: bool) -> None:
        check_new_sizes(self.config, "check_values", **sizes)
        for owner, name in tables:
            resize_table(self, owner, name, count, mean_resizing)
        for name, value in sizes.items():
            setattr(self.config, name, value)


class TranslationVocabularyMixin(VocabularyMixin):
    """A model with source and target vocabularies; see [`VocabularyMixin`]."""

    def resize_decoder_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> None:
        """Resizes the target vocabulary; see `resize_token_embeddings` for the arguments.

        Raises:
            ValueError: if source and target share embeddings, an argument is not an integer of at least 1, or a
                special token would be removed.
        """
        if getattr(self.config, "share_encoder_decoder_embeddings", False):
            raise ValueError(
                "source and target share embeddings (share_encoder_decoder_embeddings=True); call "
                "resize_token_embeddings()."
            )
        tables = list(self._target_tables())
        current = len(getattr(*tables[0]).weight)
        count = new_size(current, new_num_tokens, pad_to_multiple_of)
        self._resize(tables, count, {"target_vocab_size": count}, mean_resizing)


class HeadwiseVocabularyMixin:
    """A headwise model whose vocabulary can be resized; precedes the stock class."""

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resizes the token embeddings as the stock class does, with all sizes and biases that depend on them.

        Raises:
            ValueError: if an argument is not an integer of at least 1, or padding or a token that guidance names would
                be removed; the model is then unchanged.
        """
        embeddings = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embeddings
        current = getattr(embeddings, "num_embeddings", self.config.vocab_size)
        # Rounded up here, since some stock classes resize a part of the model to the requested number.
        count = new_size(current, new_num_tokens, pad_to_multiple_of)
        sizes = {"vocab_size": count}
        if getattr(self.config, "share_encoder_decoder_embeddings", False):
            sizes["decoder_vocab_size"] = count
        check_new_sizes(self.config, "check_heads", **sizes)
        embeddings = super().resize_token_embeddings(count, mean_resizing=mean_resizing)
        output = self.get_output_embeddings()
        if output is not None and getattr(output, "bias", None) is not None and not self.config.tie_word_embeddings:
            for head in self.modules():
                # Heads such as BERT's register the bias of their output layer twice. Without tying, the copies must be
                # separate tensors: saved as one, the bias of the layer would be lost.
                if getattr(head, "decoder", None) is output:
                    head.bias = nn.Parameter(output.bias.detach().clone(), output.bias.requires_grad)
        return embeddings
