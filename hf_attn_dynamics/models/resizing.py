# Licensed under the Apache License, Version 2.0.
"""Vocabularies that change their size: every table of a model that has a row for each word follows."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from .compat import initialise, mark_initialised
from .number_checks import is_integer
from .precision import at_least_single


# Of the covariance of the old rows, in the noise of new ones, as in Transformers.
_NOISE = 1e-9
# Tokens without which models are not built, or read nothing, in the vocabulary of each size.
_NAMED_TOKENS = {"vocab_size": ["pad_token_id"], "decoder_vocab_size": ["pad_token_id", "decoder_start_token_id"]}


def new_size(current: int, new_num_tokens: int | None, pad_to_multiple_of: int | None) -> int:
    """How many words there are to be.

    Args:
        current (`int`): How many there are.
        new_num_tokens (`int`, *optional*): How many are asked for; `current` without it.
        pad_to_multiple_of (`int`, *optional*): What the number is rounded up to a multiple of.

    Raises:
        ValueError: if an argument is no such number.

    Example:
        >>> new_size(60, None, 8), new_size(60, 67, None)
        (64, 67)
    """
    if pad_to_multiple_of is not None and not (is_integer(pad_to_multiple_of) and pad_to_multiple_of >= 1):
        # The first sentence is that of Transformers, for those who look for it.
        raise ValueError(
            f"Asking to pad the embedding matrix to a multiple of `{pad_to_multiple_of}`, which is not and integer. "
            "Please make sure to pass an integer, at least 1, as pad_to_multiple_of."
        )
    if new_num_tokens is not None and not (is_integer(new_num_tokens) and new_num_tokens >= 1):
        raise ValueError(f"new_num_tokens must be a whole number, at least 1, or None, got {new_num_tokens!r}.")
    count = current if new_num_tokens is None else int(new_num_tokens)
    return count if pad_to_multiple_of is None else -(-count // pad_to_multiple_of) * pad_to_multiple_of


def check_new_sizes(config: PreTrainedConfig, check: str, **sizes: int | None) -> None:
    """Refuses sizes with which a configuration could not be loaded again, before anything is changed.

    Args:
        config (`PreTrainedConfig`): It stays as it is.
        check (`str`): Name of the method by which it checks itself.
        sizes: Its new values.

    Raises:
        ValueError: if a token that the configuration names, such as padding, would be gone; or what the check raises.
    """
    for size, names in _NAMED_TOKENS.items():
        count = sizes.get(size)
        for name in names:
            token = getattr(config, name, None)
            if count is not None and token is not None and not token < count:
                raise ValueError(
                    f"{count} tokens have no {name} {token} among them; keep more, or change it in the configuration."
                )
    changed = copy.deepcopy(config)
    for name, value in sizes.items():
        setattr(changed, name, value)
    getattr(changed, check)()


@torch.no_grad()
def resize_table(model: nn.Module, owner: nn.Module, name: str, count: int, mean_resizing: bool) -> None:
    """Gives a table a row for each of so many words; those that it has stay, as far as there is room.

    Args:
        model (`nn.Module`): What initialises new rows, as those of a new model.
        owner (`nn.Module`), name (`str`): Where the table is: an `nn.Embedding`, or an `nn.Linear` of a subclass that
            takes the same arguments, with a row for each word of its output.
        count (`int`): How many rows.
        mean_resizing (`bool`): Whether new rows start near the mean of the old ones, as in Transformers, and not as in
            a new model. New biases likewise.
    """
    old = getattr(owner, name)
    if len(old.weight) == count:
        return  # its parameters may be in an optimizer already
    like = {"device": old.weight.device, "dtype": old.weight.dtype}
    if isinstance(old, nn.Embedding):
        new = type(old)(count, old.embedding_dim, old.padding_idx, **like)
    else:
        new = type(old)(old.in_features, count, bias=old.bias is not None, **like)
    setattr(owner, name, new)
    initialise(model, new)
    mark_initialised(new)  # else `post_init` would draw it anew
    for (_, parameter), before in zip(new.named_parameters(), old.parameters()):
        kept = min(count, len(before))
        parameter[:kept] = before[:kept]
        if mean_resizing and count > kept:
            centred = at_least_single(before - before.mean(0))
            noise = torch.randn(count - kept, len(before), dtype=centred.dtype, device=centred.device)
            noise = noise @ centred.view(len(before), -1) * (_NOISE / len(before)) ** 0.5
            parameter[kept:] = before.mean(0) + noise.view(-1, *before.shape[1:]).to(before.dtype)
        parameter.requires_grad_(before.requires_grad)
    new.train(old.training)


class VocabularyMixin:
    """A model whose configuration has a `vocab_size`, and perhaps a `target_vocab_size`.

    It goes first among the bases of a class, which says where its tables of words are.
    """

    def _word_tables(self) -> Iterable[tuple[nn.Module, str]]:
        """Owners and names of the tables that have a row for each word, source words where there are two kinds."""
        return [(self, "embeddings")]

    def _target_tables(self) -> Iterable[tuple[nn.Module, str]]:
        """Those that have one for each target word."""
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
        """Changes the number of words; where the configuration has no `target_vocab_size`, of target words as well.

        Args:
            new_num_tokens (`int`, *optional*): How many words; those at the end go or come.
            pad_to_multiple_of (`int`, *optional*): What the number is rounded up to a multiple of.
            mean_resizing (`bool`): Whether new rows start near the mean of the old ones, and not as in a new model.

        Returns:
            `nn.Embedding`: the table of the words.

        Raises:
            ValueError: if an argument is no such number, or a word that the configuration names would be gone.
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
        self.vocab_size = count  # as Transformers notes it
        return self.get_input_embeddings()

    def _resize(self, tables: list, count: int, sizes: dict[str, Any], mean_resizing: bool) -> None:
        check_new_sizes(self.config, "check_values", **sizes)
        for owner, name in tables:
            resize_table(self, owner, name, count, mean_resizing)
        for name, value in sizes.items():
            setattr(self.config, name, value)


class TranslationVocabularyMixin(VocabularyMixin):
    """A model of source and target words; see [`VocabularyMixin`]."""

    def resize_decoder_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> None:
        """Changes the number of target words, and `target_vocab_size`; arguments as of `resize_token_embeddings`.

        Raises:
            ValueError: if source and target share one table, an argument is no such number, or a word that the
                configuration names would be gone.
        """
        if getattr(self.config, "share_encoder_decoder_embeddings", False):
            raise ValueError(
                "source and target share one table of embeddings (share_encoder_decoder_embeddings=True); call "
                "resize_token_embeddings()."
            )
        tables = list(self._target_tables())
        current = len(getattr(*tables[0]).weight)
        count = new_size(current, new_num_tokens, pad_to_multiple_of)
        self._resize(tables, count, {"target_vocab_size": count}, mean_resizing)


class HeadwiseVocabularyMixin:
    """A headwise model whose vocabulary changes its size; it goes before the stock class."""

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Changes the number of tokens as the stock class does; all that depends on it follows.

        Raises:
            ValueError: before anything is changed, if an argument is no number of tokens, or padding or a token that
                guidance names would be gone.
        """
        embeddings = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embeddings
        current = getattr(embeddings, "num_embeddings", self.config.vocab_size)
        # Padded here, since some stock classes resize a part of themselves to the number that was asked for.
        count = new_size(current, new_num_tokens, pad_to_multiple_of)
        sizes = {"vocab_size": count}
        if getattr(self.config, "share_encoder_decoder_embeddings", False):
            sizes["decoder_vocab_size"] = count
        check_new_sizes(self.config, "check_heads", **sizes)
        embeddings = super().resize_token_embeddings(count, mean_resizing=mean_resizing)
        output = self.get_output_embeddings()
        if output is not None and getattr(output, "bias", None) is not None and not self.config.tie_word_embeddings:
            for head in self.modules():
                # Heads such as BERT's hold the bias of their output layer twice. Where nothing is tied, those are two:
                # saved as one, it would be lost to the layer that reads it.
                if getattr(head, "decoder", None) is output:
                    head.bias = nn.Parameter(output.bias.detach().clone(), output.bias.requires_grad)
        return embeddings
