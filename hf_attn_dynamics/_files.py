# Licensed under the Apache License, Version 2.0.
"""Atomic writing of files, and reading with errors that name the file."""

import glob
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file in UTF-8, see [`write_bytes`]."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes a file atomically: under a temporary name, which is then renamed.

    Args:
        path (`str` or `Path`): The file; its folder is created.
        content (`bytes`): Its content.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_text(path: str | Path) -> str:
    """Reads a UTF-8 file.

    Raises:
        ValueError: if it is not in UTF-8; the message names the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}") from error


def read_json(path: str | Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: if it is not valid JSON, or nested too deeply; the message names the file.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


ENDS = 2**20  # bytes


def fingerprint(path: str | Path) -> str | None:
    """Fast fingerprint of a file, a folder, or the files of a glob pattern; `None` if there are none.

    Args:
        path (`str` or `Path`): A file, of which the size and the first and last MiB are hashed; a folder, of which
            the names and sizes of all files are hashed; or a pattern, of which the names and fingerprints of all
            matches are.

    Returns:
        `str`: a SHA-256 digest.
    """
    # In contrast to Path.is_file, these take any text, such as settings that are longer than a name may be.
    is_file, is_folder = os.path.isfile(path), os.path.isdir(path)
    path, digest = Path(path), hashlib.sha256()
    if is_file:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for start in (0, max(0, size - ENDS)):
                file.seek(start)
                digest.update(file.read(ENDS))
    elif is_folder:
        for below in sorted(path.rglob("*")):
            if below.is_file():
                digest.update(f"{below.relative_to(path)}\0{below.stat().st_size}\0".encode())
    else:
        found = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []
        if not found:
            return None
        for name in found:
            digest.update(f"{name}\0{fingerprint(name)}\0".encode())
    return digest.hexdigest()


def read_weight_index(path: str | Path) -> list[str]:
    """Names of the weight files in the index of a sharded checkpoint.

    Raises:
        ValueError: if it is not such an index; the message names the file.
    """
    try:
        return sorted({str(name) for name in read_json(path)["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights; save the model again.") from error
