# Licensed under the Apache License, Version 2.0.
"""Files of text: found, decompressed, decoded, and read line by line."""

import codecs
import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path


TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def kind_of(path: str | Path) -> str:
    """The suffix that tells how a file is read, in lower case; that before `.gz` if there is one.

    Example:
        >>> [kind_of(name) for name in ("a.TSV", "a.jsonl.gz", "a.train.it", "a")]
        ['.tsv', '.jsonl', '.it', '']
    """
    return Path(Path(path).name.lower().removesuffix(".gz")).suffix


def find_files(
    files: str | Path | Iterable[str | Path], kinds: tuple[str, ...], plain_text: bool = False
) -> list[Path]:
    """Files, from files, folders and patterns.

    Args:
        files (`str`, `Path` or a list of these): Files, folders (all files of these kinds below them, sorted) or glob
            patterns.
        kinds (`tuple[str, ...]`): Suffixes of the supported files, see [`kind_of`].
        plain_text (`bool`): Whether files with any other suffix are plain text, unless it is one of `TABLES` or only a
            pattern such as `*` matches it.

    Returns:
        `list[Path]`: The files, each once.

    Raises:
        ValueError: if a file is of an unknown kind, or a folder has no supported file.
        FileNotFoundError: if a file is missing or a pattern matches nothing.
    """
    found: list[Path] = []
    supported = f"{', '.join(kinds)}, each also as .gz"
    for pattern in map(str, [files] if isinstance(files, (str, Path)) else files):
        path = Path(pattern)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file) in kinds)
            if not inside:
                raise ValueError(f"files: the folder {pattern} has no supported file ({supported}).")
            found += inside
            continue
        matches = [pattern] if path.is_file() else glob.glob(pattern, recursive=True)
        matches = sorted(match for match in map(Path, matches) if match.is_file())
        if not matches:
            raise FileNotFoundError(f"files: {pattern} is no file, no folder and no pattern of existing files.")
        for match in matches:
            kind = kind_of(match)
            is_text = plain_text and kind not in TABLES and kind == kind_of(pattern)
            if kind not in kinds and not is_text:
                raise ValueError(f"files: {match} is of an unknown kind; supported are {supported}.")
        found += matches
    return list(dict.fromkeys(path.resolve() for path in found))


def read_lines(path: Path, encoding: str = "utf-8", keep_ends: bool = False) -> Iterator[str]:
    """Lines of a plain or gzip-compressed file that may be larger than memory, without a byte order mark.

    Lines end at line feeds. Other separators may stand within a text; carriage returns alone end lines only where the
    first line does not end in a line feed.

    Args:
        path (`Path`): The file; compressed if its name ends in `.gz`.
        encoding (`str`): Its encoding, by a name that Python knows.
        keep_ends (`bool`): Whether lines keep their ends, and end at carriage returns, too.

    Raises:
        ValueError: if it is in another encoding (the message names line and byte), not compressed although called
            `.gz`, or Python does not know the encoding.
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
        raise ValueError(f"files: {path} is not in {encoding.upper()}{where}; convert it or name its encoding.") from (
            error
        )
    except LookupError as error:
        raise ValueError(f"encoding {encoding!r} is not one that Python knows, such as utf-8 or latin-1.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"files: {path} cannot be read as .gz: {error}") from error


def _undecodable(content: bytes, codec: str) -> str:
    """Where the first byte is that cannot be decoded."""
    try:
        content.decode(codec)
    except UnicodeDecodeError as error:
        start = error.start + len(content) - len(error.object)  # the error counts from behind the mark
        line = content.count(b"\n", 0, start) + 1
        return f": byte 0x{content[start]:02x} at position {start}, in line {line}"
    return ""
