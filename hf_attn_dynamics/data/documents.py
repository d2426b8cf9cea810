# Licensed under the Apache License, Version 2.0.
"""Documents as lists of sentences, and sentence pairs for next-sentence prediction (Devlin et al. 2019)."""

import random
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from .tables import Column
from .text import _from_generator, _load_texts, _token_lists, _tokenize, boundary_token_ids


# An end mark with closing quotes and brackets, and white space, before a letter or an opening mark.
SENTENCE_END = re.compile(r"""[.!?…।።፧؟]+["'”’»)\]]*\s+(?=["'“‘«„¿¡(]|[^\W\d_])""")
SENTENCES = Features({"sentences": List(Value("string"))})
TOKENS = Features({"document": Value("int64"), "input_ids": List(Value("int32"))})
PAIRS = Features(
    {"input_ids": List(Value("int32")), "token_type_ids": List(Value("int8")), "next_sentence_label": Value("int64")}
)


def split_sentences(text: str) -> list[str]:
    """Splits each line of a text into sentences.

    A sentence ends with one of `. ! ? … । ። ፧ ؟` and closing quotes or brackets, if white space and an opening quote,
    a bracket or a letter that is not lower-case follow. Abbreviations are not recognised: "Dr. Roe" is split.

    Args:
        text (`str`): The text.

    Returns:
        `list[str]`: sentences that are not blank, without surrounding white space.

    Example:
        >>> split_sentences('It rained, e.g. in Jimma. "Really?" she asked.')
        ['It rained, e.g. in Jimma.', '"Really?" she asked.']
    """
    sentences = []
    for line in text.split("\n"):
        begin = 0
        for match in SENTENCE_END.finditer(line):
            if not line[match.end()].islower():
                sentences.append(line[begin : match.end()])
                begin = match.end()
        sentences.append(line[begin:])
    return [sentence.strip() for sentence in sentences if sentence.strip()]


def load_documents(
    files: str | Path | Iterable[str | Path] | None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    split: str = "train",
    text_column: Column = "text",
    split_lines: bool = True,
    encoding: str = "utf-8",
) -> Dataset:
    """Loads documents as lists of sentences, from local files or a dataset on the Hub.

    Args:
        files (`str`, `Path` or a list of these, *optional*):
            Files, see [`load_texts`]. In plain text, blank lines and the end of a file separate documents. In tables
            and on the Hub, a row is a document.
        dataset_name, dataset_config, split, text_column, encoding: See [`load_texts`].
        split_lines (`bool`): Whether to split lines with [`split_sentences`]; otherwise, a line is a sentence.

    Returns:
        `datasets.Dataset` with the column `"sentences"` (`list[str]`), without empty documents.

    Raises:
        ValueError: see [`load_texts`].
        FileNotFoundError: if a file is missing or a pattern matches nothing.
    """
    texts = _load_texts(files, dataset_name, dataset_config, split, text_column, False, True, encoding)
    return texts.map(
        _sentences,
        batched=True,
        fn_kwargs={"split_lines": split_lines},
        features=SENTENCES,
        remove_columns="text",
        desc="Splitting sentences",
    )


def sentence_pairs(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    seed: int = 0,
    short_probability: float = 0.1,
    random_probability: float = 0.5,
) -> Dataset:
    """Pairs `[CLS] A [SEP] B [SEP]` for masked language modelling with next-sentence prediction (Devlin et al. 2019).

    Sentences of a document are collected up to the target length, and divided at random into A and B. With
    `random_probability`, B is replaced by consecutive sentences of another document from a random one, and its
    sentences start the next pair. A pair that is too long loses tokens of its longer side, at the front or the back at
    random. If only one sentence was collected, because it is long, or the last or only one of its document, B comes
    from another document: short documents raise the fraction of such pairs above `random_probability`.

    The pairs are a pure function of documents, tokenizer and arguments; the global random state is not used.

    Args:
        documents (`datasets.Dataset`): Documents with a column `"sentences"` (`list[str]`), see [`load_documents`].
        tokenizer ([`PreTrainedTokenizerBase`]):
            The tokenizer. `bos_token` and `eos_token` replace a missing `cls_token` or `sep_token`. Every sentence is
            tokenized with a preceding space.
        max_length (`int`): Maximum length of a pair, special tokens included, at least 5.
        seed (`int`): Random seed.
        short_probability (`float`): Fraction of pairs whose target length is random, between 2 and the maximum.
        random_probability (`float`): Fraction of random B if both are possible.

    Returns:
        `datasets.Dataset`: every sentence occurs as A, or as B after its A. Columns:
        - `input_ids` (int32), without padding,
        - `token_type_ids` (int8): 0 up to the first separator, 1 after it; remove it for models with a single type,
        - `next_sentence_label`: 0 if B follows A, 1 if B comes from another document, as in `BertForPreTraining`.

    Raises:
        ValueError: if `max_length` is less than 5, a probability is not between 0 and 1, the column `"sentences"` is
            missing, the tokenizer has no boundary tokens, or fewer than two documents have tokens.

    Example:
        >>> from hf_attn_dynamics.data import train_byte_level_bpe
        >>> documents = Dataset.from_dict({"sentences": [["It rained.", "It stopped."], ["Cats purr.", "Dogs bark."]]})
        >>> tokenizer = train_byte_level_bpe(["It rained. Cats purr."], 261, kind="bert")
        >>> pairs = sentence_pairs(documents, tokenizer, max_length=64, short_probability=0, random_probability=0)
        >>> tokenizer.decode(pairs[0]["input_ids"]), pairs[0]["next_sentence_label"]
        ('[CLS] It rained.[SEP] It stopped.[SEP]', 0)
    """
    if max_length < 5:
        raise ValueError(f"max_length must be at least 5 (three special tokens and two others), got {max_length}.")
    for name, value in (("short_probability", short_probability), ("random_probability", random_probability)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}.")
    if "sentences" not in documents.column_names:
        raise ValueError(
            f'documents has no column "sentences", only {", ".join(documents.column_names)}; create it with '
            "load_documents() or split_sentences()."
        )
    first, last = boundary_token_ids(tokenizer)
    tokens = documents.map(
        _tokenize_sentences,
        with_indices=True,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer},
        features=TOKENS,
        remove_columns=documents.column_names,
        desc="Tokenizing",
    )
    if (number := len(tokens.unique("document"))) < 2:
        raise ValueError(
            f"documents must have at least two documents with text, got {number}; separate the documents of a text "
            "file by blank lines, or pass more files."
        )
    arguments = {
        "tokens": tokens,
        "first": first,
        "last": last,
        "longest": max_length - 3,
        "seed": seed,
        "short_probability": short_probability,
        "random_probability": random_probability,
    }
    return _from_generator(_generate_pairs, PAIRS, arguments, streaming=False)


def _sentences(batch: dict, split_lines: bool) -> dict[str, list]:
    split = split_sentences if split_lines else _lines
    return {"sentences": [sentences for text in batch["text"] if (sentences := split(text))]}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.strip()]


def _tokenize_sentences(batch: dict, indices: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """One row for each sentence with tokens."""
    rows = [
        # With a space, since the first sentence of a document would otherwise reveal a random B.
        (document, f" {text}")
        for document, sentences in zip(indices, batch["sentences"], strict=True)
        for text in sentences
        if text.strip()
    ]
    ids = _tokenize({"text": [text for _, text in rows]}, tokenizer, special=False)["input_ids"] if rows else []
    kept = [(document, tokens) for (document, _), tokens in zip(rows, ids, strict=True) if tokens]
    return {"document": [document for document, _ in kept], "input_ids": [tokens for _, tokens in kept]}


def _generate_pairs(
    tokens: Dataset,
    first: int,
    last: int,
    longest: int,
    seed: int,
    short_probability: float,
    random_probability: float,
) -> Iterator[dict]:
    sentences = list(_token_lists(tokens))
    _, starts = np.unique(tokens["document"][:], return_index=True)
    bounds = [*starts.tolist(), len(sentences)]

    def reach(begin: int, stop: int, target: int) -> int:
        """End of the fewest sentences from `begin`, at least one, that have `target` tokens, or `stop`."""
        length = 0
        for end in range(begin, stop):
            length += len(sentences[end])
            if length >= target:
                return end + 1
        return stop

    for number, (begin, stop) in enumerate(pairwise(bounds)):
        # One generator per document, so that its pairs do not depend on preceding documents.
        rng = random.Random(f"{seed}-{number}")
        while begin < stop:
            target = rng.randint(2, longest) if rng.random() < short_probability else longest
            end = reach(begin, stop, target)
            cut = rng.randint(begin + 1, max(begin + 1, end - 1))
            is_random = cut == end or rng.random() < random_probability
            a = np.concatenate(sentences[begin:cut])
            if is_random:
                other = rng.randrange(len(bounds) - 2)
                other += other >= number
                start = rng.randrange(bounds[other], bounds[other + 1])
                b = sentences[start : reach(start, bounds[other + 1], target - len(a))]
            else:
                b = sentences[cut:end]
            a, b = _truncate(a, np.concatenate(b), longest, rng)
            yield {
                "input_ids": [first, *a.tolist(), last, *b.tolist(), last],
                "token_type_ids": [0] * (len(a) + 2) + [1] * (len(b) + 1),
                "next_sentence_label": int(is_random),
            }
            begin = cut if is_random else end


def _truncate(a: np.ndarray, b: np.ndarray, longest: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    spans = [[0, len(a)], [0, len(b)]]
    for _ in range(len(a) + len(b) - longest):
        span = max(spans, key=lambda span: span[1] - span[0])
        if rng.random() < 0.5:
            span[0] += 1
        else:
            span[1] -= 1
    return a[slice(*spans[0])], b[slice(*spans[1])]
