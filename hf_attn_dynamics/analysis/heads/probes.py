# Licensed under the Apache License, Version 2.0.
"""Built-in probes: random tokens that are repeated, text, and needles in text."""

import random
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..running import longest_input, on_device
from ..sentences import Sentences, batches_by_length, padded


ANSWER = 6  # tokens of a needle
PLACES = (
    "the garden",
    "the library",
    "the harbour",
    "the old mill",
    "the station",
    "the museum",
    "the bakery",
    "the bridge",
)


class Probes:
    """What a model reads, as lists of token ids.

    Args:
        model (`PreTrainedModel`): The model.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer; without one, only random tokens are read.
        texts (`list[str]`, *optional*): Text to read; some English sentences by default.
        sequences (`int`): Number of random sequences, and of needles.
        length (`int`): Number of random tokens before they are repeated; fewer if the model reads fewer.
        batch_size (`int`): Sequences per batch.
        seed (`int`): Random seed.

    Raises:
        ValueError: if the vocabulary or the model is too small for random sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        texts: Sequence[str] | None,
        sequences: int,
        length: int,
        batch_size: int,
        seed: int,
    ):
        self.model, self.tokenizer, self.texts = model, tokenizer, texts
        self.sequences, self.batch_size, self.random = sequences, batch_size, random.Random(seed)
        self.longest = longest_input(model)
        special = _special_ids(model, tokenizer)
        size = model.get_input_embeddings().num_embeddings
        known = size if tokenizer is None else min(size, len(tokenizer))
        self.words = [token for token in range(known) if token not in special]
        begin = _begin_id(model, tokenizer)
        self.start = [begin] if begin is not None and begin < size else []
        limit = length if self.longest is None else min(length, (self.longest - 1) // 2)
        self.length = min(limit, len(self.words))
        if self.length < 2:
            raise ValueError(
                f"random sequences need at least two tokens that can be repeated, but {type(model).__name__} has "
                f"{len(self.words)} tokens that are not special, and reads {self.longest}."
            )

    def repeats(self) -> list[list[int]]:
        """Sequences of different random tokens, twice."""
        drawn = [self.random.sample(self.words, self.length) for _ in range(self.sequences)]
        return [[*self.start, *tokens, *tokens] for tokens in drawn]

    @cached_property
    def paragraphs(self) -> list[list[int]]:
        """The texts; embedded sentences in paragraphs of five by default."""
        if self.texts is not None:
            given = list(self.texts)
        else:
            # Imported here: reading data needs the library `datasets`, which importing this package does not.
            from ...data import embedded_sentences

            sentences = [tree.text for tree in embedded_sentences()]
            given = [" ".join(sentences[start : start + 5]) for start in range(0, len(sentences), 5)]
        return Sentences(given, self.model, self.tokenizer, shortest=2, name="texts").ids

    def needles(self) -> list[list[int]]:
        """Text with a code of random tokens, and the question for it with its answer, [`ANSWER`] tokens.

        Raises:
            ValueError: if the model reads too few tokens, or the text uses too many.
        """
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        usable = set(self.words)
        text = [token for paragraph in self.paragraphs for token in paragraph if token in usable]
        found = []
        for number in range(self.sequences):
            question = encode(f" The code of {PLACES[number % len(PLACES)]} is")
            # Tokens that occur nowhere else.
            used = {*text, *question}
            free = [token for token in self.words if token not in used]
            if len(free) < ANSWER:
                raise ValueError(f"all tokens but {len(free)} occur in the text, too few for a code.")
            answer = self.random.sample(free, ANSWER)
            room = (self.longest or len(text) + 4096) - len(self.start) - 2 * (len(question) + ANSWER)
            if room < 0:
                raise ValueError(f"the model reads {self.longest} tokens, too few for a needle and a question.")
            around = text[:room]
            place = self.random.randint(0, len(around))
            needle = [*question, *answer]
            found.append([*self.start, *around[:place], *needle, *around[place:], *needle])
        return found

    def batches(self, sequences: list[list[int]]) -> Iterator[dict[str, torch.Tensor]]:
        """Padded batches on the device of the model."""
        for some in batches_by_length(sequences, self.batch_size):
            yield on_device(padded(some, getattr(self.model.config, "pad_token_id", None)), self.model)


def _special_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    named = [getattr(model.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "sep", "cls", "mask")]
    ids = {one for given in named if given is not None for one in (given if isinstance(given, list) else [given])}
    return ids | set(() if tokenizer is None else tokenizer.all_special_ids)


def _begin_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The token that sentences begin with, if any."""
    if tokenizer is None:
        return getattr(model.config, "bos_token_id", None)
    encoded = tokenizer.encode("a")
    return encoded[0] if encoded and encoded[0] in tokenizer.all_special_ids else None
