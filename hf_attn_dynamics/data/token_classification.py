# Licensed under the Apache License, Version 2.0.
"""Datasets for token classification (named entities): loading, alignment of labels with tokens, and back."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ..models.ignored_labels import IGNORED, is_labelled
from .files import find_files, kind_of, read_lines
from .tables import Column, declared_class, open_table


logger = logging.getLogger(__name__)

CONLL = (".conll", ".txt", ".tsv", ".bio", ".iob")
WORD_TABLES = (".jsonl", ".json", ".parquet")
TAG_COLUMNS = ("tags", "ner_tags", "labels")
TAG = re.compile(r"O|[BIES]-(\S+)")
COMMENT = re.compile(r"# ?[\w.:-]+ =(?: |$)")
WORDS = Features({"tokens": List(Value("string")), "tags": List(Value("string"))})


def load_token_classification(
    files: str | Path | Iterable[str | Path],
    token_column: Column | None = None,
    tag_column: Column | None = None,
    encoding: str = "utf-8",
) -> Dataset:
    """Loads sentences with entity tags from local files; tags are converted to IOB2.

    Tags may be in IOB1, IOB2 (Tjong Kim Sang & Veenstra 1999) or IOBES. As in the CoNLL scorer, an `I-` or `E-` tag
    that does not continue an entity of its type begins one. A warning counts tags that are invalid in all schemes,
    and another one sentences without words, which are skipped.

    Args:
        files (`str`, `Path` or a list of these):
            Files, folders or glob patterns, each also compressed, as `.gz`. `.conll`, `.txt`, `.tsv`, `.bio`, `.iob`,
            and files with a suffix that is not one of tables: one word per line, with columns separated by tabs, or by
            spaces in lines without tabs. Blank lines and lines that begin with `-DOCSTART-` separate sentences.
            Comments are lines that begin with `#` and have no tab although all others have one, have the form
            `# name = value`, or begin with `# ` and do not end with a tag.
            `.jsonl`, `.json`, `.parquet`: one sentence per row, with a list of words and a list of tags, which may be
            class ids if a Parquet file declares their names, as datasets on the Hub do.
        token_column (`int` or `str`, *optional*): Column of the words; by default the first, or `tokens` in a table.
        tag_column (`int` or `str`, *optional*):
            Column of the tags; by default the last, or `tags`, `ner_tags` or `labels` in a table.
        encoding (`str`): Encoding of the files, except `.parquet`.

    Returns:
        `datasets.Dataset` with the columns `tokens` and `tags` (`list[str]` of the same length).

    Raises:
        ValueError: if a file is empty, of an unknown type, in another encoding or without these columns; if a tag is
            not `O` or one of `B-`, `I-`, `E-`, `S-` with a type; or if the numbers of words and tags differ. The
            message has the line.
        FileNotFoundError: if a file is missing or a pattern matches nothing.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "train.conll")
        ...     _ = path.write_text("Ada I-PER\\nLovelace I-PER\\nslept O\\n\\nParis I-LOC\\n")
        ...     load_token_classification(path)["tags"][:]
        [['B-PER', 'I-PER', 'O'], ['B-LOC']]
    """
    paths = find_files(files, CONLL + WORD_TABLES, plain_text=True)
    tokens: list[list[str]] = []
    tags: list[list[str]] = []
    empty = 0
    for path in paths:
        read = _read_rows if kind_of(path) in WORD_TABLES else _read_conll
        found = len(tokens)
        for sentence in read(path, token_column, tag_column, encoding):
            if sentence:
                words, word_tags = zip(*sentence)
                tokens.append(list(words))
                tags.append(list(word_tags))
            else:
                empty += 1
        if len(tokens) == found:
            raise ValueError(f"files: {path} has no sentences with words; leave it out.")
    name = ", ".join(path.name for path in paths)
    if empty:
        logger.warning("%d of %d sentences of %s have no words and are skipped.", empty, empty + len(tokens), name)
    _warn_of_broken(tags, name)
    return Dataset.from_dict({"tokens": tokens, "tags": [iob2(sentence) for sentence in tags]}, features=WORDS)


def iob2(tags: Sequence[str]) -> list[str]:
    """Converts the tags of a sentence to IOB2, where every entity begins with `B-`.

    Args:
        tags (`list[str]`): Tags in IOB1, IOB2 or IOBES.

    Example:
        >>> iob2(["I-PER", "I-PER", "B-PER", "O", "S-LOC", "B-LOC", "E-LOC"])
        ['B-PER', 'I-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC']
    """
    converted = []
    for before, tag in zip(["O", *tags], tags):
        begins = tag[0] in "BS" or before[0] in "ES" or before[2:] != tag[2:]
        converted.append("O" if tag == "O" else f"{'B' if begins else 'I'}-{tag[2:]}")
    return converted


def entity_labels(tags: Iterable[Sequence[str]]) -> list[str]:
    """Labels of a model for the entity types in some sentences: `O`, then `B-` and `I-` of each type, sorted.

    Args:
        tags (iterable of `list[str]`): Tags of the sentences, in IOB2.

    Returns:
        `list[str]`: both labels of each type, even if only one occurs.

    Raises:
        ValueError: if all tags are `O`.

    Example:
        >>> entity_labels([["B-PER", "O"], ["B-LOC"]])
        ['O', 'B-LOC', 'I-LOC', 'B-PER', 'I-PER']
    """
    types = sorted({tag[2:] for sentence in tags for tag in sentence if tag != "O"})
    if not types:
        raise ValueError("there are no entities, all tags are O; check the column of the tags.")
    return ["O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]


def label_words(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    name: str = "the text",
) -> Dataset:
    """Tokenizes sentences, with the label of a word at its first token and -100 at all others.

    Sentences are truncated to `max_length`; a warning counts the lost words, for which [`word_tags`] returns `O`.

    Args:
        dataset (`datasets.Dataset`): Sentences, see [`load_token_classification`].
        tokenizer ([`PreTrainedTokenizerBase`]): A fast tokenizer. All words but the first are tokenized with a
            preceding space.
        labels (`list[str]`): Ordered labels of the model, see [`entity_labels`].
        max_length (`int`): Maximum length of a sentence, special tokens included.
        name (`str`): Name of the sentences, for messages.

    Returns:
        `datasets.Dataset`: the columns of the tokenizer, `labels`, `words` (the index of the word of each label that
        is not -100) and `tags` (the original tags of all words).

    Raises:
        ValueError: if the tokenizer is not a fast one, `max_length` only has room for special tokens, or a tag is not
            in `labels`.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not support `word_ids`; use a model with a fast tokenizer.")
    if max_length <= (special := tokenizer.num_special_tokens_to_add()):
        raise ValueError(f"max_length must be greater than the number of special tokens, {special}, got {max_length}.")
    number = {label: index for index, label in enumerate(labels)}
    unknown = sorted({tag for sentence in dataset["tags"] for tag in sentence} - set(number))
    if unknown:
        raise ValueError(
            f"{name} has the tag {unknown[0]}, but the labels are only {', '.join(labels)}; remove it, or add "
            "sentences with it to the training data."
        )

    def encode(batch: dict) -> dict[str, list]:
        sentences = [[" " * (index > 0) + word for index, word in enumerate(words)] for words in batch["tokens"]]
        encoded = tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=max_length)
        columns: dict[str, list] = {**encoded, "labels": [], "words": []}
        for row, tags in enumerate(batch["tags"]):
            word_ids = encoded.word_ids(row)
            first = [word != before and word is not None for before, word in zip([None, *word_ids], word_ids)]
            columns["words"].append([word for word, is_first in zip(word_ids, first) if is_first])
            columns["labels"].append(
                [number[tags[word]] if is_first else IGNORED for word, is_first in zip(word_ids, first)]
            )
        return columns

    encoded = dataset.map(encode, batched=True, remove_columns="tokens", desc="Tokenizing")
    lost = [len(tags) - len(words) for tags, words in zip(encoded["tags"], encoded["words"])]
    if any(lost):
        logger.warning(
            "%d words in %d of %d sentences of %s are truncated by max_length=%d: they are not trained on, and count "
            "as O in evaluation.",
            sum(lost),
            np.count_nonzero(lost),
            len(lost),
            name,
            max_length,
        )
    return encoded


def word_tags(
    predictions: np.ndarray, label_ids: np.ndarray, encoded: Dataset, labels: Sequence[str]
) -> list[list[str]]:
    """Predicted tags of all words of sentences encoded by [`label_words`]; `O` for truncated words.

    Args:
        predictions (`np.ndarray` of shape `(sentences, length)`): Id of the predicted label of each token.
        label_ids (`np.ndarray` of shape `(sentences, length)`): True labels, -100 where ignored.
        encoded (`datasets.Dataset`): The sentences, in the same order.
        labels (`list[str]`): Ordered labels of the model.

    Returns:
        `list[list[str]]`: one tag for each word of each sentence.
    """
    sentences = []
    for predicted, true, words, tags in zip(predictions, label_ids, encoded["words"], encoded["tags"], strict=True):
        sentence = ["O"] * len(tags)
        for word, label in zip(words, predicted[is_labelled(true)], strict=True):
            sentence[word] = labels[label]
        sentences.append(sentence)
    return sentences


def _read_conll(
    path: Path, token_column: Column | None, tag_column: Column | None, encoding: str
) -> Iterator[list[tuple[str, str]]]:
    token_column = 0 if token_column is None else token_column
    tag_column = -1 if tag_column is None else tag_column
    for argument, column in (("token_column", token_column), ("tag_column", tag_column)):
        if not isinstance(column, int):
            raise ValueError(f"{argument} must be an index, from 0, since {path} has no header, got {column!r}.")
    sentence: list[tuple[str, str]] = []
    lines = [*read_lines(path, encoding), ""]
    words = (line for line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-")))
    is_tabbed = all("\t" in line for line in words)
    for number, line in enumerate(lines, 1):
        # White space other than the separator may be part of a word; with tabs, also spaces.
        cells = [cell.strip(" \r") for cell in line.split("\t" if "\t" in line else " ")]
        if "\t" in line and any(cells):
            # Empty cells are columns, except after the last one.
            cells = cells[: max(index for index, cell in enumerate(cells) if cell) + 1]
        else:
            cells = [cell for cell in cells if cell]
        if not cells or cells[0].startswith("-DOCSTART-"):
            if sentence:
                yield sentence
            sentence = []
            continue
        has_both = all(-len(cells) <= column < len(cells) for column in (token_column, tag_column))
        tag = cells[tag_column] if has_both else ""
        if is_tabbed and line.startswith("#") and "\t" not in line or COMMENT.match(line):
            continue
        if line.startswith("# ") and not TAG.fullmatch(tag):
            continue
        if not has_both or len(cells) < 2:
            raise ValueError(
                f"line {number} of {path} has {len(cells)} columns, too few for token_column={token_column} and "
                f"tag_column={tag_column}."
            )
        if not cells[token_column]:
            raise ValueError(f"line {number} of {path} has no word in token_column={token_column}.")
        sentence.append((cells[token_column], _checked(tag, tag_column, f"line {number} of {path}")))


def _read_rows(
    path: Path, token_column: Column | None, tag_column: Column | None, encoding: str
) -> Iterator[list[tuple[str, str]]]:
    table = open_table(path, encoding=encoding)
    if token_column is None:
        token_column = "tokens"
    if tag_column is None:
        tag_column = next((name for name in TAG_COLUMNS if name in table.columns), TAG_COLUMNS[0])
    columns = table.cells("token_column", token_column), table.cells("tag_column", tag_column)
    names = table.class_names.get(tag_column)
    for number, (words, tags) in enumerate(zip(*columns), 1):
        where = f"row {number} of {path}"
        if names is not None and isinstance(tags, list):
            tags = [declared_class(names, tag) if isinstance(tag, int) else tag for tag in tags]
        for column, cells in ((token_column, words), (tag_column, tags)):
            if not isinstance(cells, list) or not all(isinstance(cell, str) for cell in cells):
                raise ValueError(f"{column!r} in {where} is {cells!r}, not a list of strings; convert it.")
        if len(words) != len(tags):
            raise ValueError(f"{where} has {len(words)} words, but {len(tags)} tags; each word needs one.")
        yield [(word, _checked(tag, tag_column, where)) for word, tag in zip(words, tags)]


def _checked(tag: str, column: Column, where: str) -> str:
    if not TAG.fullmatch(tag):
        raise ValueError(
            f"tag_column {column!r} has {tag!r} in {where}, which is neither O nor B-, I-, E- or S- with an entity "
            "type; pass the column of the tags."
        )
    return tag


def _warn_of_broken(tags: list[list[str]], name: str) -> None:
    """Warns of tags that are invalid in the scheme that fits the tags best."""
    pairs = [pair for sentence in tags for pair in zip(["O", *sentence], [*sentence, "O"])]
    if any(tag[0] in "ES" for sentence in tags for tag in sentence):
        scheme = "IOBES"
        broken = [
            (before, tag)
            for before, tag in pairs
            if (before[0] in "BI") != (tag[0] in "IE") or before[0] in "BI" and before[2:] != tag[2:]
        ]
    else:
        starts = [(before, tag) for before, tag in pairs if tag[0] == "I" and before[2:] != tag[2:]]
        breaks = [(before, tag) for before, tag in pairs if tag[0] == "B" and before[2:] != tag[2:]]
        # In IOB1, B- only follows an entity of the same type; in IOB2, I- never begins an entity.
        scheme, broken = ("IOB2", starts) if len(starts) <= len(breaks) else ("IOB1", breaks)
    if broken:
        before, tag = broken[0]
        logger.warning(
            "%d tags of %s are invalid in %s, such as %s after %s; entities begin wherever the type changes.",
            len(broken),
            name,
            scheme,
            tag,
            before,
        )
