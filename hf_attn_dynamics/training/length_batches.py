# Licensed under the Apache License, Version 2.0.
"""Batches of sentence pairs with similar lengths on both sides, to minimise padding."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers.trainer_utils import has_length

from .trainer import HeadwiseSeq2SeqTrainer


class SimilarLengthSampler(Sampler[int]):
    """Sampler whose batches have examples of similar lengths, in random order.

    In each epoch, examples are sorted by length, with random order among equal lengths, and divided into batches; the
    incomplete batch comes last.

    Args:
        lengths (sequence of `tuple[int, ...]`): Lengths of each example, compared in order.
        batch_size (`int`): Number of examples in a batch.
        seed (`int`): Random seed; seed and epoch determine the order.

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
        """Sets the epoch, as the stock trainer does."""
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
    """[`HeadwiseSeq2SeqTrainer`] whose `group_by_length` sorts all training data by target and source length.

    The stock strategy sorts by source length only, within 50 batches.
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
