# Licensed under the Apache License, Version 2.0.
"""The bootstrap over texts: sums over texts that are drawn with replacement."""

from collections.abc import Iterator, Sequence

import torch


Sums = dict[str, torch.Tensor]

# More texts are resampled in groups, so that memory and files do not grow with their number.
MOST_GROUPS = 200
RESAMPLES = 1000
SEED = 0
CHUNK = 25  # resamples per matrix product


class TextGroups:
    """Sums of each text, for the bootstrap; of more than `MOST_GROUPS` texts, sums of as many groups.

    A group holds consecutive texts, and groups differ in size by at most one text. A group is drawn as a whole, so
    intervals allow for neighbouring texts that resemble each other. Sums and draws do not depend on how texts are
    split into batches.

    Args:
        texts (`int`): Number of texts.
        names (sequence of `str`): Names of the sums to keep.
        sums (`dict[str, torch.Tensor]`, *optional*): Sums that another instance has collected, see `sums` below.

    Attributes:
        sums (`dict[str, torch.Tensor]`): Sums by name, `(groups, …)`, float64; empty before the first text.

    Example:
        >>> groups = TextGroups(3, ["tokens"])
        >>> for text, tokens in enumerate((8.0, 5.0, 2.0)):
        ...     groups.add(text, {"tokens": torch.tensor([tokens])})
        >>> [sums["tokens"].item() for sums in groups.resamples(4)]
        [12.0, 21.0, 15.0, 12.0]
    """

    def __init__(self, texts: int, names: Sequence[str], sums: Sums | None = None):
        self.texts, self.names, self.sums = texts, tuple(names), dict(sums or {})

    def __len__(self) -> int:
        return min(self.texts, MOST_GROUPS)

    def add(self, text: int, sums: Sums) -> None:
        """Adds the sums of a text, given its index."""
        group = text * len(self) // self.texts
        for name in self.names:
            if name not in self.sums:
                self.sums[name] = torch.zeros(len(self), *sums[name].shape, dtype=torch.float64)
            self.sums[name][group] += sums[name]

    def resamples(self, number: int = RESAMPLES, seed: int = SEED) -> Iterator[Sums]:
        """Sums over as many groups as there are, drawn with replacement; `number` times."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(self), (number, len(self)), generator=generator)
        times = torch.zeros(number, len(self), dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(number, len(self), dtype=torch.float64)
        )
        for some in times.split(CHUNK):
            tables = {name: torch.tensordot(some, table, dims=1) for name, table in self.sums.items()}
            for index in range(len(some)):
                yield {name: table[index] for name, table in tables.items()}
