# Licensed under the Apache License, Version 2.0.
"""Batches of pairs that are of similar length on both sides, so that hardly anything is computed for padding."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_utils import has_length

from .trainer import HeadwiseSeq2SeqTrainer


class SimilarLengthSampler(Sampler[int]):
    """Examples in an order in which each batch holds some of the same lengths, and batches come in random order.

    All examples are sorted by length, those of the same lengths shuffled, and cut into batches; what is left over
    comes last. Each epoch does so anew.

    Args:
        lengths (sequence of `tuple[int, ...]`): Lengths of each example; examples are sorted by the first of these,
            then by the next.
        batch_size (`int`): Examples of a batch.
        seed (`int`): Of the order; the same seed and epoch give the same.

    Example:
        >>> order = list(SimilarLengthSampler([(3, 9), (1, 4), (3, 9), (1, 5)], batch_size=2))
        >>> sorted(sorted(batch) for batch in (order[:2], order[2:]))
        [[0, 2], [1, 3]]
    """

    def __init__(self, lengths: Sequence[tuple[int, ...]], batch_size: int, seed: int = 0):
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Says which pass over the data begins, as the stock trainer does."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self), generator=generator).tolist()
        order = sorted(shuffled, key=self.lengths.__getitem__)
        whole = len(order) // self.batch_size
        for batch in torch.randperm(whole, generator=generator).tolist():
            yield from order[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from order[whole * self.batch_size :]


class SimilarLengthSeq2SeqTrainer(HeadwiseSeq2SeqTrainer):
    """[`HeadwiseSeq2SeqTrainer`] whose `group_by_length` looks at the target, too, and at all of the training data.

    The stock strategy sorts by the source alone, within 50 batches.
    """

    def _get_train_sampler(self, train_dataset=None):
        data = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not has_length(data):
            return super()._get_train_sampler(train_dataset)
        by_column = hasattr(data, "column_names")
        sides = (data[name] if by_column else [row[name] for row in data] for name in ("labels", "input_ids"))
        lengths = [(len(target), len(source)) for target, source in zip(*sides)]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return SimilarLengthSampler(lengths, self.args.train_batch_size, seed)
