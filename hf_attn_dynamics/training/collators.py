# Licensed under the Apache License, Version 2.0.
"""Collators: for pretraining, with random choices that only depend on seed, epoch and example, and for targets."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..models.ignored_labels import IGNORED
from .target_columns import collate_with_targets, target_names


class _CorruptingCollator:
    """Pads examples, and corrupts ordinary tokens by a pure function of `(seed, epoch, input_ids)`.

    Subclasses define `corrupt`.
    """

    padding_side = "right"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        probability: float,
        seed: int,
        pad_to_multiple_of: int | None,
    ):
        if getattr(tokenizer, "pad_token_id", None) is None:
            raise ValueError(f"{type(self).__name__} needs a tokenizer with a pad_token.")
        if not 0 < probability < 1:
            raise ValueError(f"{name} must be between 0 and 1, got {probability}.")
        self.tokenizer = tokenizer
        self.seed = seed
        self.epoch = 0
        self.pad_to_multiple_of = pad_to_multiple_of
        self._probability = probability
        self._special = np.array(sorted(set(tokenizer.all_special_ids)))

    def set_epoch(self, epoch: int) -> None:
        """Changes the corruption of all examples; [`HeadwiseTrainer`] calls this at the start of every epoch."""
        self.epoch = epoch

    def corrupt(self, input_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Corrupted ids and labels of one example, both of shape `(length,)`."""
        raise NotImplementedError

    def _choose(self, ids: np.ndarray) -> tuple[np.ndarray, np.random.Generator]:
        """Indices of the tokens to corrupt, at least one if any is ordinary, and the random generator."""
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        random = np.random.default_rng([self.seed, self.epoch, int.from_bytes(digest, "little")])
        candidates = np.flatnonzero(~np.isin(ids, self._special))
        if len(candidates) == 0:
            return candidates, random
        chosen = candidates[random.random(len(candidates)) < self._probability]
        if len(chosen) == 0:
            chosen = random.choice(candidates, size=1)
        return chosen, random

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        names = target_names(features)
        if names:
            return collate_with_targets(self, features, names, self.padding_side)
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

    A chosen token is replaced by the mask token (80 %) or a random token (10 %), or is kept (10 %). The choice is a
    pure function of `(seed, epoch, input_ids)`: masks are the same in resumed runs and for any number of processes,
    workers and any batch size, and the global random state is not used. Labels are the original tokens at chosen
    tokens, -100 elsewhere. Examples with `labels` are only padded.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Has a mask token; its special tokens are never chosen.
        mlm_probability (`float`): Probability of choosing each token; at least one token of an example is chosen.
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
        """Masked ids and labels of one example, both of shape `(length,)`; labels are -100 at unchosen tokens."""
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

    Each chosen token is replaced by one sampled from the frequencies of the corpus. Labels are 1 where the token has
    changed and 0 elsewhere, special tokens included, which ELECTRA's loss counts, too; padding has -100. All choices
    are a pure function of `(seed, epoch, input_ids)`, as in [`MaskedLanguageModelCollator`]. Examples with `labels`
    are only padded.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its special tokens are never chosen and never sampled.
        counts (array of shape `(len(tokenizer),)`): Number of occurrences of each token, see [`token_counts`].
        replace_probability (`float`): Probability of choosing each token; at least one token of an example is chosen.
        seed (`int`): Seed of the choices and samples.
        pad_to_multiple_of (`int`, *optional*): Pad the length to a multiple of this.

    Raises:
        ValueError: if the tokenizer has no pad token; if `counts` has the wrong length, negative or non-finite values,
            or only zeros for ordinary tokens; or if `replace_probability` is not between 0 and 1.
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
            raise ValueError("counts must be positive for some ordinary token; count the tokens of a corpus.")
        cumulative = frequencies.cumsum()
        self._cumulative = cumulative / cumulative[-1]

    def corrupt(self, input_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Replaced ids and labels of one example, both of shape `(length,)`; labels are 1 at changed ids."""
        ids = np.asarray(input_ids, dtype=np.int64)
        chosen, random = self._choose(ids)
        replaced = ids.copy()
        replaced[chosen] = np.searchsorted(self._cumulative, random.random(len(chosen)), side="right")
        return replaced, (replaced != ids).astype(np.int64)


class GuidanceCollator:
    """Pads columns with the targets of guided heads, and leaves all other columns to another collator.

    The columns are those whose names begin with `guidance_`. Their values, such as those that [`align_targets`]
    returns, determine the kind of target:

    | values of an example | target | padding |
    |---|---|---|
    | integers, `(rows,)` | `"keys"`: the key of each row | -100 |
    | numbers with a decimal point, `(keys,)` | `"weights"`: one distribution for all rows | 0 |
    | integers, `(rows, k)` | `"sparse"`: the keys of each row | -100, also to the largest k |
    | numbers with a decimal point, `(rows, k)` | `"sparse"`: the weights of these keys | 0, also to the largest k |

    The weights of `guidance_NAME` are `guidance_NAME_weights`, which may also be integers. Rows may have different k.
    [`align_sparse_targets`] returns both columns.

    Rows and keys are padded to the lengths that the other collator gives the sequences they belong to, on the same
    side, `pad_to_multiple_of` included. Padding on the left shifts the keys, too. An example whose column is `None`
    has no targets. The collators of this package pad targets themselves if rows and keys are `input_ids`.

    Args:
        collator (callable): Collator of all other columns, such as [`DataCollatorWithPadding`],
            [`DataCollatorForSeq2Seq`] or [`MaskedLanguageModelCollator`].
        rows (`dict[str, str]`, *optional*): Column whose tokens are the rows of a target, by column of the target; by
            default `input_ids`. For cross-attention, `{"guidance_alignment": "labels"}`.
        keys (`dict[str, str]`, *optional*): The same for the keys; by default `input_ids`.
        padding_side (`str`, *optional*): `"right"` or `"left"`; by default the side of the collator or its tokenizer,
            or `"right"` if they have none.

    Raises:
        ValueError: if `padding_side` is unknown. When called, if an example lacks a column that others have, targets
            have another length than their sequence, a key is not in it, the values of examples differ in kind, or the
            other collator concatenates examples or truncates tokens with targets.

    Example:
        >>> from transformers import DataCollatorWithPadding
        >>> from hf_attn_dynamics.data import train_byte_level_bpe
        >>> tokenizer = train_byte_level_bpe(["Dogs bark"], vocab_size=265)
        >>> collator = GuidanceCollator(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4))
        >>> example = {**tokenizer("bark"), "guidance_syntax": [-100, 2, 1, -100]}
        >>> shorter = {"input_ids": [0, 2], "attention_mask": [1, 1], "guidance_syntax": [1, -100]}
        >>> collator([example, shorter])["guidance_syntax"]
        tensor([[-100,    2,    1, -100],
                [   1, -100, -100, -100]])
    """

    def __init__(
        self,
        collator: Callable[[list[dict]], Mapping[str, Any]],
        rows: dict[str, str] | None = None,
        keys: dict[str, str] | None = None,
        padding_side: str | None = None,
    ):
        if padding_side is None:
            padded_by = collator if hasattr(collator, "padding_side") else getattr(collator, "tokenizer", None)
            padding_side = getattr(padded_by, "padding_side", "right")
        if padding_side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}.")
        self.collator = collator
        self.rows = dict(rows or {})
        self.keys = dict(keys or {})
        self.padding_side = padding_side

    def __getattr__(self, name: str) -> Any:
        # Trainers ask for `epoch` and `set_epoch`, which only exist if the other collator has them.
        if name == "collator" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, features: list[dict]) -> dict[str, Any]:
        names = target_names(features)
        return collate_with_targets(self.collator, features, names, self.padding_side, self.rows, self.keys)


def _padded(rows: list[np.ndarray], length: int, value: int) -> torch.Tensor:
    """Pads rows to a tensor of shape `(batch, length)`; scalars become a tensor of shape `(batch,)`."""
    if rows[0].ndim == 0:
        return torch.from_numpy(np.stack(rows))
    is_float = np.issubdtype(rows[0].dtype, np.floating)
    batch = np.full((len(rows), length), value, dtype=np.float32 if is_float else np.int64)
    for target, row in zip(batch, rows):
        target[: len(row)] = row
    return torch.from_numpy(batch)
