# Licensed under the Apache License, Version 2.0.
"""Finding, decompressing and decoding of text files, read line by line."""

import codecs
import glob
import gzip
import logging
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path


logger = logging.getLogger(__name__)

TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z")


def kind_of(path: str | Path) -> str:
    """Suffix of a file in lower case, without `.gz`, which determines how it is read.

    Example:
        >>> [kind_of(name) for name in ("a.TSV", "a.jsonl.gz", "a.train.it", "a")]
        ['.tsv', '.jsonl', '.it', '']
    """
    return Path(Path(path).name.lower().removesuffix(".gz")).suffix


def find_files(
    files: str | Path | Iterable[str | Path], kinds: tuple[str, ...], plain_text: bool = False
) -> list[Path]:
    """Resolves files, folders and glob patterns to files.

    Args:
        files (`str`, `Path` or a list of these): Files, folders (all supported files below them, sorted) or glob
            patterns. Archives in a folder are not read, of which a warning tells.
        kinds (`tuple[str, ...]`): Suffixes of the supported files, see [`kind_of`].
        plain_text (`bool`): Whether files with any other suffix are plain text, unless it is one of `TABLES` or only
            matched by a pattern such as `*`.

    Returns:
        `list[Path]`: the files, without duplicates.

    Raises:
        ValueError: if a file has an unsupported suffix, or a folder has no supported files.
        FileNotFoundError: if a file is missing or a pattern matches nothing.
    """
    found: list[Path] = []
    supported = f"{', '.join(kinds)}, each also as .gz"
    for pattern in map(str, [files] if isinstance(files, (str, Path)) else files):
        path = Path(pattern)
        if path.is_dir():
            below = visible_files(path)
            inside = [file for file in below if kind_of(file) in kinds]
            archives = [file for file in below if kind_of(file) in ARCHIVES]
            if not inside:
                packed = f"; unpack {archives[0].name}" if archives else ""
                raise ValueError(f"files: the folder {pattern} has no supported files ({supported}){packed}.")
            if archives:
                logger.warning("files: %s has archives, such as %s, which are not read.", pattern, archives[0].name)
            found += inside
            continue
        matches = [pattern] if path.is_file() else glob.glob(pattern, recursive=True)
        matches = sorted(match for match in map(Path, matches) if match.is_file())
        if not matches:
            raise FileNotFoundError(f"files: {pattern} is not a file or folder, and no file matches it as a pattern.")
        for match in matches:
            kind = kind_of(match)
            is_text = plain_text and kind not in TABLES and kind == kind_of(pattern)
            if kind not in kinds and not is_text:
                raise ValueError(f"files: {match} has an unsupported suffix; supported are {supported}.")
        found += matches
    return list(dict.fromkeys(path.resolve() for path in found))


def visible_files(folder: Path) -> list[Path]:
    """Files below a folder, sorted, without hidden ones and those in hidden folders, such as copies of an editor."""
    below = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file for file in below if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def read_lines(path: Path, encoding: str = "utf-8", keep_ends: bool = False) -> Iterator[str]:
    """Yields the lines of a plain or gzip-compressed file, without a byte order mark.

    Lines end at line feeds. Carriage returns alone end lines only if the first line does not end with a line feed;
    other separators are part of the text.

    Args:
        path (`Path`): The file; compressed if its name ends in `.gz`.
        encoding (`str`): Its encoding, by Python's name.
        keep_ends (`bool`): Whether lines keep their ends, and also end at carriage returns.

    Raises:
        ValueError: if it is in another encoding (the message names line and byte), not compressed although named
            `.gz`, or the encoding is unknown.
    """
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        codec = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
        newline = ""
        if not keep_ends:
            with open_file(path, "rb") as file:
                newline = "\n" if file.readline().endswith(b"\n") else None
        with open_file(path, "rt", encoding=codec, newline=newline) as file:
            for line in file:
                yield line if keep_ends else line.rstrip("\r\n")
    except UnicodeError as error:
        with open_file(path, "rb") as file:
            where = _undecodable(file.read(), codec)
        raise ValueError(f"files: {path} is not in {encoding.upper()}{where}; convert it or pass its encoding.") from (
            error
        )
    except LookupError as error:
        raise ValueError(f"encoding must be one of Python's, such as utf-8 or latin-1, got {encoding!r}.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"files: {path} cannot be read as .gz: {error}") from error


def read_paragraphs(path: Path, encoding: str = "utf-8") -> Iterator[list[tuple[int, str]]]:
    """Yields the numbered lines between blank lines; see [`read_lines`] for arguments and errors."""
    numbered = enumerate(read_lines(path, encoding), 1)
    for is_filled, lines in groupby(numbered, key=lambda line: bool(line[1].strip())):
        if is_filled:
            yield list(lines)


def _undecodable(content: bytes, codec: str) -> str:
    """Description of the first byte that cannot be decoded."""
    try:
        content.decode(codec)
    except UnicodeDecodeError as error:
        start = error.start + len(content) - len(error.object)  # the error counts from after the byte order mark
        line = content.count(b"\n", 0, start) + 1
        return f": byte 0x{content[start]:02x} at position {start}, in line {line}"
    return ""
