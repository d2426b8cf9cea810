# Licensed under the Apache License, Version 2.0.
"""Batches for pretraining whose random choices depend on nothing but the seed, the epoch and the example."""

import hashlib

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase


class MaskedLanguageModelCollator:
    """Pads examples and masks tokens for masked language modelling (Devlin et al. 2019).

    A chosen token becomes the mask token (80 %), a random token (10 %) or stays (10 %). What is chosen is a pure
    function of `(seed, epoch, input_ids)`: two runs, a resumed run, any number of processes or workers and any batch
    size see the same masks, and the global random state is left alone. Examples that carry `labels` are only padded.

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
        for name in ("mask_token_id", "pad_token_id"):
            if getattr(tokenizer, name, None) is None:
                raise ValueError(f"masked language modelling needs a tokenizer with a {name.removesuffix('_id')}.")
        if not 0 < mlm_probability < 1:
            raise ValueError(f"mlm_probability must lie between 0 and 1, got {mlm_probability}.")
        self.tokenizer = tokenizer
        self.mlm_probability = mlm_probability
        self.seed = seed
        self.epoch = 0
        self.pad_to_multiple_of = pad_to_multiple_of
        special = set(tokenizer.all_special_ids)
        self._special = np.array(sorted(special))
        self._ordinary = np.array([token for token in range(len(tokenizer)) if token not in special])

    def set_epoch(self, epoch: int) -> None:
        """Have each example masked anew; [`HeadwiseTrainer`] calls this at the start of every epoch."""
        self.epoch = epoch

    def mask(self, input_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Masked ids and labels of one example, both of shape `(length,)`; labels are -100 where none was chosen."""
        ids = np.asarray(input_ids, dtype=np.int64)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        random = np.random.default_rng([self.seed, self.epoch, int.from_bytes(digest, "little")])
        candidates = np.flatnonzero(~np.isin(ids, self._special))
        labels = np.full_like(ids, -100)
        if len(candidates) == 0:
            return ids, labels
        chosen = candidates[random.random(len(candidates)) < self.mlm_probability]
        if len(chosen) == 0:
            chosen = random.choice(candidates, size=1)
        labels[chosen] = ids[chosen]
        fate = random.random(len(chosen))
        masked = ids.copy()
        masked[chosen[fate < 0.8]] = self.tokenizer.mask_token_id
        replaced = chosen[(fate >= 0.8) & (fate < 0.9)]
        masked[replaced] = random.choice(self._ordinary, size=len(replaced))
        return masked, labels

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        columns = {name: [np.asarray(f[name]) for f in features] for name in features[0] if name != "labels"}
        if "labels" in features[0]:
            columns["labels"] = [np.asarray(f["labels"]) for f in features]
        else:
            pairs = [self.mask(ids) for ids in columns["input_ids"]]
            columns["input_ids"], columns["labels"] = (list(column) for column in zip(*pairs))
        columns.setdefault("attention_mask", [np.ones(len(ids), dtype=np.int64) for ids in columns["input_ids"]])
        length = max(len(ids) for ids in columns["input_ids"])
        if self.pad_to_multiple_of:
            length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fill = {"input_ids": self.tokenizer.pad_token_id, "labels": -100}
        return {name: _padded(rows, length, fill.get(name, 0)) for name, rows in columns.items()}


def _padded(rows: list[np.ndarray], length: int, value: int) -> torch.Tensor:
    """Rows of different lengths as one tensor (batch, length); scalars become a tensor (batch,)."""
    if rows[0].ndim == 0:
        return torch.from_numpy(np.stack(rows))
    is_float = np.issubdtype(rows[0].dtype, np.floating)
    batch = np.full((len(rows), length), value, dtype=np.float32 if is_float else np.int64)
    for target, row in zip(batch, rows):
        target[: len(row)] = row
    return torch.from_numpy(batch)
