# Licensed under the Apache License, Version 2.0.
"""Files that are either complete or not there, and are read or refused by name."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: str | Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that no one ever sees a part of it.

    Args:
        path (`str` or `Path`): The file; its folder is made.
        text (`str`): What it is to hold, in UTF-8.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8.

    Raises:
        ValueError: naming the file, if it is not in UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}") from error


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: naming the file, if it is not JSON, or nested too deeply for anything that is meant.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


ENDS = 2**20  # bytes


def fingerprint(path: str | Path) -> str | None:
    """What tells a file, or the files of a folder, from others, in a short time; `None` if neither is there.

    Args:
        path (`str` or `Path`): A file, which is known by its size, its first and its last MiB; or a folder, which is
            by the names and sizes of all files below it.

    Returns:
        `str`: a digest.
    """
    path, digest = Path(path), hashlib.sha256()
    if path.is_file():
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for start in (0, max(0, size - ENDS)):
                file.seek(start)
                digest.update(file.read(ENDS))
    elif path.is_dir():
        for below in sorted(path.rglob("*")):
            if below.is_file():
                digest.update(f"{below.relative_to(path)}\0{below.stat().st_size}\0".encode())
    else:
        return None
    return digest.hexdigest()


def read_weight_index(path: str | Path) -> list[str]:
    """Names of the files that the index of a model in shards says its weights are in.

    Raises:
        ValueError: naming the file, if it is no such index.
    """
    try:
        return sorted({str(name) for name in read_json(path)["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no index of weights; save the model again.") from error
