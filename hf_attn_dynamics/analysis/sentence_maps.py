# Licensed under the Apache License, Version 2.0.
"""Attention of all heads in some example sentences, with weights of 8 bits: the data of the interactive page."""

import base64
import unicodedata
import zlib
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .heads.maps import attention_maps
from .reading_examples import example_sentence, written_token
from .sentences import Sentences


MAX_SENTENCES = 20
MAX_TOKENS = 40
FEW_TOKENS = 8  # shorter sentences are taken only if there are no others
MAX_CHARACTERS = 2_460_000  # of all packed weights together, so that pages of large models stay small


class SentenceMaps(NamedTuple):
    """Attention of all heads in one sentence.

    Args:
        text (`str`): The sentence.
        tokens (`list[str]`): Its tokens as written.
        special (`list[int]`): Indices of special tokens.
        punctuation (`list[int]`): Indices of tokens that consist of punctuation.
        arcs (`dict[str, list]`): Dependencies by relation, of a parsed sentence: for each, the indices of the tokens
            of the dependent and of those of its head.
        shapes (`dict[str, list[int]]`): Number of layers and of heads by kind of site.
        weights (`dict[str, str]`): Weights by kind of site: `round(255 · weight)` as bytes, of shape
            `(layers, heads, keys, queries)`, compressed by zlib and encoded as base64; 0 for removed heads.
    """

    text: str
    tokens: list[str]
    special: list[int]
    punctuation: list[int]
    arcs: dict[str, list[list[list[int]]]]
    shapes: dict[str, list[int]]
    weights: dict[str, str]

    def unpacked(self) -> dict[str, torch.Tensor]:
        """Weights from 0 to 1 by kind of site, `(layers, heads, queries, keys)`; each is off by 1/510 at most."""
        tables = {}
        for kind, packed in self.weights.items():
            levels = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)
            tables[kind] = levels.view(*self.shapes[kind], len(self.tokens), len(self.tokens)).mT / 255
        return tables

    @property
    def characters(self) -> int:
        """Number of characters of the packed weights."""
        return sum(map(len, self.weights.values()))


def packed_weights(weights: torch.Tensor) -> str:
    """Weights of shape `(…, queries, keys)` as bytes, see [`SentenceMaps`]; NaN becomes 0."""
    # Weights on one key, from one query after the other, compress best: they resemble each other.
    levels = (weights.nan_to_num(0) * 255).round().to(torch.uint8).cpu().mT.contiguous()
    packer = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
    return base64.b64encode(packer.compress(levels.numpy().tobytes()) + packer.flush()).decode()


def collect_maps(model: PreTrainedModel, sentences: Sentences) -> list[SentenceMaps]:
    """Attention of all heads in up to 20 sentences of up to 40 tokens; parsed ones are preferred.

    The sentences are spread evenly over those that are short enough. There are fewer if their packed weights would
    exceed 2.46 million characters.

    Args:
        model (`PreTrainedModel`): The model; it reads the sentences one by one.
        sentences ([`Sentences`]): Sentences to choose from.
    """
    special = set() if sentences.tokenizer is None else set(sentences.tokenizer.all_special_ids)
    found: list[SentenceMaps] = []
    for sentence in (example_sentence(sentences, number) for number in chosen_sentences(sentences)):
        maps = attention_maps(model, {"input_ids": torch.tensor([sentence.ids], device=model.device)})
        tokens = [written_token(token, sentences) for token in sentence.ids]
        # Learned prefixes and cross-attention have keys that are no tokens of the sentence.
        maps = {kind: table for kind, table in maps.items() if table.shape[-2:] == (len(tokens), len(tokens))}
        if not maps:
            continue
        one = SentenceMaps(
            text=sentence.text or " ".join(tokens),
            tokens=tokens,
            special=[index for index, token in enumerate(sentence.ids) if token in special],
            punctuation=[index for index, token in enumerate(tokens) if _is_punctuation(token)],
            arcs=sentence.arcs(),
            shapes={kind: [table.shape[0], table.shape[2]] for kind, table in maps.items()},
            weights={kind: packed_weights(table[:, 0]) for kind, table in maps.items()},
        )
        if sum(other.characters for other in found) + one.characters > MAX_CHARACTERS:
            break
        found.append(one)
    return found


def chosen_sentences(sentences: Sentences) -> list[int]:
    """Numbers of up to 20 sentences of up to 40 tokens, evenly spread.

    Sentences of at least 8 tokens, and among these parsed ones, are preferred.
    """
    short = [number for number, ids in enumerate(sentences.ids) if len(ids) <= MAX_TOKENS]
    usual = [number for number in short if len(sentences.ids[number]) >= FEW_TOKENS] or short
    some = [number for number in usual if hasattr(sentences.items[number], "relations")] or usual
    count = min(MAX_SENTENCES, len(some))
    return [some[index * len(some) // count] for index in range(count)]


def _is_punctuation(token: str) -> bool:
    return all(unicodedata.category(letter).startswith("P") for letter in token)
