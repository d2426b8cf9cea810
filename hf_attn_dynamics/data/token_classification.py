# Licensed under the Apache License, Version 2.0.
"""Sentences whose words have tags of entities: from CoNLL column files or tables, to tokens with labels and back."""

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
    """Sentences as words with tags of entities, from local files, in their order; tags are given in IOB2.

    Tags may be in IOB1, IOB2 (Tjong Kim Sang & Veenstra 1999) or IOBES. All are read as the CoNLL scorer does: an
    entity also begins where an `I-` or `E-` has nothing of its type to go on with. Tags that none of the schemes would
    have there are counted in one warning. So are sentences without words, which are dropped.

    Args:
        files (`str`, `Path` or a list of these):
            Files, folders or glob patterns, each also compressed, as `.gz`. `.conll`, `.txt`, `.tsv`, `.bio`, `.iob`,
            and files named with a suffix that no table has: a word a line, columns separated by tabs, or by spaces if
            a line has none, blank lines between sentences. Lines that begin with `-DOCSTART-` separate, too. Comments
            are lines that begin with `#` and have no tab although all others have one, are like `# name = value`, or
            begin with `# ` and do not end in a tag.
            `.jsonl`, `.json`, `.parquet`: a sentence a row, with a list of words and one of tags, which may be numbers
            of classes where a Parquet file declares their names, as data sets of the Hub do.
        token_column (`int` or `str`, *optional*): Column of the words: by default the first, or `tokens` in a table.
        tag_column (`int` or `str`, *optional*):
            Column of the tags: by default the last, or `tags`, `ner_tags` or `labels` in a table.
        encoding (`str`): The encoding of the files, except `.parquet`.

    Returns:
        `datasets.Dataset` with the columns `tokens` and `tags` (`list[str]`, of the same length).

    Raises:
        ValueError: if a file is empty, of an unknown kind, in another encoding or without these columns; if a tag
            is not `O` or one of `B-`, `I-`, `E-`, `S-` with a type; if words and tags differ in number. The message
            has the line.
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
                words, of_words = zip(*sentence)
                tokens.append(list(words))
                tags.append(list(of_words))
            else:
                empty += 1
        if len(tokens) == found:
            raise ValueError(f"files: {path} has no sentence with words; add some or leave it out.")
    name = ", ".join(path.name for path in paths)
    if empty:
        logger.warning("%d of %d sentences of %s have no word and are left out.", empty, empty + len(tokens), name)
    _warn_of_broken(tags, name)
    return Dataset.from_dict({"tokens": tokens, "tags": [iob2(sentence) for sentence in tags]}, features=WORDS)


def iob2(tags: Sequence[str]) -> list[str]:
    """The tags of a sentence in IOB2, where every entity begins with `B-`.

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
    """Labels of a model for the entities of some sentences: `O`, then `B-` and `I-` of each type, by name.

    Args:
        tags (iterable of `list[str]`): Tags of the sentences, in IOB2.

    Returns:
        `list[str]`: both labels of a type, even where only one occurs.

    Raises:
        ValueError: if there is no entity.

    Example:
        >>> entity_labels([["B-PER", "O"], ["B-LOC"]])
        ['O', 'B-LOC', 'I-LOC', 'B-PER', 'I-PER']
    """
    types = sorted({tag[2:] for sentence in tags for tag in sentence if tag != "O"})
    if not types:
        raise ValueError("there is no entity to learn, all tags are O; check the column of the tags.")
    return ["O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]


def label_words(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    name: str = "the text",
) -> Dataset:
    """Tokens of sentences, with the label of a word at its first token and -100 at all others.

    Sentences are cut to `max_length` tokens; one warning counts the words that are lost. [`word_tags`] gives these
    `O`, so that they count in evaluation.

    Args:
        dataset (`datasets.Dataset`): Sentences, as of [`load_token_classification`].
        tokenizer ([`PreTrainedTokenizerBase`]): A fast tokenizer. All words but the first are tokenized as after a
            space.
        labels (`list[str]`): Labels of the model in their order, see [`entity_labels`].
        max_length (`int`): Most tokens of a sentence, special tokens included.
        name (`str`): What to call the sentences in the warning.

    Returns:
        `datasets.Dataset`: The columns that the tokenizer gives, `labels`, `words` (the number of the word of each
        label that is not -100) and `tags` (as they were, of all words).

    Raises:
        ValueError: if the tokenizer does not say which word a token is of, `max_length` leaves no room for one, or a
            tag is not one of `labels`.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which word a token is of (`word_ids`); use a model whose "
            "tokenizer is a fast one."
        )
    if max_length <= (special := tokenizer.num_special_tokens_to_add()):
        raise ValueError(f"max_length is {max_length}, but {special} special tokens are added; make it larger.")
    number = {label: index for index, label in enumerate(labels)}
    unknown = sorted({tag for sentence in dataset["tags"] for tag in sentence} - set(number))
    if unknown:
        raise ValueError(
            f"{name} has the tag {unknown[0]}, but the labels are only {', '.join(labels)}; remove it, or add "
            "sentences with it to the training text."
        )

    def encode(batch: dict) -> dict[str, list]:
        sentences = [[" " * (place > 0) + word for place, word in enumerate(words)] for words in batch["tokens"]]
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
            "%d words in %d of %d sentences of %s have no token within max_length=%d: they are not learnt, and count "
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
    """Predicted tags of all words of sentences that were encoded by [`label_words`]; `O` for words that were lost.

    Args:
        predictions (`np.ndarray` of shape `(sentences, length)`): Number of the predicted label of each token.
        label_ids (`np.ndarray` of shape `(sentences, length)`): True labels beside them, -100 where none counts.
        encoded (`datasets.Dataset`): The sentences, in the same order.
        labels (`list[str]`): Labels of the model in their order.

    Returns:
        `list[list[str]]`: for each sentence as many tags as it has words.
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
            raise ValueError(f"{argument} is {column!r}, but columns of {path} have no names; give positions, from 0.")
    sentence: list[tuple[str, str]] = []
    lines = [*read_lines(path, encoding), ""]
    words = (line for line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-")))
    is_tabbed = all("\t" in line for line in words)
    for number, line in enumerate(lines, 1):
        # White space that does not part columns may be part of a word: between tabs, spaces too.
        cells = [cell.strip(" \r") for cell in line.split("\t" if "\t" in line else " ")]
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
            raise ValueError(f"{where} has {len(words)} words, but {len(tags)} tags; give each word one.")
        yield [(word, _checked(tag, tag_column, where)) for word, tag in zip(words, tags)]


def _checked(tag: str, column: Column, where: str) -> str:
    if not TAG.fullmatch(tag):
        raise ValueError(
            f"tag_column {column!r} has {tag!r} in {where}, which is neither O nor B-, I-, E- or S- with the type of "
            "an entity; name the column of the tags."
        )
    return tag


def _warn_of_broken(tags: list[list[str]], name: str) -> None:
    """Counts tags that cannot stand where they do, in the scheme that fits the text best."""
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
        # In IOB1, B- only stands right after an entity of the same type; in IOB2, I- never begins one.
        scheme, broken = ("IOB2", starts) if len(starts) <= len(breaks) else ("IOB1", breaks)
    if broken:
        before, tag = broken[0]
        logger.warning(
            "%d tags of %s do not fit %s, such as %s after %s; an entity is taken to begin wherever its type does.",
            len(broken),
            name,
            scheme,
            tag,
            before,
        )
