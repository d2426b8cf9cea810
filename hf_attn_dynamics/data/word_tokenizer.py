# Licensed under the Apache License, Version 2.0.
"""Training of word-level tokenizers."""

import logging
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast


logger = logging.getLogger(__name__)

PAD, UNKNOWN = "<pad>", "<unk>"
# Words with apostrophes or hyphens (don't, state-of-the-art), separate contractions ('s), and other signs.
WORD = r"['’]?\w+(?:['’-]\w+)*|[^\w\s]"


def train_word_tokenizer(
    texts: Iterable[str], min_count: int = 3, vocab_size: int | None = None
) -> PreTrainedTokenizerFast:
    """Trains a lower-case word tokenizer, with `<unk>` for rare words (Snell et al. 2021, appendix A.8).

    Texts that are already tokenized by spaces are not split further, except for words with signs.

    Args:
        texts (`Iterable[str]`): Training texts, read once.
        min_count (`int`): Minimum number of occurrences of a word in the vocabulary.
        vocab_size (`int`, *optional*): Maximum size of the vocabulary, `<pad>` and `<unk>` included, which keeps the
            most frequent words; `None` for all words.

    Returns:
        [`PreTrainedTokenizerFast`]: ids are 0 for `<pad>`, 1 for `<unk>`, then words sorted by frequency, ties in
        alphabetical order. No special tokens are added to a text.

    Raises:
        ValueError: if no word occurs `min_count` times, or `vocab_size` is less than 3.

    Example:
        >>> tokenizer = train_word_tokenizer(["A good film.", "It's a bad film."], min_count=2)
        >>> tokenizer.convert_ids_to_tokens(tokenizer("A good film!")["input_ids"])
        ['a', '<unk>', 'film', '<unk>']
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of strings, got a string.")
    if min_count < 1:
        raise ValueError(f"min_count must be at least 1, got {min_count}.")
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    splitter = pre_tokenizers.Split(Regex(WORD), "removed", invert=True)
    counts = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    words = sorted(
        (word for word, count in counts.items() if count >= min_count), key=lambda word: (-counts[word], word)
    )
    if not words:
        raise ValueError(f"no word of the texts occurs min_count={min_count} times; lower it or add text.")
    if vocab_size is not None:
        if vocab_size < 3:
            raise ValueError(f"vocab_size must be at least 3 for {PAD}, {UNKNOWN} and a word, got {vocab_size}.")
        if len(words) + 2 < vocab_size:
            logger.warning(
                "The texts only give %d tokens instead of vocab_size=%d; lower min_count.", len(words) + 2, vocab_size
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
