# Licensed under the Apache License, Version 2.0.
"""Files that are either complete or not there."""

import os
import tempfile
from pathlib import Path


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
