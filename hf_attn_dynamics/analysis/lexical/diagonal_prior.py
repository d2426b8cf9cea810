# Licensed under the Apache License, Version 2.0.
"""Alignments near the diagonal are more probable: the reparametrization of IBM Model 2 by Dyer et al. (2013)."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from ...models.number_checks import is_finite


MOST_TENSION = 50.0


@dataclass(frozen=True)
class DiagonalPrior:
    """Prior of [`IbmModel1`] by which words align to words at about the same place of their sentence.

    The t-th of m target words aligns to the NULL word with probability p₀, and to the l-th of n source words with
    probability `(1 − p₀) exp(−λ |t/m − l/n|) / Z`, where positions count from 1, and Z sums over l (fast_align; Dyer,
    Chahuneau and Smith 2013, "A Simple, Fast, and Effective Reparameterization of IBM Model 2").

    Args:
        tension (`float`): λ, from 0 to 50. With 0, all source words are equally probable. If it is fitted, the value
            before the first iteration.
        null_probability (`float`): p₀, from 0 to below 1; not fitted. A model without NULL word does not use it.
        fit_tension (`bool`): Whether each M step sets λ to the value with the largest expected log-likelihood.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> from hf_attn_dynamics import IbmModel1
        >>> pairs = [("a b c".split(), "x y z".split()), ("c a".split(), "z x".split())]
        >>> model = IbmModel1(prior=DiagonalPrior()).fit(pairs)
        >>> model.align([("b a".split(), "y x".split())])
        [[(0, 0), (1, 1)]]
        >>> model.tension > 4
        True
    """

    tension: float = 4.0
    null_probability: float = 0.08
    fit_tension: bool = True

    def __post_init__(self):
        if not is_finite(self.tension) or not 0 <= self.tension <= MOST_TENSION:
            raise ValueError(f"tension must be a number from 0 to {MOST_TENSION:g}, got {self.tension!r}.")
        if not is_finite(self.null_probability) or not 0 <= self.null_probability < 1:
            raise ValueError(f"null_probability must be at least 0 and below 1, got {self.null_probability!r}.")


class DiagonalCells:
    """Probabilities of the cells of a corpus, which are all pairs of a source token and a target token of a pair.

    The prior depends only on the position of the target token and on both lengths. Each combination of these numbers
    is a place, whose alternatives are the source positions.

    Args:
        token (`np.ndarray`): Index of the target token of each cell, in the corpus.
        position (`np.ndarray`): Source position of each cell, -1 for the NULL word.
        source_lengths, target_lengths (`np.ndarray`): Number of words of each sentence.
        null_probability (`float`): Probability of the NULL word.
    """

    def __init__(
        self,
        token: np.ndarray,
        position: np.ndarray,
        source_lengths: np.ndarray,
        target_lengths: np.ndarray,
        null_probability: float,
    ):
        starts = np.repeat(target_lengths.cumsum() - target_lengths, target_lengths)
        place = np.arange(len(starts)) - starts
        lengths = (target_lengths, source_lengths)
        for length in lengths:
            place = place * (length.max(initial=0) + 1) + np.repeat(length, target_lengths)
        _, first, of_token = np.unique(place, return_index=True, return_inverse=True)
        target_length, source_length = (np.repeat(length, target_lengths)[first] for length in lengths)
        offset = source_length.cumsum() - source_length
        self.place = np.repeat(np.arange(len(first)), source_length)
        source = np.arange(len(self.place)) - np.repeat(offset, source_length)
        target = (first - starts[first] + 1) / target_length
        self.distance = np.abs(
            np.repeat(target, source_length) - (source + 1) / np.repeat(source_length, source_length)
        )
        self.is_word = position >= 0
        self.alternative = offset[of_token][token[self.is_word]] + position[self.is_word]
        self.null_probability = null_probability

    def probabilities(self, tension: float) -> np.ndarray:
        """Prior probability of each cell."""
        values = np.full(len(self.is_word), self.null_probability)
        values[self.is_word] = (1 - self.null_probability) * self._alternatives(tension)[self.alternative]
        return values

    def best_tension(self, posteriors: np.ndarray) -> float:
        """The tension with the largest expected log-likelihood under posterior probabilities of the cells."""
        weights = np.bincount(self.alternative, posteriors[self.is_word], minlength=len(self.place))
        of_place = np.bincount(self.place, weights)

        def slope(tension: float) -> float:
            """Derivative of the expected log-likelihood, which is concave."""
            expected = np.bincount(self.place, self._alternatives(tension) * self.distance)
            return float(of_place @ expected - weights @ self.distance)

        if slope(0.0) <= 0:
            return 0.0
        return MOST_TENSION if slope(MOST_TENSION) >= 0 else float(brentq(slope, 0.0, MOST_TENSION))

    def _alternatives(self, tension: float) -> np.ndarray:
        """Probability of each source position of each place, without the NULL word."""
        values = np.exp(-tension * self.distance)
        return values / np.bincount(self.place, values)[self.place]
