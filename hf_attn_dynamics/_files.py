# Licensed under the Apache License, Version 2.0.
"""Files that are either complete or not there, and are read or refused by name."""

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


def read_weight_index(path: str | Path) -> list[str]:
    """Names of the files that the index of a model in shards says its weights are in.

    Raises:
        ValueError: naming the file, if it is no such index.
    """
    try:
        return sorted({str(name) for name in read_json(path)["weight_map"].values()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no index of weights; save the model again.") from error
