# Licensed under the Apache License, Version 2.0.
"""Example sentences for heads: those in which a head attends most clearly."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.relations import OTHER_NAMES
from .head_scores import Head
from .heads.maps import attention_maps
from .running import on_device
from .sentences import Sentences


LENGTHS = range(8, 17)  # tokens of an example, if there are such sentences
MAX_SENTENCES = 200


class AttentionExample(NamedTuple):
    """Attention to draw: queries, keys, weights from 0 to 1, and a caption."""

    queries: Sequence[str]
    keys: Sequence[str]
    weights: Sequence[Sequence[float]]
    caption: str


class Example(NamedTuple):
    """A sentence to draw attention in: its tokens, the word of each, its tree if it is parsed, and its text."""

    ids: list[int]
    words: list[int | None]
    tree: Any = None
    text: str = ""

    def arcs(self) -> dict[str, list[list[list[int]]]]:
        """Dependencies by relation, of a parsed sentence: indices of the tokens of the dependent and of its head.

        Relations have their names in Universal Dependencies 2.
        """
        arcs: dict[str, list[list[list[int]]]] = {}
        for dependent, head in enumerate(self.tree.heads if self.tree else ()):
            if head is None:
                continue
            ends = [[index for index, word in enumerate(self.words) if word == one] for one in (dependent, head)]
            if all(ends):
                relation = self.tree.relations[dependent]
                arcs.setdefault(OTHER_NAMES.get(relation, relation), []).append(ends)
        return arcs


def find_examples(
    model: PreTrainedModel, sentences: Sentences, roles: Mapping[Head, str | None]
) -> dict[Head, list[AttentionExample]]:
    """The attention of each head in two of the first 200 short sentences: those with its largest weights.

    Args:
        model (`PreTrainedModel`): The model; it reads the sentences one by one.
        sentences ([`Sentences`]): Sentences to choose from.
        roles (`dict[Head, str | None]`): The heads, and the syntactic role of each. A head with a role is shown where
            its attention follows the role most.
    """
    numbers = [number for number, ids in enumerate(sentences.ids) if len(ids) in LENGTHS][:MAX_SENTENCES]
    numbers = numbers or [min(range(len(sentences.ids)), key=lambda number: len(sentences.ids[number]))]
    found: dict[Head, list[tuple[float, AttentionExample]]] = {head: [] for head in roles}
    special = set() if sentences.tokenizer is None else set(sentences.tokenizer.all_special_ids)
    for sentence in (example_sentence(sentences, number) for number in numbers):
        maps = attention_maps(model, on_device(sentences.padded([sentence.ids]), model))
        words = [written_token(token, sentences.tokenizer) for token in sentence.ids]
        ordinary = [index for index, token in enumerate(sentence.ids) if token not in special]
        for (kind, layer, head), role in roles.items():
            weights = maps[kind][layer, 0, head].cpu()
            if role is not None:
                clarity = _weight_of_role(role, weights, sentence)
            else:
                clarity = weights[ordinary][:, ordinary].amax(-1).mean().item() if ordinary else 0.0
            example = AttentionExample(words, words, weights.tolist(), "")
            found[kind, layer, head].append((clarity, example))
    return {head: [one for _, one in sorted(some, key=lambda pair: -pair[0])[:2]] for head, some in found.items()}


def example_sentence(sentences: Sentences, number: int) -> Example:
    """Token ids, words, tree and text of a sentence."""
    item = sentences.items[number]
    if not hasattr(item, "relations"):
        text = item if isinstance(item, str) else " ".join(one for one in item if isinstance(one, str))
        return Example(sentences.ids[number], [], text=text)
    # Imported here: reading data needs optional libraries, token ids do not.
    from ..data.words import encode_words

    return Example(*encode_words(item, sentences.tokenizer), item, item.text)


def written_token(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A token as it is shown; its id without a tokenizer."""
    if tokenizer is None:
        return str(token)
    return tokenizer.decode([token]).strip() or tokenizer.convert_ids_to_tokens(token)


def _weight_of_role(role: str, weights: torch.Tensor, sentence: Example) -> float:
    """Mean attention along the dependencies of a relation in a sentence, times the square root of their number."""
    relation, _, direction = role.partition(" ")
    along = []
    for ends in sentence.arcs().get(OTHER_NAMES.get(relation, relation), []):
        queries, keys = ends if direction == "to head" else ends[::-1]
        along.append(weights[queries][:, keys].sum(-1).mean().item())
    return sum(along) / len(along) ** 0.5 if along else 0.0
