# Licensed under the Apache License, Version 2.0.
"""Attention of all heads in some sentences, and contributions to them, with weights of 8 bits: the data of pages."""

import base64
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.head_roles import locate_heads
from .attribution.across_layers import global_contribution
from .attribution.local import local_contribution
from .attribution.rollout import value_weighted_attention
from .contribution_names import CONTRIBUTIONS
from .heads.maps import attention_maps
from .reading_examples import example_sentence, written_token
from .running import on_device, reader_of
from .sentences import Sentences


MAX_SENTENCES = 20
MAX_TOKENS = 40
FEW_TOKENS = 8  # shorter sentences are taken only if there are no others
MAX_CHARACTERS = 2_460_000  # of all packed weights together, so that pages of large models stay small
ATTENTION = "attention"
CONTRIBUTION_FUNCTIONS = dict(
    zip(CONTRIBUTIONS, (value_weighted_attention, local_contribution, global_contribution), strict=True)
)

Measures = dict[str, dict[str, torch.Tensor]]
Item = TypeVar("Item")


class Side(NamedTuple):
    """Tokens of a sentence as written, and the indices of special tokens and of those that consist of punctuation."""

    tokens: list[str]
    special: list[int]
    punctuation: list[int]


class PackedWeights(NamedTuple):
    """Weights of shape `(layers, heads, queries, keys)` as bytes.

    Args:
        scale (`float`): The weight of the byte 255.
        data (`str`): `round(255 · weight / scale)`, of shape `(layers, heads, keys, queries)`, compressed by zlib and
            encoded as base64; 0 for removed heads.
    """

    scale: float
    data: str

    @classmethod
    def of(cls, weights: torch.Tensor, scale: float | None = 1.0) -> "PackedWeights":
        """Packs weights; NaN becomes 0. Without `scale`, it is the largest weight."""
        weights = weights.nan_to_num(0).cpu()
        scale = (weights.max().item() or 1.0) if scale is None else scale
        # Weights on one key, from one query after the other, compress best: they resemble each other.
        levels = (weights * (255 / scale)).round().to(torch.uint8).mT.contiguous()
        packer = zlib.compressobj(9, strategy=zlib.Z_FILTERED)
        data = packer.compress(levels.numpy().tobytes()) + packer.flush()
        return cls(scale, base64.b64encode(data).decode())

    def unpacked(self, layers: int, heads: int, queries: int, keys: int) -> torch.Tensor:
        """Weights of shape `(layers, heads, queries, keys)`; each is off by `scale / 510` at most."""
        levels = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(self.data))), dtype=torch.uint8)
        return levels.view(layers, heads, keys, queries).mT * (self.scale / 255)


class SentenceMaps(NamedTuple):
    """Attention of all heads in one sentence, and contributions to them.

    Args:
        text (`str`): The sentence.
        sides (`list[Side]`): The sentence and, for an encoder–decoder model, its target.
        arcs (`dict[str, list]`): Dependencies by relation, of a parsed sentence: for each, the indices of the tokens
            of the dependent and of those of its head.
        shapes (`dict[str, list[int]]`): Number of layers and of heads by kind of site.
        weights (`dict[str, dict[str, PackedWeights]]`): Weights by measure (`attention`, and `value_weighted`, `local`
            and `global` contributions where they were measured) and by kind of site.
        heads (`dict[str, list]`): Layer and number of each head that is not removed, by kind of site.
    """

    text: str
    sides: list[Side]
    arcs: dict[str, list[list[list[int]]]]
    shapes: dict[str, list[int]]
    weights: dict[str, dict[str, PackedWeights]]
    heads: dict[str, list[list[int]]]

    @classmethod
    def of(
        cls, text: str, sides: list[Side], measures: Measures, arcs: dict[str, Any] | None = None
    ) -> "SentenceMaps":
        """Packs the weights of a sentence.

        Args:
            text, sides, arcs: See the class.
            measures (`dict[str, dict[str, torch.Tensor]]`): Weights of shape `(layers, heads, queries, keys)` by
                measure and kind of site. Sites whose queries or keys are no tokens of the sides are left out, such as
                those with learned prefixes.
        """
        fitting = {
            measure: {kind: table for kind, table in tables.items() if table.shape[2:] == _lengths(kind, sides)}
            for measure, tables in measures.items()
        }
        return cls(
            text,
            sides,
            arcs or {},
            {kind: list(table.shape[:2]) for tables in fitting.values() for kind, table in tables.items()},
            {
                measure: {
                    kind: PackedWeights.of(table, 1.0 if measure == ATTENTION else None)
                    for kind, table in tables.items()
                }
                for measure, tables in fitting.items()
            },
            # 8 bits do not tell removed heads from those whose weights are small.
            {
                kind: (~table.isnan().flatten(2).any(-1)).nonzero().tolist()
                for kind, table in fitting.get(ATTENTION, {}).items()
            },
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SentenceMaps":
        """The inverse of `_asdict`, after JSON."""
        sides = [Side(*one) for one in values["sides"]]
        weights = {
            measure: {kind: PackedWeights(*packed) for kind, packed in tables.items()}
            for measure, tables in values["weights"].items()
        }
        one = cls(**{"heads": {}, **values, "sides": sides, "weights": weights})
        if "heads" in values:
            return one
        # As earlier versions have saved them.
        unpacked = one.unpacked().items() if ATTENTION in weights else ()
        return one._replace(heads={kind: table.flatten(2).any(-1).nonzero().tolist() for kind, table in unpacked})

    def unpacked(self, measure: str = ATTENTION) -> dict[str, torch.Tensor]:
        """Weights of a measure by kind of site, `(layers, heads, queries, keys)`."""
        return {
            kind: packed.unpacked(*self.shapes[kind], *_lengths(kind, self.sides))
            for kind, packed in self.weights[measure].items()
        }

    @property
    def tokens(self) -> list[str]:
        """Tokens of the sentence as written."""
        return self.sides[0].tokens

    @property
    def characters(self) -> int:
        """Number of characters of the packed weights."""
        return sum(len(packed.data) for tables in self.weights.values() for packed in tables.values())


def pair_of(kind: str, sides: Sequence[Item]) -> tuple[Item, Item]:
    """Those of the sides that have the queries and the keys at a kind of site."""
    queries, keys = {"encoder": (0, 0), "decoder": (-1, -1), "cross": (-1, 0)}[kind]
    return sides[queries], sides[keys]


def _lengths(kind: str, sides: Sequence[Side]) -> tuple[int, int]:
    """Number of queries and of keys at a kind of site."""
    queries, keys = pair_of(kind, sides)
    return len(queries.tokens), len(keys.tokens)


def measured_weights(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], contributions: Sequence[str] = (), **settings: Any
) -> Measures:
    """Attention of all heads in a batch of one sentence, and contributions to them; see [`SentenceMaps.of`].

    Args:
        model (`PreTrainedModel`): The model.
        batch (`dict`): Arguments of a forward pass.
        contributions (`list[str]`): Some of `value_weighted`, `local` and `global`.
        settings: Arguments of `global_contribution`.
    """
    maps: Measures = {ATTENTION: {kind: table[:, 0] for kind, table in attention_maps(model, batch).items()}}
    return {**maps, **{name: contribution_weights(model, batch, name, **settings) for name in contributions}}


def contribution_weights(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], name: str, **settings: Any
) -> dict[str, torch.Tensor]:
    """One contribution in a batch of one sentence by kind of site, see [`measured_weights`]."""
    table = CONTRIBUTION_FUNCTIONS[name](model, batch, **(settings if name == "global" else {}))
    return {locate_heads(reader_of(model))[0].site.kind: table[:, 0]}


def probe_settings(model: PreTrainedModel, probes: int = 32) -> dict[str, Any]:
    """Arguments of `global_contribution` to estimate it; at most as many directions as embeddings have dimensions."""
    return {"method": "probes", "probes": min(probes, reader_of(model).get_input_embeddings().weight.shape[1])}


def side_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> Side:
    """Tokens as they are shown; ids without a tokenizer."""
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    tokens = [written_token(token, tokenizer) for token in ids]
    return Side(
        tokens,
        [index for index, token in enumerate(ids) if token in special],
        [index for index, token in enumerate(tokens) if _is_punctuation(token)],
    )


def collect_maps(
    model: PreTrainedModel,
    sentences: Sentences,
    weights_of: Callable[[list[int]], Measures] | None = None,
    most: int = MAX_SENTENCES,
) -> list[SentenceMaps]:
    """Weights of all heads in some sentences of up to 40 tokens; parsed ones are preferred.

    The sentences are spread evenly over those that are short enough. There are fewer if their packed weights would
    exceed 2.46 million characters.

    Args:
        model (`PreTrainedModel`): The model; it reads the sentences one by one.
        sentences ([`Sentences`]): Sentences to choose from.
        weights_of (callable, *optional*): Returns the weights of a sentence, given its token ids; attention by
            default.
        most (`int`): Largest number of sentences.
    """
    if weights_of is None:

        def weights_of(ids: list[int]) -> Measures:
            return measured_weights(model, on_device(sentences.padded([ids]), model))

    found: list[SentenceMaps] = []
    for sentence in (example_sentence(sentences, number) for number in chosen_sentences(sentences, most)):
        side = side_of(sentence.ids, sentences.tokenizer)
        text = sentence.text or " ".join(side.tokens)
        one = SentenceMaps.of(text, [side], weights_of(sentence.ids), sentence.arcs())
        if not one.shapes:
            continue
        if sum(other.characters for other in found) + one.characters > MAX_CHARACTERS:
            break
        found.append(one)
    return found


def chosen_sentences(sentences: Sentences, most: int = MAX_SENTENCES) -> list[int]:
    """Numbers of up to `most` sentences of up to 40 tokens, evenly spread.

    Sentences of at least 8 tokens, and among these parsed ones, are preferred.
    """
    short = [number for number, ids in enumerate(sentences.ids) if len(ids) <= MAX_TOKENS]
    usual = [number for number in short if len(sentences.ids[number]) >= FEW_TOKENS] or short
    some = [number for number in usual if hasattr(sentences.items[number], "relations")] or usual
    count = min(most, len(some))
    return [some[index * len(some) // count] for index in range(count)]


def _is_punctuation(token: str) -> bool:
    return bool(token) and all(unicodedata.category(letter).startswith("P") for letter in token)
