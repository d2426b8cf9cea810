# Licensed under the Apache License, Version 2.0.
"""Alignment of words with the characters and the tokens of a text."""

from bisect import bisect_right
from collections.abc import Sequence
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


def encode_words(item: TextWithWords, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int | None]]:
    """Tokenizes a text with special tokens, and returns the index of the word of each token.

    A token belongs to the first word that ends after the token's start, so that a leading space belongs to the next
    word. Slow tokenizers, which have no offsets, tokenize the words separately.

    Args:
        item ([`CoreferenceItem`] or [`Tree`]): The text and its words.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.

    Returns:
        `tuple[list[int], list[int | None]]`: ids, not truncated, and word indices; `None` for special tokens.

    Example:
        >>> from hf_attn_dynamics.data import CoreferenceItem, Mention, train_byte_level_bpe
        >>> tokenizer = train_byte_level_bpe(["the king", "the queen"], vocab_size=265)
        >>> item = CoreferenceItem(("the", "king", "himself"), Mention(2, 3, 2), (Mention(0, 2, 1),))
        >>> encode_words(item, tokenizer)[1]
        [None, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, None]
    """
    if not tokenizer.is_fast:
        pieces = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in item.words]
        flat = [piece for word in pieces for piece in word]
        ids = tokenizer.build_inputs_with_special_tokens(flat)
        before = next(start for start in range(len(ids)) if ids[start : start + len(flat)] == flat)
        indices = [index for index, word in enumerate(pieces) for _ in word]
        return ids, [None] * before + indices + [None] * (len(ids) - before - len(flat))
    encoded = tokenizer(item.text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    words = words_at_offsets(encoded["offset_mapping"], item.spans)
    special = encoded["special_tokens_mask"]
    return encoded["input_ids"], [None if skip else word for word, skip in zip(words, special, strict=True)]


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
