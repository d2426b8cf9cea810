# Licensed under the Apache License, Version 2.0.
"""Tokenizers of whole words."""

import logging
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


logger = logging.getLogger(__name__)

PAD, UNKNOWN = "<pad>", "<unk>"
# Words with what is joined to them (don't, state-of-the-art), contractions that stand alone ('s), other signs.
WORD = r"['’]?\w+(?:['’-]\w+)*|[^\w\s]"


def train_word_tokenizer(
    texts: Iterable[str], min_count: int = 3, vocab_size: int | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of words in lower case; rare ones are `<unk>` (Snell et al. 2021, appendix A.8).

    Texts that are split into words by spaces already stay so, but for words that hold signs.

    Args:
        texts (`Iterable[str]`): Texts to learn from, read once.
        min_count (`int`): How often a word must occur to have an id.
        vocab_size (`int`, *optional*): Most ids, `<pad>` and `<unk>` included: of the words that occur so often, the
            most frequent ones. All of them by default.

    Returns:
        [`PreTrainedTokenizerFast`]: ids are 0 for `<pad>`, 1 for `<unk>`, and then by frequency, words of the same one
        in alphabetical order. No special tokens are added to a text.

    Raises:
        ValueError: if no word occurs so often, or `vocab_size` has no room for one.

    Example:
        >>> tokenizer = train_word_tokenizer(["A good film.", "It's a bad film."], min_count=2)
        >>> tokenizer.convert_ids_to_tokens(tokenizer("A good film!")["input_ids"])
        ['a', '<unk>', 'film', '<unk>']
    """
    if isinstance(texts, str):
        raise ValueError("texts is a single string, which would be read letter by letter; give a list of strings.")
    if min_count < 1:
        raise ValueError(f"min_count must be at least 1, got {min_count}.")
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    splitter = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    counts = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    words = sorted(
        (word for word, count in counts.items() if count >= min_count), key=lambda word: (-counts[word], word)
    )
    if not words:
        raise ValueError(f"no word of the texts occurs min_count={min_count} times; lower it or give more text.")
    if vocab_size is not None:
        if vocab_size < 3:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 3, for {PAD}, {UNKNOWN} and a word.")
        if len(words) + 2 < vocab_size:
            logger.warning(
                "The texts gave only %d of vocab_size=%d ids: %d words occur min_count=%d times or more.",
                len(words) + 2,
                vocab_size,
                len(words),
                min_count,
            )
        words = words[: vocab_size - 2]
    vocabulary = {word: index for index, word in enumerate([PAD, UNKNOWN, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_input_names=["input_ids", "attention_mask"],
    )
