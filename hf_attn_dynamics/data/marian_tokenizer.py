# Licensed under the Apache License, Version 2.0.
"""Tokenizers for Marian models, trained on one's own parallel text."""

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
LONGEST = 1 << 20  # bytes; SentencePiece leaves out longer texts without a word


def train_marian_tokenizer(
    texts_source: Iterable[str], texts_target: Iterable[str], vocab_size: int, folder: str | Path
) -> "MarianTokenizer":
    """Train a SentencePiece unigram model (Kudo 2018) on both sides together, as the vocabulary of a Marian model.

    The ids are those that `MarianConfig` expects: `</s>` is 0, `<unk>` 1, and `<pad>`, with which the decoder starts,
    the last, `vocab_size - 1`. Every character of the texts is in the vocabulary. Texts are taken as they are, without
    Unicode normalization.

    Args:
        texts_source (`Iterable[str]`): Texts of the source side, read once.
        texts_target (`Iterable[str]`): Texts of the target side, read once.
        vocab_size (`int`): Tokens of the vocabulary, special tokens included; exactly as many.
        folder (`str` or `Path`):
            Where `source.spm`, `target.spm` (the same), `vocab.json` and `tokenizer_config.json` are written, from
            which `AutoTokenizer` brings the tokenizer back. Files of these names are replaced.

    Returns:
        [`MarianTokenizer`]: The tokenizer. The same texts give the same.

    Raises:
        ValueError: if a side has no text, or `vocab_size` is too small for its characters or larger than the texts
            allow. Nothing is written then.
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
            raise ValueError(f"{argument} is a single string, which would be read letter by letter; give a list.")
        side = [text.replace("\n", " ") for text in side]
        if not any(map(str.strip, side)):
            raise ValueError(f"{argument} is empty or blank; a tokenizer needs some text to learn from.")
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
        # Moses' normalization of punctuation is for other checkpoints; the tokenizer never calls it by itself.
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return MarianTokenizer.from_pretrained(folder)


def _train(texts: list[str], vocab_size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    if max(len(text.encode()) for text in texts) > LONGEST:
        raise ValueError(f"One of the texts has more than {LONGEST} bytes; split it into sentences.")
    if vocab_size < 4:
        raise ValueError(f"vocab_size is {vocab_size}; it must have room for 3 special tokens and every character.")
    writer = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=writer,
            model_type="unigram",
            vocab_size=vocab_size - 1,  # <pad> is added behind
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
                f"vocab_size is {vocab_size}, but the texts give at most {int(largest[1]) + 1} tokens; lower it or "
                "add text."
            ) from None
        if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise ValueError(
                f"vocab_size is {vocab_size}; it must be at least {int(smallest[1]) + 1}, for 3 special tokens and "
                "every character of the texts."
            ) from None
        raise
    return writer.getvalue()
