# Licensed under the Apache License, Version 2.0.
"""Alignment of words with the characters and the tokens of a text."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from transformers import PreTrainedTokenizerBase


Spans = tuple[tuple[int, int], ...]


class TextWithWords(Protocol):
    """A text with its words: [`CoreferenceItem`] or [`Tree`]."""

    words: tuple[str, ...]
    text: str
    spans: Spans


def find_words(words: Sequence[str], text: str, source: str) -> Spans:
    """Finds the character span of each word in a text.

    Args:
        words (sequence of `str`): Words in the order of the text.
        text (`str`): The text.
        source (`str`): Origin of the text, for messages.

    Raises:
        ValueError: if a word is empty, or not found after the preceding words.

    Example:
        >>> find_words(["do", "n't"], "I don't", "an example")
        ((2, 4), (4, 7))
    """
    spans, end = [], 0
    for word in words:
        start = text.find(word, end)
        if not word or start < 0:
            raise ValueError(f"{source}: {word!r} does not follow the preceding words in {text!r}.")
        end = start + len(word)
        spans.append((start, end))
    return tuple(spans)


def encode_words(
    item: TextWithWords | Sequence[str], tokenizer: PreTrainedTokenizerBase, as_target: bool = False
) -> tuple[list[int], list[int | None]]:
    """Tokenizes a text with special tokens, and returns the index of the word of each token.

    A token belongs to the first word that ends after the token's start, so that a leading space belongs to the next
    word. Slow tokenizers, which have no offsets, tokenize the words separately.

    Args:
        item ([`CoreferenceItem`], [`Tree`] or list of `str`): The text and its words, or words that are separated by
            spaces.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.
        as_target (`bool`): Whether to tokenize as the target of a translation (`text_target`).

    Returns:
        `tuple[list[int], list[int | None]]`: ids, not truncated, and word indices; `None` for special tokens.

    Raises:
        ValueError: if a word of a list is empty.

    Example:
        >>> from hf_attn_dynamics.data import CoreferenceItem, Mention, train_byte_level_bpe
        >>> tokenizer = train_byte_level_bpe(["the king", "the queen"], vocab_size=265)
        >>> item = CoreferenceItem(("the", "king", "himself"), Mention(2, 3, 2), (Mention(0, 2, 1),))
        >>> encode_words(item, tokenizer)[1]
        [None, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, None]
        >>> encode_words(["the", "king"], tokenizer)[1]
        [None, 0, 1, 1, 1, 1, None]
    """
    if isinstance(item, (list, tuple)):
        words, text = item, " ".join(item)
        spans = find_words(words, text, "a list of words")
    else:
        words, text, spans = item.words, item.text, item.spans
    tokenize = partial(_tokenize_target, tokenizer) if as_target else tokenizer
    if not tokenizer.is_fast:
        pieces = [tokenize(word, add_special_tokens=False)["input_ids"] for word in words]
        flat = [piece for word in pieces for piece in word]
        ids = tokenizer.build_inputs_with_special_tokens(flat)
        before = next(start for start in range(len(ids) + 1) if ids[start : start + len(flat)] == flat)
        indices = [index for index, word in enumerate(pieces) for _ in word]
        return ids, [None] * before + indices + [None] * (len(ids) - before - len(flat))
    encoded = tokenize(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    found = words_at_offsets(encoded["offset_mapping"], spans)
    special = encoded["special_tokens_mask"]
    return encoded["input_ids"], [None if skip else word for word, skip in zip(found, special, strict=True)]


def _tokenize_target(tokenizer: PreTrainedTokenizerBase, text: str, **settings):
    return tokenizer(text_target=text, **settings)


def words_at_offsets(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[int]:
    """Index of the word of each token: the first word that ends after the token's start, or the last word.

    Args:
        offsets (list of `tuple[int, int]`): Character span of each token in the text.
        spans (tuple of `tuple[int, int]`): Character span of each word, at least one.

    Example:
        >>> words_at_offsets([(0, 3), (3, 4), (4, 8)], ((0, 3), (4, 8)))
        [0, 1, 1]
    """
    ends = [end for _, end in spans]
    return [min(bisect_right(ends, start), len(ends) - 1) for start, _ in offsets]
