# Licensed under the Apache License, Version 2.0.
"""Texts from local files or the Hub, tokenized into blocks of equal length or single sentences."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow.compute
from datasets import Dataset, Features, IterableDataset, List, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from .files import TABLES, find_files, kind_of, read_lines, read_paragraphs
from .tables import Column, check_source, open_table, strings


AnyDataset = TypeVar("AnyDataset", Dataset, IterableDataset)

EXTENSIONS = (".txt", *TABLES)
TEXT = Features({"text": Value("string")})


def load_texts(
    files: str | Path | Iterable[str | Path] | None,
    dataset_name: str | None,
    dataset_config: str | None = None,
    split: str = "train",
    text_column: Column = "text",
    streaming: bool = False,
    encoding: str = "utf-8",
) -> Dataset | IterableDataset:
    """Loads texts that are not blank from local files or a dataset on the Hub.

    Args:
        files (`str`, `Path` or a list of these, *optional*):
            Files, folders (all supported files below them, sorted) or glob patterns, also of different types: `.txt`
            (one text per line), `.jsonl`, `.json` (an array of objects, or lines), `.csv`, `.tsv` (no quoting),
            `.parquet`, each also compressed, as `.gz`. Files with another suffix, such as `news.train.it`, are read as
            `.txt`. Duplicate files are read once.
        dataset_name (`str`, *optional*): Dataset for `datasets.load_dataset`, instead of `files`.
        dataset_config (`str`, *optional*): Configuration of that dataset.
        split (`str`): Split of that dataset.
        text_column (`str` or `int`): Column of the texts: a name, or an index, from 0, in CSV and TSV files without
            header; ignored for `.txt`.
        streaming (`bool`): Whether to read during iteration, instead of into the cache of `datasets`.
        encoding (`str`): Encoding of the files, except `.parquet`.

    Returns:
        `datasets.Dataset`, or `datasets.IterableDataset` if `streaming`, with the column `"text"`.

    Raises:
        ValueError: unless exactly one of `files` and `dataset_name` is given; or if a file is empty, of an unknown
            type, in another encoding, without `text_column`, or has a cell there that is not a string.
        FileNotFoundError: if a file is missing or a pattern matches nothing.
    """
    return _load_texts(files, dataset_name, dataset_config, split, text_column, streaming, False, encoding)


def pack_blocks(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, block_size: int, num_proc: int | None = None
) -> AnyDataset:
    """Tokenizes texts and packs them into contiguous blocks of `block_size` tokens.

    Texts are tokenized without special tokens and joined by the separator (`sep_token`, or else `eos_token`). The
    stream is divided into blocks of `block_size - 2` tokens, between `cls_token` (or else `bos_token`) and the
    separator. An incomplete last block is dropped. Blocks do not depend on batches or processes.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): Texts in a column `"text"`.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.
        block_size (`int`): Length of a block, special tokens included, at least 3.
        num_proc (`int`, *optional*): Number of processes that tokenize; not for an `IterableDataset`.

    Returns:
        A dataset of the same class with the columns `input_ids` (int32) and `attention_mask` (int8, all ones), each of
        length `block_size`.

    Raises:
        ValueError: if `block_size` is less than 3, the tokenizer has no boundary tokens, `num_proc` is given for a
            stream, or the texts are shorter than one block (for a stream, during iteration).
    """
    if block_size < 3:
        raise ValueError(f"block_size must be at least 3 (two special tokens and another one), got {block_size}.")
    first, last = boundary_token_ids(tokenizer)
    features = Features({"input_ids": List(Value("int32"))})
    tokens = _map(dataset, _tokenize, {"tokenizer": tokenizer, "special": False}, features, num_proc, "Tokenizing")
    features = Features(
        {
            "input_ids": List(Value("int32"), length=block_size),
            "attention_mask": List(Value("int8"), length=block_size),
        }
    )
    arguments = {"tokens": tokens, "first": first, "last": last, "block_size": block_size}
    return _from_generator(_generate_blocks, features, arguments, isinstance(dataset, IterableDataset))


def pad_sentences(dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> AnyDataset:
    """Tokenizes each text with special tokens, truncated to `max_length`; collators add padding.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): Texts in a column `"text"`.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.
        max_length (`int`): Maximum length of an example, special tokens included.

    Returns:
        A dataset of the same class with the columns `input_ids` (int32) and `attention_mask` (int8, all ones).

    Raises:
        ValueError: if `max_length` only has room for special tokens.
    """
    special = tokenizer.num_special_tokens_to_add()
    if max_length <= special:
        raise ValueError(f"max_length must be greater than the number of special tokens, {special}, got {max_length}.")
    features = Features({"input_ids": List(Value("int32")), "attention_mask": List(Value("int8"))})
    arguments = {"tokenizer": tokenizer, "special": True, "truncation": True, "max_length": max_length}
    return _map(dataset, _tokenize, arguments, features, None, "Tokenizing")


def boundary_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Ids of the boundary tokens: `cls_token`, or else `bos_token`; and `sep_token`, or else `eos_token`.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.

    Raises:
        ValueError: if it lacks either.
    """
    first = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    last = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if first is None or last is None:
        raise ValueError(
            "tokenizer needs a cls_token or bos_token to begin an example, and a sep_token or eos_token to end it; "
            "add them with tokenizer.add_special_tokens()."
        )
    return first, last


def _load_texts(
    files: list[str] | None,
    dataset_name: str | None,
    dataset_config: str | None,
    split: str,
    text_column: Column,
    streaming: bool,
    documents: bool,
    encoding: str = "utf-8",
) -> Dataset | IterableDataset:
    """[`load_texts`]; with `documents`, a text in a `.txt` file is a paragraph between blank lines."""
    check_source(files, dataset_name, dataset_config, split)
    if dataset_name:
        return _load_hub_texts(dataset_name, dataset_config, split, text_column, streaming)
    paths = find_files(files, EXTENSIONS, plain_text=True)
    for path in paths:
        if next(_read_texts(path, text_column, documents, encoding), None) is None:
            raise ValueError(f"files: {path} is empty; leave it out.")
    # With size and time, since `datasets` identifies cached datasets by these arguments.
    versions = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    arguments = {"versions": versions, "text_column": text_column, "documents": documents, "encoding": encoding}
    return _from_generator(_generate_texts, TEXT, arguments, streaming)


def _load_hub_texts(
    name: str, config: str | None, split: str, text_column: str, streaming: bool
) -> Dataset | IterableDataset:
    dataset = load_dataset(name, config, split=split, streaming=streaming)
    if dataset.features is None:
        columns = dict.fromkeys(next(iter(dataset), {}))
    else:
        columns = dict(dataset.features)
    if text_column not in columns:
        raise ValueError(f"text_column {text_column!r} is not a column of {name}; choose one of {', '.join(columns)}.")
    kind = columns[text_column]
    if kind is not None and getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ValueError(
            f"text_column {text_column!r} of {name} has the type {kind}, not strings; choose another column."
        )
    dataset = dataset.select_columns(text_column)
    dataset = dataset if text_column == "text" else dataset.rename_column(text_column, "text")
    return dataset.filter(_are_texts, batched=True)


def _are_texts(batch: dict[str, list[str | None]]) -> list[bool]:
    return [bool(text and text.strip()) for text in batch["text"]]


def _from_generator(
    generate: Callable[..., Iterator[dict]], features: Features, arguments: dict, streaming: bool
) -> Dataset | IterableDataset:
    if streaming:
        return IterableDataset.from_generator(generate, features=features, gen_kwargs=arguments)
    try:
        return Dataset.from_generator(generate, features=features, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        # The generator's own error describes the invalid input.
        if isinstance(error.__cause__, ValueError):
            raise error.__cause__ from None
        raise


def _generate_texts(
    versions: list[tuple[str, int, int]], text_column: Column, documents: bool, encoding: str
) -> Iterator[dict[str, str]]:
    for path, _, _ in versions:
        for text in _read_texts(Path(path), text_column, documents, encoding):
            yield {"text": text}


def _read_texts(path: Path, text_column: Column, documents: bool, encoding: str) -> Iterator[str]:
    """Iterates over the texts of one file that are not blank."""
    if kind_of(path) in TABLES:
        table = open_table(path, not isinstance(text_column, int), encoding=encoding)
        cells = table.stream("text_column", text_column)
    else:
        cells = read_lines(path, encoding)
        if documents:
            cells = ("\n".join(line for _, line in lines) for lines in read_paragraphs(path, encoding))
    return (text for text in strings("text_column", text_column, str(path), cells) if text.strip())


def _map(
    dataset: AnyDataset, function, arguments: dict, features: Features, num_proc: int | None, description: str
) -> AnyDataset:
    if isinstance(dataset, IterableDataset):
        if num_proc is not None:
            raise ValueError(f"num_proc={num_proc} has no effect on a stream; leave it out.")
        extra = {}
    else:
        extra = {"num_proc": num_proc, "desc": description}
    columns = dataset.column_names or ["text"]
    return dataset.map(function, batched=True, fn_kwargs=arguments, features=features, remove_columns=columns, **extra)


def _tokenize(batch: dict, tokenizer: PreTrainedTokenizerBase, special: bool, **options) -> dict[str, list]:
    # verbose=False: no warning about texts longer than the model's positions, which are cut later.
    encoded = tokenizer(
        batch["text"],
        add_special_tokens=special,
        return_token_type_ids=False,
        return_attention_mask=special,
        verbose=False,
        **options,
    )
    return dict(encoded)


def _token_lists(tokens: Dataset | IterableDataset) -> Iterator[np.ndarray]:
    if isinstance(tokens, IterableDataset):
        for example in tokens:
            yield np.asarray(example["input_ids"], dtype=np.int32)
        return
    for table in tokens.with_format("arrow").iter(1000):
        for chunk in table.column("input_ids").chunks:
            offsets = chunk.offsets.to_numpy()
            values = chunk.values.to_numpy()
            for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
                yield values[begin:end]


def _generate_blocks(
    tokens: Dataset | IterableDataset, first: int, last: int, block_size: int
) -> Iterator[dict[str, list[int]]]:
    inner = block_size - 2
    mask = [1] * block_size
    pending: list[np.ndarray] = []
    size, total = 0, 0
    for number, ids in enumerate(_token_lists(tokens)):
        pending += [ids] if number == 0 else [np.array([last], dtype=np.int32), ids]
        added = len(ids) + (number > 0)
        size, total = size + added, total + added
        if size < inner:
            continue
        stream = np.concatenate(pending)
        for begin in range(0, size - inner + 1, inner):
            yield {"input_ids": [first, *stream[begin : begin + inner].tolist(), last], "attention_mask": mask}
        size %= inner
        pending = [stream[len(stream) - size :]]
    if total < inner:
        raise ValueError(
            f"block_size={block_size} needs {inner} tokens of text, but all texts have {total} tokens; lower it or "
            "add text."
        )


def token_counts(examples: Dataset | IterableDataset, vocab_size: int, limit: int | None = None) -> np.ndarray:
    """Counts the occurrences of each token, special tokens included.

    Args:
        examples (`datasets.Dataset` or `datasets.IterableDataset`): Examples with a column `input_ids`.
        vocab_size (`int`): Size of the vocabulary.
        limit (`int`, *optional*): Number of examples to count, from the first; `None` for all.

    Returns:
        `np.ndarray` of shape `(vocab_size,)`, int64.

    Raises:
        ValueError: if `limit` is less than 1, or a token is not below `vocab_size`.

    Example:
        >>> token_counts(Dataset.from_dict({"input_ids": [[1, 3, 3], [2]]}), 5)
        array([0, 1, 1, 2, 0])
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all examples, got {limit}.")
    if limit is not None:
        examples = examples.take(min(limit, len(examples)) if isinstance(examples, Dataset) else limit)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in examples.select_columns("input_ids").with_format("arrow").iter(1000):
        ids = pyarrow.compute.list_flatten(table.column("input_ids")).to_numpy()
        if ids.max(initial=-1) >= vocab_size:
            raise ValueError(f"vocab_size must be greater than all tokens, up to {ids.max()}, got {vocab_size}.")
        counts += np.bincount(ids, minlength=vocab_size)
    return counts
