# Licensed under the Apache License, Version 2.0.
"""Loading of checkpoints that flags name, with errors that name the flag, the checkpoint and what is missing."""

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


CONFIG = "config.json"
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
    """Turns errors of loading into a ValueError that names the flag, the checkpoint and what is missing."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        folder = Path(name)
        if folder.is_dir():
            if not (folder / CONFIG).is_file():
                reason = f"the folder has no {CONFIG}."
        elif folder.exists():
            reason = "it is a file; name the folder of a checkpoint."
        elif _is_path(str(name)):
            reason = "no such folder."
        else:
            reason = f"there is no such folder, and the Hub does not return it: {reason.partition('. ')[0]}"
        raise ValueError(f"{flag} {str(name)!r} cannot be loaded: {reason}") from error


def _is_path(name: str) -> bool:
    """Whether a name can only be a path: repositories of the Hub are called NAME or OWNER/NAME."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or os.sep != "/" and os.sep in name


def load_config(flag: str, name: str | Path) -> PreTrainedConfig:
    """Loads the configuration of a checkpoint.

    Args:
        flag (`str`): Flag that names the checkpoint, for messages.
        name (`str` or `Path`): Folder, or name on the Hub.

    Raises:
        ValueError: if it cannot be loaded.
    """
    with refused(flag, name):
        return AutoConfig.from_pretrained(name)


def load_checkpoint(flag: str, name: str | Path, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Loads a model with its task head, if the architecture is known, and without its pruned attention heads.

    Args:
        flag (`str`): Flag that names the checkpoint, for messages.
        name (`str` or `Path`): Folder, or name on the Hub.
        config (`PreTrainedConfig`, *optional*): The configuration, if it is already loaded.

    Raises:
        ValueError: if it cannot be loaded.
    """
    config = load_config(flag, name) if config is None else config
    with refused(flag, name):
        # Auto classes ignore the pruned heads of stock models.
        if getattr(config, "pruned_heads", None):
            return load_pruned(name)
        architecture = (getattr(config, "architectures", None) or [""])[0]
        places = (transformers, hf_attn_dynamics)
        model_class = next((found for place in places if (found := getattr(place, architecture, None))), AutoModel)
        return model_class.from_pretrained(name)


def load_tokenizer(flag: str, name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a checkpoint: one of characters, if its only tokenizer file is `vocab.json`.

    Args:
        flag (`str`): Flag that names the checkpoint, for messages.
        name (`str` or `Path`): Folder, or name on the Hub.

    Raises:
        ValueError: if it cannot be loaded, or files are missing.
    """
    folder = Path(name)
    there = [file for file in (*TOKENIZER_FILES, "tokenizer_config.json") if (folder / file).is_file()]
    if there == ["vocab.json"]:
        with refused(flag, name):
            return character_tokenizer(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    try:
        with refused(flag, name):
            tokenizer = AutoTokenizer.from_pretrained(name)
    except ValueError as error:
        if not (folder / CONFIG).is_file():
            raise
        missing = [file for one in there for file in TOKENIZER_FILES.get(one, ()) if file not in there]
        raise ValueError(
            f"{flag} {str(name)!r}: its tokenizer cannot be read; the folder has {', '.join(there) or 'none'} of its "
            f"files{f', but not {missing[0]}' if missing else ''}. Save it there by tokenizer.save_pretrained()."
        ) from error
    # Without files, Transformers makes a tokenizer that has special tokens only.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ValueError(
            f"{flag} {str(name)!r} has no tokenizer, which would be one of {', '.join(TOKENIZER_FILES)}. Save it "
            "there by tokenizer.save_pretrained()."
        )
    return tokenizer
