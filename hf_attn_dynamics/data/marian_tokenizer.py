# Licensed under the Apache License, Version 2.0.
"""Training of tokenizers for Marian models on parallel text."""

import importlib.util
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import MarianTokenizer

PAD = "<pad>"
LONGEST = 1 << 20  # bytes; SentencePiece silently skips longer texts


def train_marian_tokenizer(
    texts_source: Iterable[str], texts_target: Iterable[str], vocab_size: int, folder: str | Path
) -> "MarianTokenizer":
    """Trains a SentencePiece unigram model (Kudo 2018) on source and target texts for a Marian model.

    Ids are as `MarianConfig` expects: `</s>` is 0, `<unk>` is 1, and `<pad>`, the start token of the decoder, is
    `vocab_size - 1`. Every character of the texts is in the vocabulary. Texts are not normalised.

    Args:
        texts_source (`Iterable[str]`): Source texts, read once.
        texts_target (`Iterable[str]`): Target texts, read once.
        vocab_size (`int`): Exact size of the vocabulary, special tokens included.
        folder (`str` or `Path`):
            Folder for `source.spm`, `target.spm` (the same), `vocab.json` and `tokenizer_config.json`, from which
            `AutoTokenizer` loads the tokenizer. Existing files are replaced.

    Returns:
        [`MarianTokenizer`]: the tokenizer, a deterministic function of the texts.

    Raises:
        ValueError: if there are no source or target texts, or `vocab_size` is too small for the characters or too
            large for the texts. Nothing is written then.
        ImportError: if the package `sentencepiece` is not installed.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tokenizer = train_marian_tokenizer(["ein Haus", "zwei"], ["a house", "two"], 18, folder)
        >>> tokenizer.convert_ids_to_tokens([0, 1, 17])
        ['</s>', '<unk>', '<pad>']
        >>> tokenizer.decode(tokenizer("zwei Haus").input_ids, skip_special_tokens=True)
        'zwei Haus'
    """
    if importlib.util.find_spec("sentencepiece") is None:
        raise ImportError("train_marian_tokenizer needs the package sentencepiece; install hf_attn_dynamics[recipes].")
    from sentencepiece import SentencePieceProcessor

    texts = []
    for argument, side in (("texts_source", texts_source), ("texts_target", texts_target)):
        if isinstance(side, str):
            raise ValueError(f"{argument} must be a list of texts, got a string.")
        side = [text.replace("\n", " ") for text in side]
        if not any(map(str.strip, side)):
            raise ValueError(f"{argument} is empty or blank; pass some text.")
        texts += side
    model = _train(texts, vocab_size)
    processor = SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, PAD])}

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer.") as temporary:
        for name in ("source.spm", "target.spm"):
            Path(temporary, name).write_bytes(model)
        Path(temporary, "vocab.json").write_text(
            json.dumps(vocabulary, ensure_ascii=False, indent=2), encoding="utf-8"
        )
        _load(temporary).save_pretrained(temporary)
        for path in sorted(Path(temporary).iterdir()):
            os.replace(path, folder / path.name)
    return _load(folder)


def _load(folder: str | Path) -> "MarianTokenizer":
    from transformers import MarianTokenizer

    with warnings.catch_warnings():
        # Moses' normalisation of punctuation is for other checkpoints, and not called by default.
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return MarianTokenizer.from_pretrained(folder)


def _train(texts: list[str], vocab_size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    if max(len(text.encode()) for text in texts) > LONGEST:
        raise ValueError(f"a text has more than {LONGEST} bytes; split it into sentences.")
    if vocab_size < 4:
        raise ValueError(f"vocab_size must have room for 3 special tokens and every character, got {vocab_size}.")
    writer = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=writer,
            model_type="unigram",
            vocab_size=vocab_size - 1,  # <pad> is appended
            eos_id=0,
            unk_id=1,
            bos_id=-1,
            pad_id=-1,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=LONGEST,
            minloglevel=2,
        )
    except RuntimeError as error:
        if largest := re.search(r"Vocabulary size too high.*<= (\d+)", str(error)):
            raise ValueError(
                f"vocab_size must be at most {int(largest[1]) + 1} for these texts, got {vocab_size}; lower it or "
                "add text."
            ) from None
        if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise ValueError(
                f"vocab_size must be at least {int(smallest[1]) + 1} for 3 special tokens and every character of the "
                f"texts, got {vocab_size}."
            ) from None
        raise
    return writer.getvalue()
