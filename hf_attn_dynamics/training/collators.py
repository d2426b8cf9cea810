# Licensed under the Apache License, Version 2.0.
"""Batches for pretraining whose random choices depend on nothing but the seed, the epoch and the example."""

import hashlib

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..models.ignored_labels import IGNORED


class _CorruptingCollator:
    """Pads examples, and corrupts a share of their ordinary tokens by a pure function of `(seed, epoch, input_ids)`.

    Subclasses say by `corrupt` what becomes of the tokens that are chosen.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        share_name: str,
        share: float,
        seed: int,
        pad_to_multiple_of: int | None,
    ):
        if getattr(tokenizer, "pad_token_id", None) is None:
            raise ValueError(f"{type(self).__name__} needs a tokenizer with a pad_token.")
        if not 0 < share < 1:
            raise ValueError(f"{share_name} must lie between 0 and 1, got {share}.")
        self.tokenizer = tokenizer
        self.seed = seed
        self.epoch = 0
        self.pad_to_multiple_of = pad_to_multiple_of
        self._share = share
        self._special = np.array(sorted(set(tokenizer.all_special_ids)))

    def set_epoch(self, epoch: int) -> None:
        """Have each example corrupted anew; [`HeadwiseTrainer`] calls this at the start of every epoch."""
        self.epoch = epoch

    def corrupt(self, input_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Corrupted ids and labels of one example, both of shape `(length,)`."""
        raise NotImplementedError

    def _choose(self, ids: np.ndarray) -> tuple[np.ndarray, np.random.Generator]:
        """Positions of the tokens to corrupt, at least one if any is ordinary, and the random state to go on with."""
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        random = np.random.default_rng([self.seed, self.epoch, int.from_bytes(digest, "little")])
        candidates = np.flatnonzero(~np.isin(ids, self._special))
        if len(candidates) == 0:
            return candidates, random
        chosen = candidates[random.random(len(candidates)) < self._share]
        if len(chosen) == 0:
            chosen = random.choice(candidates, size=1)
        return chosen, random

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        columns = {name: [np.asarray(f[name]) for f in features] for name in features[0] if name != "labels"}
        if "labels" in features[0]:
            columns["labels"] = [np.asarray(f["labels"]) for f in features]
        else:
            pairs = [self.corrupt(ids) for ids in columns["input_ids"]]
            columns["input_ids"], columns["labels"] = (list(column) for column in zip(*pairs))
        columns.setdefault("attention_mask", [np.ones(len(ids), dtype=np.int64) for ids in columns["input_ids"]])
        length = max(len(ids) for ids in columns["input_ids"])
        if self.pad_to_multiple_of:
            length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fill = {"input_ids": self.tokenizer.pad_token_id, "labels": IGNORED}
        return {name: _padded(rows, length, fill.get(name, 0)) for name, rows in columns.items()}


class MaskedLanguageModelCollator(_CorruptingCollator):
    """Pads examples and masks tokens for masked language modelling (Devlin et al. 2019).

    A chosen token becomes the mask token (80 %), a random token (10 %) or stays (10 %). What is chosen is a pure
    function of `(seed, epoch, input_ids)`: two runs, a resumed run, any number of processes or workers and any batch
    size see the same masks, and the global random state is left alone. Labels are the original tokens, -100 where none
    was chosen. Examples that carry `labels` are only padded.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its mask token is put in, its special tokens are never chosen.
        mlm_probability (`float`): Chance of each token to be chosen; at least one token of an example is.
        seed (`int`): Seed of the masks.
        pad_to_multiple_of (`int`, *optional*): Pad the length to a multiple of this.

    Raises:
        ValueError: if the tokenizer has no mask or pad token, or `mlm_probability` is not between 0 and 1.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        mlm_probability: float = 0.15,
        seed: int = 0,
        pad_to_multiple_of: int | None = None,
    ):
        super().__init__(tokenizer, "mlm_probability", mlm_probability, seed, pad_to_multiple_of)
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise ValueError("masked language modelling needs a tokenizer with a mask_token.")
        self._ordinary = np.setdiff1d(np.arange(len(tokenizer)), self._special)

    def corrupt(self, input_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Masked ids and labels of one example, both of shape `(length,)`; labels are -100 where none was chosen."""
        ids = np.asarray(input_ids, dtype=np.int64)
        chosen, random = self._choose(ids)
        labels = np.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        masked = ids.copy()
        masked[chosen[fate < 0.8]] = self.tokenizer.mask_token_id
        replaced = chosen[(fate >= 0.8) & (fate < 0.9)]
        masked[replaced] = random.choice(self._ordinary, size=len(replaced))
        return masked, labels


class ReplacedTokenCollator(_CorruptingCollator):
    """Pads examples and replaces tokens for replaced-token detection (Clark et al. 2020), with a unigram generator.

    Each chosen token is replaced by one drawn from the frequencies of the corpus. Labels are 1 where that is another
    token and 0 everywhere else: where it is the original one, and on special tokens, which ELECTRA's loss counts, too.
    Padding has -100. All is a pure function of `(seed, epoch, input_ids)`, as in [`MaskedLanguageModelCollator`].
    Examples that carry `labels` are only padded.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its special tokens are never chosen, and never drawn.
        counts (array of shape `(len(tokenizer),)`): How often each token occurs, as [`token_counts`] has it.
        replace_probability (`float`): Chance of each token to be chosen; at least one token of an example is.
        seed (`int`): Seed of the choices and draws.
        pad_to_multiple_of (`int`, *optional*): Pad the length to a multiple of this.

    Raises:
        ValueError: if the tokenizer has no pad token, `counts` is of another length, has a value that is negative or
            not finite, or has none for ordinary tokens, or `replace_probability` is not between 0 and 1.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        counts: np.ndarray,
        replace_probability: float = 0.15,
        seed: int = 0,
        pad_to_multiple_of: int | None = None,
    ):
        super().__init__(tokenizer, "replace_probability", replace_probability, seed, pad_to_multiple_of)
        frequencies = np.array(counts, dtype=np.float64)
        if frequencies.shape != (len(tokenizer),):
            raise ValueError(
                f"counts must have shape ({len(tokenizer)},), one for each token of the tokenizer, got "
                f"{frequencies.shape}."
            )
        if wrong := np.flatnonzero(~np.isfinite(frequencies) | (frequencies < 0)).tolist():
            raise ValueError(
                f"counts must be at least 0 and finite, got {frequencies[wrong[0]]} for token {wrong[0]}."
            )
        frequencies[self._special] = 0
        if not frequencies.any():
            raise ValueError("counts has no token but special ones to draw; count those of a corpus.")
        cumulative = frequencies.cumsum()
        self._cumulative = cumulative / cumulative[-1]

    def corrupt(self, input_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids with replacements and labels of one example, both of shape `(length,)`; 1 where an id has changed."""
        ids = np.asarray(input_ids, dtype=np.int64)
        chosen, random = self._choose(ids)
        replaced = ids.copy()
        replaced[chosen] = np.searchsorted(self._cumulative, random.random(len(chosen)), side="right")
        return replaced, (replaced != ids).astype(np.int64)


def _padded(rows: list[np.ndarray], length: int, value: int) -> torch.Tensor:
    """Rows of different lengths as one tensor (batch, length); scalars become a tensor (batch,)."""
    if rows[0].ndim == 0:
        return torch.from_numpy(np.stack(rows))
    is_float = np.issubdtype(rows[0].dtype, np.floating)
    batch = np.full((len(rows), length), value, dtype=np.float32 if is_float else np.int64)
    for target, row in zip(batch, rows):
        target[: len(row)] = row
    return torch.from_numpy(batch)
