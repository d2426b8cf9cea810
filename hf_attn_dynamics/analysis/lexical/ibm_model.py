# Licensed under the Apache License, Version 2.0.
"""IBM Model 1: translation probabilities of words, and the word alignments that they imply.

With a [`DiagonalPrior`], it is the reparametrization of IBM Model 2 of fast_align.
"""

import dataclasses
import json
import logging
from collections.abc import Iterable, Sequence
from itertools import chain, compress, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from scipy.sparse import csr_array

from ..._files import write_bytes
from ..notebook import MOST_ROWS, Html, html_table
from .diagonal_prior import DiagonalCells, DiagonalPrior


logger = logging.getLogger(__name__)

BEST_TRANSLATIONS = 3  # of a word, in notebooks
Word = str | int
Pair = tuple[Sequence[Word], Sequence[Word]]
Link = tuple[int, int]
Links = list[Link]


class IbmModel1:
    """IBM Model 1 of word translation (Brown et al. 1993; Snell et al. 2021, section 4.2).

    `p(y | x) = Π_t 1/L Σ_l Trans(y_t | x_l)`, without the factor for the length of y. The only parameters are a sparse
    table of expected counts C, with an entry for each pair of words that occurs in a sentence pair:
    `Trans(o | i) = C_io / Σ_o' C_io'` (equation 17). With the NULL word, each source sentence has an additional word,
    `None`, to which target words without a counterpart align; it counts in L.

    With a `prior`, `1/L` becomes the prior probability of an alignment to the source word at position l, which
    [`DiagonalPrior`] defines.

    Words are strings or integers, one type on each side. Training is deterministic.

    Args:
        null_word (`bool`): Whether target words can align to the NULL word.
        prior ([`DiagonalPrior`], *optional*): Prior of the positions; by default, all are equally probable.

    Attributes:
        counts (`scipy.sparse.csr_array` of shape `(source words, target words)`): Expected counts C of the last
            E step, float64. After one iteration without NULL word, the co-occurrences of equation 16.
        probabilities (`scipy.sparse.csr_array` of shape `(source words, target words)`): Trans, equation 17; rows sum
            to 1.
        source_words, target_words (`list`): Words of the rows and columns, in order of first occurrence; the first
            row is `None` if there is a NULL word.
        log_likelihoods (`list[float]`): Sum of ln p(y | x) over all pairs, in nats, before the first iteration and
            after each; it never decreases.
        skipped_pairs (`int`): Number of training pairs with an empty side.
        tension (`float`, *optional*): Tension λ of the fitted prior; `None` without a prior.

    Example:
        >>> pairs = [("das Haus", "the house"), ("das Buch", "the book"), ("ein Buch", "a book")]
        >>> pairs = [(source.split(), target.split()) for source, target in pairs]
        >>> model = IbmModel1(null_word=False).fit(pairs, iterations=10)
        >>> round(model.translation_probability("Buch", "book"), 2)
        0.99
        >>> model.align([(["ein", "Haus"], ["a", "house"])])
        [[(0, 0), (1, 1)]]
    """

    def __init__(self, null_word: bool = True, prior: DiagonalPrior | None = None):
        self.null_word, self.prior = null_word, prior
        self.tension = prior.tension if prior else None
        self.source_words: list[Word | None] = []
        self.target_words: list[Word] = []
        self.log_likelihoods: list[float] = []
        self.skipped_pairs = 0
        self._set_counts(csr_array((0, 0)))

    def fit(self, pairs: Iterable[Pair], iterations: int = 5, count_repeats: bool = True) -> "IbmModel1":
        """Fits the model by expectation maximization from uniform probabilities, also if it was fitted before.

        It needs about 50 bytes of memory for each pair of a source token and a target token in a sentence pair, and
        about 100 with a prior.

        Args:
            pairs (iterable of `(source, target)`): Tokens of each sentence and of its translation. Pairs with an empty
                side are left out with a warning, and counted in `skipped_pairs`.
            iterations (`int`): Number of E and M steps.
            count_repeats (`bool`): Whether repeated words of a target sentence count each time, as in the model. If
                not, they count once, as in NLTK; not with a prior, which needs their positions.

        Returns:
            [`IbmModel1`]: itself.

        Raises:
            ValueError: if `iterations` is not positive, `count_repeats` is `False` with a prior, no pair has words on
                both sides, or pairs are not two lists of words of one type.
        """
        if iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {iterations}.")
        if self.prior and not count_repeats:
            raise ValueError("count_repeats=False leaves words out, but a prior needs their positions; leave it True.")
        sources, targets = sides_of(pairs)
        full = [bool(len(source) and len(target)) for source, target in zip(sources, targets)]
        if not any(full):
            raise ValueError(f"pairs must hold words on both sides; none of {len(full)} pairs does.")
        if not all(full):
            logger.warning("%d of %d pairs with an empty side were left out.", full.count(False), len(full))
        sources, targets = list(compress(sources, full)), list(compress(targets, full))
        if not count_repeats:
            targets = [list(dict.fromkeys(target)) for target in targets]
        source_words = _vocabulary("source", chain.from_iterable(sources), self.null_word)
        target_words = _vocabulary("target", chain.from_iterable(targets))
        source, target = _Tokens.of(sources, source_words), _Tokens.of(targets, target_words)
        cells = _cooccurrences(source, target, self.null_word)

        diagonal, tension = self._diagonal(cells, source.lengths, target.lengths), self.prior and self.prior.tension
        # Without a prior, all probabilities are 1/L, whose logarithm is subtracted.
        log_lengths = 0.0 if diagonal else np.log(source.lengths + self.null_word) @ target.lengths
        weights = diagonal.probabilities(tension) if diagonal else np.ones(len(cells.token))
        # Rows sum the cells of each pair of words, columns the cells of each target token.
        tokens = csr_array((weights, cells.token, cells.first))
        trans = np.full(len(cells.source), 1 / len(target_words))
        token_sums = tokens.T @ trans
        log_likelihoods = [np.log(token_sums).sum() - log_lengths]
        for _ in range(iterations):
            counts = trans * (tokens @ (1 / token_sums))  # E step: equation 19, summed over all tokens
            if diagonal and self.prior.fit_tension:
                posteriors = tokens.data * np.repeat(trans, np.diff(cells.first)) / token_sums[cells.token]
                tension = diagonal.best_tension(posteriors)
                tokens.data = diagonal.probabilities(tension)
            trans = counts / np.bincount(cells.source, counts)[cells.source]  # M step: equation 17
            token_sums = tokens.T @ trans
            log_likelihoods.append(np.log(token_sums).sum() - log_lengths)

        self.source_words, self.target_words, self.tension = list(source_words), list(target_words), tension
        self.log_likelihoods = [float(value) for value in log_likelihoods]
        self.skipped_pairs = full.count(False)
        rows = np.append(0, np.bincount(cells.source).cumsum())
        self._set_counts(csr_array((counts, cells.target, rows), shape=(len(source_words), len(target_words))))
        return self

    def translation_probability(self, source: Word | None, target: Word) -> float:
        """Trans(target | source), equation 17.

        Args:
            source (`str` or `int`): A source word; `None` for the NULL word.
            target (`str` or `int`): A target word.

        Returns:
            `float`: 0 for unknown words, and for words that never occurred in a sentence pair.

        Raises:
            ValueError: if the model is not fitted, or `source` is `None` and there is no NULL word.
        """
        self._check_fitted()
        if source is None and not self.null_word:
            raise ValueError("source is None, but the model has no NULL word; create it with null_word=True.")
        row, column = self._source_index.get(source), self._target_index.get(target)
        return 0.0 if row is None or column is None else float(self.probabilities[row, column])

    def align(self, pairs: Iterable[Pair]) -> list[Links]:
        """The most probable alignment: each target word with the source word of the highest posterior probability.

        Among equally probable source words, the last one is chosen, and any of them before the NULL word, as in NLTK.
        A target word has no link if it aligns to the NULL word, or never occurred with any of the source words;
        unknown source words have no link.

        Args:
            pairs (iterable of `(source, target)`): Tokens of each sentence and of its translation.

        Returns:
            `list` of `list[tuple[int, int]]`: for each pair the links `(source position, target position)`, from 0,
            sorted.

        Raises:
            ValueError: if the model is not fitted, or pairs are not two lists of words.
        """
        cells, beta, _, target_lengths = self._look_up(pairs)
        best = np.zeros(target_lengths.sum())
        np.maximum.at(best, cells.token, beta)
        is_best = (beta > 0) & (beta == best[cells.token])
        position = np.full(len(best), -1)
        np.maximum.at(position, cells.token[is_best], cells.position[is_best])
        linked = np.flatnonzero(position >= 0)
        pair = np.repeat(np.arange(len(target_lengths)), target_lengths)[linked]
        target = linked - (target_lengths.cumsum() - target_lengths)[pair]
        links = zip(position[linked].tolist(), target.tolist())
        return [sorted(islice(links, count)) for count in np.bincount(pair, minlength=len(target_lengths)).tolist()]

    def alignment_probabilities(self, pairs: Iterable[Pair]) -> list[np.ndarray]:
        """Posterior probability of the alignment of each target word to each source word: α^IBM, equation 19.

        Args:
            pairs (iterable of `(source, target)`): Tokens of each sentence and of its translation.

        Returns:
            `list[np.ndarray]`: for each pair an array of shape `(target length, source length)`, float64. Rows sum to
            1 minus the probability of the NULL word; the row of a target word that never occurred with any of the
            source words is 0.

        Raises:
            ValueError: if the model is not fitted, or pairs are not two lists of words.
        """
        cells, beta, source_lengths, target_lengths = self._look_up(pairs)
        sums = np.bincount(cells.token, beta, minlength=target_lengths.sum())[cells.token]
        alpha = np.divide(beta, sums, out=np.zeros_like(beta), where=sums > 0)
        width = np.repeat(source_lengths, target_lengths)  # of each token's row
        rows = np.zeros(width.sum())
        real = cells.position >= 0
        rows[(width.cumsum() - width)[cells.token[real]] + cells.position[real]] = alpha[real]
        parts = np.split(rows, (target_lengths * source_lengths).cumsum()[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, zip(target_lengths, source_lengths))]

    def save(self, path: str | Path) -> None:
        """Saves the model to a safetensors file.

        Raises:
            ValueError: if the model is not fitted.
        """
        self._check_fitted()
        tensors = {
            "counts": self.counts.data,
            "columns": self.counts.indices,
            "rows": self.counts.indptr,
            "log_likelihoods": np.array(self.log_likelihoods),
        }
        words = {
            "source_words": self.source_words,
            "target_words": self.target_words,
            "skipped_pairs": self.skipped_pairs,
            "prior": self.prior and dataclasses.asdict(self.prior),
            "tension": self.tension,
        }
        write_bytes(path, save(tensors, metadata={"ibm_model_1": json.dumps(words)}))

    @classmethod
    def load(cls, path: str | Path) -> "IbmModel1":
        """Reads a file that `save` wrote.

        Raises:
            ValueError: if the file does not hold such a model.
        """
        try:
            with safe_open(path, "numpy") as file:
                values = json.loads(file.metadata()["ibm_model_1"])
                tensors = {name: file.get_tensor(name) for name in ("counts", "columns", "rows", "log_likelihoods")}
            null_word = values["source_words"][0] is None
            prior = values.get("prior")  # which earlier files do not have
            model = cls(null_word, DiagonalPrior(**prior) if prior else None)
            if prior:
                model.tension = DiagonalPrior(values["tension"]).tension  # which is checked
            model.source_words, model.target_words = values["source_words"], values["target_words"]
            model.log_likelihoods, model.skipped_pairs = tensors["log_likelihoods"].tolist(), values["skipped_pairs"]
            shape = len(model.source_words), len(model.target_words)
            counts = csr_array((tensors["counts"], tensors["columns"], tensors["rows"]), shape=shape)
            # Indices out of range would read foreign memory.
            counts.check_format(full_check=True)
            model._set_counts(counts)
        except (SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} does not hold an IbmModel1: {error!r}") from error
        return model

    def _repr_html_(self) -> str:
        """The most probable translations of the source words with the most aligned target words, for notebooks."""
        if not self.target_words:
            return html_table(["state"], [["not fitted; call fit() or load()"]], "IbmModel1")
        totals = self.counts.sum(axis=1)
        frequent = np.argsort(-totals, kind="stable")[:MOST_ROWS]
        rows = []
        for row in frequent.tolist():
            cells = slice(*self.probabilities.indptr[row : row + 2])
            columns, values = self.probabilities.indices[cells], self.probabilities.data[cells]
            best = np.argsort(-values, kind="stable")[:BEST_TRANSLATIONS]
            named = ", ".join(f"{self.target_words[columns[index]]} ({values[index]:.2f})" for index in best)
            word = self.source_words[row]
            rows.append([Html("<i>NULL word</i>") if word is None else str(word), float(totals[row]), named])
        size = f"{len(self.source_words):,} source words, {len(self.target_words):,} target words"
        which = (
            f"; the {MOST_ROWS} with the most aligned words are shown" if len(self.source_words) > MOST_ROWS else ""
        )
        header = ["source word", "aligned target words (expected)", "most probable translations"]
        return html_table(header, rows, f"IbmModel1: {size}{which}", digits=1)

    def _set_counts(self, counts: csr_array) -> None:
        self.counts = counts
        totals = np.repeat(counts.sum(axis=1), np.diff(counts.indptr))
        self.probabilities = csr_array((counts.data / totals, counts.indices, counts.indptr), shape=counts.shape)
        self._source_index = {word: number for number, word in enumerate(self.source_words)}
        self._target_index = {word: number for number, word in enumerate(self.target_words)}

    def _check_fitted(self) -> None:
        if not self.target_words:
            raise ValueError("the model has not been fitted; call fit() or load() first.")

    def _look_up(self, pairs: Iterable[Pair]) -> tuple["_Cells", np.ndarray, np.ndarray, np.ndarray]:
        """Cells of sentence pairs, β^IBM (equation 18) of each, and the lengths of all sources and targets.

        With a prior, β is multiplied by it.
        """
        self._check_fitted()
        sources, targets = sides_of(pairs)
        source, target = _Tokens.of(sources, self._source_index), _Tokens.of(targets, self._target_index)
        cells = _cooccurrences(source, target, self.null_word)
        known = (cells.source < len(self.source_words)) & (cells.target < len(self.target_words))
        beta = np.zeros(len(cells.source))
        if known.any():  # indexing with empty arrays does not return an array
            beta[known] = self.probabilities[cells.source[known], cells.target[known]]
        beta = np.repeat(beta, np.diff(cells.first))
        if diagonal := self._diagonal(cells, source.lengths, target.lengths):
            beta *= diagonal.probabilities(self.tension)
        return cells, beta, source.lengths, target.lengths

    def _diagonal(
        self, cells: "_Cells", source_lengths: np.ndarray, target_lengths: np.ndarray
    ) -> DiagonalCells | None:
        if self.prior is None:
            return None
        null_probability = self.prior.null_probability if self.null_word else 0.0
        return DiagonalCells(cells.token, cells.position, source_lengths, target_lengths, null_probability)


class _Tokens(NamedTuple):
    """Word indices of a corpus, concatenated, and the lengths of its sentences."""

    words: np.ndarray
    lengths: np.ndarray
    vocabulary_size: int

    @classmethod
    def of(cls, sentences: list[Sequence[Word]], index: dict[Word | None, int]) -> "_Tokens":
        """Unknown words share the index after the last one."""
        lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
        words = map(index.get, chain.from_iterable(sentences), repeat(len(index)))
        return cls(np.fromiter(words, dtype=np.int32, count=lengths.sum()), lengths, len(index) + 1)


class _Cells(NamedTuple):
    """All pairs of a source token and a target token in a sentence pair ("cells"), sorted by their words.

    `source`, `target` and `first` have a value for each pair of words: their indices and the index of their first
    cell, with the total number of cells at the end. `token` and `position` have a value for each cell: the index of
    the target token in the corpus, and the position of the source token in its sentence, -1 for NULL.
    """

    source: np.ndarray
    target: np.ndarray
    first: np.ndarray
    token: np.ndarray
    position: np.ndarray


def _cooccurrences(source: _Tokens, target: _Tokens, null_word: bool) -> _Cells:
    """Cells of a corpus; the NULL word, if there is one, has index 0."""
    source_start = source.lengths.cumsum() - source.lengths
    source_words = np.insert(source.words, source_start, 0) if null_word else source.words
    widths = source.lengths + null_word
    integer = np.int32 if widths @ target.lengths < 2**31 else np.int64

    by_word = np.argsort(target.words, kind="stable").astype(integer)
    target_words = target.words[by_word]
    pair = np.repeat(np.arange(len(widths)), target.lengths)[by_word]
    width = widths[pair]
    row_start = np.append(0, width.cumsum()).astype(integer)
    position = np.arange(row_start[-1], dtype=integer) - np.repeat(row_start[:-1], width)
    sentence_start = (widths.cumsum() - widths).astype(integer)[pair]
    words = source_words[position + np.repeat(sentence_start, width)]
    # Rows are target tokens, in the order of their words. Converting rows to columns sorts all cells by source word in
    # linear time, and keeps the order within each.
    shape = len(target_words), source.vocabulary_size
    columns = csr_array((position, words, row_start), shape=shape).tocsc()
    target_of_cell = target_words[columns.indices]
    is_first = np.ones(len(target_of_cell), dtype=bool)
    is_first[1:] = target_of_cell[1:] != target_of_cell[:-1]
    is_first[columns.indptr[columns.indptr < len(is_first)]] = True
    first = np.flatnonzero(is_first).astype(integer)
    return _Cells(
        source=np.repeat(np.arange(shape[1]), np.diff(np.searchsorted(first, columns.indptr))),
        target=target_of_cell[first],
        first=np.append(first, integer(len(is_first))),
        token=by_word[columns.indices],
        position=columns.data - integer(null_word),
    )


def _vocabulary(side: str, words: Iterable[Word], null_word: bool = False) -> dict[Word | None, int]:
    try:
        different = list(dict.fromkeys(words))
    except TypeError as error:
        raise ValueError(f"the words of the {side} side must be strings or whole numbers: {error}.") from error
    kinds = {type(word) for word in different}
    if kinds not in ({str}, {int}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"the words of the {side} side must be all strings or all whole numbers, got {names}.")
    return {word: number for number, word in enumerate([None] * null_word + different)}


def sides_of(pairs: Iterable[Pair]) -> tuple[list[Sequence[Word]], list[Sequence[Word]]]:
    """Sources and targets of sentence pairs; arrays and tensors become lists."""
    sides: tuple[list, list] = [], []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"pair {number} of pairs must be (source words, target words), got {pair!r}.")
        for side, words in zip(sides, pair):
            if isinstance(words, str):
                raise ValueError(f"pair {number} of pairs has the string {words!r} for a list of words; split it.")
            side.append(words.tolist() if hasattr(words, "tolist") else words)
    return sides
