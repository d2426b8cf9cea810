# Licensed under the Apache License, Version 2.0.
"""Loads the checkpoints that flags name; errors name the flag, the checkpoint and what is missing."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_attn_dynamics

from .. import load_pruned
from ..data import character_tokenizer
from ..models.unit_pruning import is_pruned


MODEL_CONFIG = "config.json"
# Files of tokenizers, and the other files that each of them needs.
TOKENIZER_FILES = {
    "tokenizer.json": (),
    "vocab.json": ("merges.txt",),
    "merges.txt": ("vocab.json",),
    "vocab.txt": (),
    "tokenizer.model": (),
    "spiece.model": (),
    "sentencepiece.bpe.model": (),
    "source.spm": ("target.spm", "vocab.json"),
}


@contextlib.contextmanager
def refused(flag: str, name: str | Path) -> Iterator[None]:
    """Turns errors of loading into a ValueError that names the flag, the checkpoint and what is missing.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str` or `Path`): Folder, or name on the Hub.
    """
    try:
        yield
    # Transformers raises the last three for damaged files.
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        folder = Path(name)
        if folder.is_dir():
            if not (folder / MODEL_CONFIG).is_file():
                reason = f"the folder has no {MODEL_CONFIG}."
        elif folder.exists():
            reason = "it is a file; name the folder of a checkpoint."
        elif _is_path(str(name)):
            reason = "no such folder."
        elif isinstance(error, OSError):
            reason = f"there is no such folder, nor could it be read from the Hub: {reason.partition('. ')[0]}"
        raise ValueError(f"{flag} {str(name)!r} cannot be loaded: {reason}") from error


def _is_path(name: str) -> bool:
    """Whether a name can only be a path: names on the Hub are NAME or OWNER/NAME."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or os.sep != "/" and os.sep in name


def load_config(flag: str, name: str | Path) -> PreTrainedConfig:
    """The configuration of a checkpoint.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str` or `Path`): Folder, or name on the Hub.

    Raises:
        ValueError: naming the flag and the checkpoint, if it cannot be loaded.
    """
    with refused(flag, name):
        return AutoConfig.from_pretrained(name)


def load_checkpoint(flag: str, name: str | Path, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A model with the task head that it was saved with, if its class is known; removed parts stay removed.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str` or `Path`): Folder, or name on the Hub.
        config (`PreTrainedConfig`, *optional*): Its configuration, if it is already loaded.

    Raises:
        ValueError: naming the flag and the checkpoint, if it cannot be loaded.
    """
    config = load_config(flag, name) if config is None else config
    with refused(flag, name):
        # Auto classes ignore that parts were removed from stock models.
        if is_pruned(config):
            return load_pruned(name)
        architecture = (getattr(config, "architectures", None) or [""])[0]
        places = (transformers, hf_attn_dynamics)
        model_class = next((found for place in places if (found := getattr(place, architecture, None))), AutoModel)
        return model_class.from_pretrained(name)


def load_tokenizer(flag: str, name: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint; one of characters, if `vocab.json` is the only file of a tokenizer in the folder.

    Args:
        flag (`str`): The flag that names the checkpoint.
        name (`str` or `Path`): Folder, or name on the Hub.

    Raises:
        ValueError: naming the flag and the checkpoint, if it cannot be loaded or files are missing.
    """
    folder = Path(name)
    there = [file for file in (*TOKENIZER_FILES, "tokenizer_config.json") if (folder / file).is_file()]
    try:
        with refused(flag, name):
            if there == ["vocab.json"]:
                return character_tokenizer(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
            tokenizer = AutoTokenizer.from_pretrained(name)
    except ValueError as error:
        if not (folder / MODEL_CONFIG).is_file():
            raise
        missing = [file for one in there for file in TOKENIZER_FILES.get(one, ()) if file not in there]
        raise ValueError(
            f"{flag} {str(name)!r}: its tokenizer cannot be read; the folder has {', '.join(there) or 'none'} of its "
            f"files{f', but not {missing[0]}' if missing else ''}. Save it there by tokenizer.save_pretrained()."
        ) from error
    # Without its files, Transformers builds a tokenizer of special tokens alone.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(
            f"{flag} {str(name)!r} has no tokenizer, which would be one of {', '.join(TOKENIZER_FILES)}. Save it "
            "there by tokenizer.save_pretrained()."
        )
    return tokenizer
