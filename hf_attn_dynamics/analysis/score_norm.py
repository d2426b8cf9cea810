# Licensed under the Apache License, Version 2.0.
"""Scores and embedding norms of words in the training of a bag-of-words attention classifier (Lu et al. 2021).

The score of a word is s = qᵀκ and its vector v = ‖q‖ν, where κ is its key, ν its embedding, and q the query.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.stats import t as student_t

from ..models.precision import at_least_single
from .notebook import MOST_ROWS, html_table


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..data.word_counts import WordCounts

MOST_PANELS = 6  # of a picture, unless words are named


def score_norm_curve(score: torch.Tensor | float, others: torch.Tensor | float) -> torch.Tensor:
    """Theoretical norm of a word's vector, given its score: ‖v‖ = √(2 (s + exp(s)/m − 1/m)) (corollary 1).

    It holds for any classifier if scores and vectors are close to 0 at the start of training, and other words keep
    theirs.

    Args:
        score (`torch.Tensor` or `float`): Scores s.
        others (`torch.Tensor` or `float`): Number m of other words in the sentences with the word; the harmonic mean
            for sentences of several lengths, see [`harmonic_others`]. Broadcasts with `score`.

    Returns:
        `torch.Tensor` of the broadcast shape; 0 for negative scores, which the theory excludes; NaN where `others` is
        NaN, as for words in no sentence.

    Raises:
        ValueError: if `others` is 0 or less.

    Example:
        >>> score_norm_curve(torch.tensor([0.0, 3.35]), others=20)
        tensor([0.0000, 3.0741])
    """
    score, others = torch.as_tensor(score), torch.as_tensor(others)
    if (others <= 0).any():
        raise ValueError(f"others must be greater than 0, got {others[others <= 0].min().item():g}.")
    return (2 * (score + torch.expm1(score) / others)).clamp(min=0).sqrt()


class ScoreNormTerms(NamedTuple):
    """Both sides of theorem 1 at one step, see [`score_norm_terms`].

    Args:
        score (`torch.Tensor` of shape `(…, words)`): s_t + exp(s_t) ⟨1 / Z(χ∖t)⟩.
        norm (`torch.Tensor` of shape `(…, words)`): ½ ‖v_t − ⟨v̄(χ∖t)⟩‖².
    """

    score: torch.Tensor
    norm: torch.Tensor

    def residual(self, before: "ScoreNormTerms") -> torch.Tensor:
        """Residual of theorem 1 between two steps: growth of the score term minus growth of the norm term."""
        return (self.score - before.score) - (self.norm - before.norm)


def score_norm_terms(
    scores: torch.Tensor, vectors: torch.Tensor, counts: "WordCounts", words: Sequence[int]
) -> ScoreNormTerms:
    """Terms of the identity between score and vector of a word, which grow equally in training (theorem 1).

    ⟨·⟩ is the mean over the sentences χ with the word t. For the sentence without t, Z(χ∖t) = Σ_w exp(s_w) and
    v̄(χ∖t) = Σ_w exp(s_w) v_w / Z(χ∖t). Sentences of t alone do not count.

    Args:
        scores (`torch.Tensor` of shape `(…, vocab_size)`): Scores of all words.
        vectors (`torch.Tensor` of shape `(…, vocab_size, size)`): Their vectors.
        counts ([`WordCounts`]): The sentences of the training set.
        words (`list[int]`): The words t.

    Returns:
        [`ScoreNormTerms`]: float64; accurate to six digits if no score exceeds those of other words by more than 20.

    Raises:
        ValueError: if a word is not in the vocabulary or in no sentence with others, or scores or vectors do not cover
            the vocabulary.

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> counts = WordCounts.from_sentences([[0, 1, 2], [0, 2]], vocab_size=3)
        >>> terms = score_norm_terms(torch.zeros(3), torch.tensor([[2.0], [0.0], [0.0]]), counts, [0])
        >>> terms.score, terms.norm
        (tensor([0.7500], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    for name, size in (("scores", scores.shape[-1]), ("vectors", vectors.shape[-2])):
        if size != counts.vocab_size:
            raise ValueError(f"{name} are for {size} words, but counts for {counts.vocab_size}; give all words.")
    # Double precision against cancellation: an attended word has nearly all the weight.
    scores, vectors = scores.double(), vectors.double().mT  # words last, as in scores
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = counts.sum_over_words(weights)
    sums = counts.sum_over_words(weights[..., None, :] * vectors)
    ratios, means = [], []
    for word in words:
        if not 0 <= word < counts.vocab_size:
            raise ValueError(f"words have {word}, but counts are for the words from 0 to {counts.vocab_size - 1}.")
        sentences, repeats = _sentences_with(counts, word)
        if not len(sentences):
            raise ValueError(f"words have {word}, which is in no sentence with other words.")
        own = repeats * weights[..., word, None]
        rest = total[..., sentences] - own
        ratios.append((weights[..., word, None] / rest).mean(-1))
        without = sums[..., sentences] - own[..., None, :] * vectors[..., word, None]
        means.append((without / rest[..., None, :]).mean(-1))
    words = list(words)
    norms = (vectors[..., words] - torch.stack(means, -1)).square().sum(-2) / 2
    return ScoreNormTerms(scores[..., words] + torch.stack(ratios, -1), norms)


def _sentences_with(counts: "WordCounts", word: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sentences with a word and others, and the frequency of the word in each."""
    start, end = counts.word_starts[word : word + 2].tolist()
    sentences, own = counts.sentences_by_word[start:end], counts.counts_by_word[start:end]
    has_others = counts.lengths[sentences] > own
    return sentences[has_others], own[has_others]


def harmonic_others(counts: "WordCounts") -> torch.Tensor:
    """Harmonic mean of the number of other words in the sentences with each word.

    This is the m of corollary 1 for sentences of several lengths, if the other words have scores of 0. Sentences of
    the word alone do not count.

    Returns:
        `torch.Tensor` of shape `(vocab_size,)`; NaN for words that are in no sentence with others.

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> harmonic_others(WordCounts.from_sentences([[0, 1, 1, 2], [0, 2]], vocab_size=4))
        tensor([1.5000, 2.0000, 1.5000,    nan])
    """
    others = counts.lengths[counts.sentences] - counts.counts
    words, inverse = counts.words[others > 0], 1 / others[others > 0]
    sums = inverse.new_zeros(counts.vocab_size).index_add_(0, words, inverse)
    return words.bincount(minlength=counts.vocab_size) / sums


def recording_epochs(epochs: int, records: int) -> set[int]:
    """Epochs to record: evenly spaced ones, and as many logarithmically spaced ones for early changes.

    Args:
        epochs (`int`): Last epoch.
        records (`int`): Number of records of each kind.

    Raises:
        ValueError: if a number is less than 1.

    Example:
        >>> sorted(recording_epochs(100, 4))
        [0, 1, 5, 22, 25, 50, 75, 100]
    """
    for name, value in (("epochs", epochs), ("records", records)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    early = torch.logspace(0, math.log10(epochs), records).round().int().tolist()
    return {*range(0, epochs + 1, max(1, epochs // records)), *early}


class ScoreNormHistory:
    """Scores and norms of words over training, recorded at some epochs.

    Args:
        units (`list[int]`, *optional*): Words to record; all by default.
        centered (`bool`): Whether to subtract the scores and vectors of the first record.

    Attributes:
        epochs (`list[int]`): The recorded epochs.

    Example:
        >>> history = ScoreNormHistory(units=[1])
        >>> history.add(0, torch.tensor([[0.0, 1.0]]), torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]))
        >>> history.scores, history.norms
        (tensor([[[1.]]]), tensor([[[5.]]]))
    """

    def __init__(self, units: Sequence[int] | None = None, centered: bool = False):
        self.units = None if units is None else list(units)
        self.centered = centered
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self.epochs: list[int] = []
        self._values: torch.Tensor | None = None

    def add(self, epoch: int, scores: torch.Tensor, vectors: torch.Tensor) -> None:
        """Records one epoch.

        Args:
            epoch (`int`): Number of updates so far.
            scores (`torch.Tensor` of shape `(runs, vocab_size)`): Scores of all words.
            vectors (`torch.Tensor` of shape `(runs, vocab_size, size)`): Vectors of all words.
        """
        if self.units is not None:
            scores, vectors = scores[:, self.units], vectors[:, self.units]
        if self.centered:
            self._first = self._first or (scores.detach().clone(), vectors.detach().clone())
            scores, vectors = scores - self._first[0], vectors - self._first[1]
        # One block that doubles when full: many small tensors would fragment the memory.
        if self._values is None:
            self._values = torch.empty(2, 16, *scores.shape, dtype=scores.dtype)
        elif len(self.epochs) == self._values.shape[1]:
            self._values = torch.cat([self._values, torch.empty_like(self._values)], 1)
        self._values[0, len(self.epochs)] = scores.detach()
        self._values[1, len(self.epochs)] = vectors.detach().norm(dim=-1)
        self.epochs.append(epoch)

    @property
    def scores(self) -> torch.Tensor:
        """Scores of shape `(epochs, runs, units)`."""
        return self._recorded(0)

    @property
    def norms(self) -> torch.Tensor:
        """Norms of the vectors, of shape `(epochs, runs, units)`."""
        return self._recorded(1)

    def _repr_html_(self) -> str:
        """Scores and norms at both ends of training, for notebooks: means over runs."""
        if self._values is None:
            return html_table(["state"], [["empty; call add()"]], "ScoreNormHistory")
        ends = [values[end].mean(0).tolist() for values in (self.scores, self.norms) for end in (0, -1)]
        words, shown = self._words(), self._highest(MOST_ROWS)
        rows = [[str(words[index]), *(end[index] for end in ends)] for index in shown]
        header = ["word", *(f"{what}, {when}" for what in ("score", "norm") for when in ("first", "last"))]
        runs = self.scores.shape[1]
        caption = f"ScoreNormHistory: {len(self.epochs):,} records, epochs {self.epochs[0]:,} to {self.epochs[-1]:,}"
        caption += f", means of {runs:,} runs" if runs > 1 else ""
        caption += f"; of {len(words):,} words, those with the highest scores" if len(words) > len(rows) else ""
        return html_table(header, rows, caption)

    def plot(
        self,
        path: str | Path | None = None,
        title: str = "",
        units: Sequence[int] | None = None,
        others: torch.Tensor | float | None = None,
    ) -> "Figure":
        """Draws norm against score over training: a panel for each word, a line for each run.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
            units (`list[int]`, *optional*): Words to draw; by default all, or if more than six are recorded, the six
                with the highest scores at the last record.
            others (`float` or `torch.Tensor` of shape `(vocab_size,)`, *optional*): Number m of other words, which
                determines the theoretical curve, see [`score_norm_curve`]: one for all words, or one for each word of
                the vocabulary, as [`harmonic_others`] returns them (NaN for no curve). No curve by default.

        Returns:
            `matplotlib.figure.Figure`

        Raises:
            ValueError: if the history is empty, `units` are empty or not recorded, or `others` lacks a word.
        """
        from .plots.score_norm import Curves, plot_score_norm_curves

        scores, norms, words = at_least_single(self.scores), at_least_single(self.norms), self._words()
        indices = self._highest(MOST_PANELS) if units is None else [self._index_of(unit) for unit in units]
        if not indices:
            raise ValueError("units are empty: nothing to draw.")
        panels = [
            Curves(f"word {words[index]}", scores[..., index], norms[..., index], _others_of(words[index], others))
            for index in indices
        ]
        columns = math.ceil(len(panels) / math.ceil(len(panels) / 3))  # up to three, and full rows if possible
        rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
        return plot_score_norm_curves(rows, path, title)

    def _words(self) -> list[int]:
        """The recorded words."""
        return list(range(self.scores.shape[-1])) if self.units is None else self.units

    def _index_of(self, unit: int) -> int:
        if unit not in (words := self._words()):
            some = ", ".join(map(str, words[:MOST_PANELS])) + ", …" * (len(words) > MOST_PANELS)
            raise ValueError(f"units have {unit}, which is not recorded; the recorded words are {some}.")
        return words.index(unit)

    def _highest(self, most: int) -> list[int]:
        """Indices of the recorded words, or, if they are too many, of those with the highest scores at the end."""
        last = self.scores[-1].mean(0)
        if len(last) <= most:
            return list(range(len(last)))
        return last.nan_to_num(nan=-torch.inf, neginf=-torch.inf).argsort(descending=True, stable=True)[:most].tolist()

    def _recorded(self, index: int) -> torch.Tensor:
        if self._values is None:
            raise ValueError("the history is empty; call add() first.")
        return self._values[index, : len(self.epochs)]


def _others_of(word: int, others: torch.Tensor | float | None) -> float | None:
    """Number of other words of a word; `None` if it is not given, or NaN."""
    if others is None:
        return None
    others = torch.as_tensor(others)
    if others.dim() and not 0 <= word < len(others):
        raise ValueError(f"others has {len(others)} numbers, none for the word {word}; give one for each word.")
    number = (others[word] if others.dim() else others).item()
    return None if math.isnan(number) else number


def curve_error(
    scores: torch.Tensor, norms: torch.Tensor, others: torch.Tensor | float, up_to: float = float("inf")
) -> torch.Tensor:
    """Largest absolute difference between norms and the theoretical norms of the scores, over training.

    Args:
        scores (`torch.Tensor` of shape `(epochs, …)`): Scores over training.
        norms (`torch.Tensor` of shape `(epochs, …)`): Norms at the same epochs.
        others (`torch.Tensor` or `float`): See [`score_norm_curve`].
        up_to (`float`): Largest score that counts, to compare curves of different lengths.

    Returns:
        `torch.Tensor` of shape `(…)`.

    Example:
        >>> curve_error(torch.tensor([0.0, 3.35]), torch.tensor([0.0, 3.085]), others=20)
        tensor(0.0109)
    """
    errors = (norms - score_norm_curve(scores, others)).abs()
    return errors.masked_fill(scores > up_to, 0).amax(0)


def topic_purity(counts: "WordCounts", labels: torch.Tensor) -> torch.Tensor:
    """Topic purity of each word: δ(w) = |δ⁺(w) − δ⁻(w)|, where δ± are the fractions of its sentences in each class.

    Args:
        counts ([`WordCounts`]): The sentences.
        labels (`torch.LongTensor` of shape `(sentences,)`): Classes of the sentences, 0 or 1.

    Returns:
        `torch.Tensor` of shape `(vocab_size,)`: from 0 to 1; NaN for words in no sentence.

    Raises:
        ValueError: if there are other labels, or the number of labels is not the number of sentences.

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> topic_purity(WordCounts.from_sentences([[0, 1], [0], [0], [0]], vocab_size=2), torch.tensor([1, 1, 1, 0]))
        tensor([0.5000, 1.0000])
    """
    if other := sorted(set(labels.tolist()) - {0, 1}):
        raise ValueError(f"labels have {other[0]}; topic purity needs two classes, 0 and 1.")
    if labels.shape != (counts.num_sentences,):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} for {counts.num_sentences} sentences; give one per sentence."
        )
    signs = (2 * labels - 1)[counts.sentences].to(torch.get_default_dtype())
    return (signs.new_zeros(counts.vocab_size).index_add_(0, counts.words, signs) / counts.occurrences).abs()


def attended_words(scores: torch.Tensor, counts: "WordCounts", seed: int = 0) -> torch.Tensor:
    """The word of each sentence with the largest attention weight, i.e. the largest score (section 5.2).

    Args:
        scores (`torch.Tensor` of shape `(vocab_size,)`): Scores of all words.
        counts ([`WordCounts`]): The sentences.
        seed (`int`): Random seed of the choice among words with equal scores.

    Returns:
        `torch.LongTensor` of shape `(sentences,)`

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> attended_words(torch.tensor([0.0, 2.0, 1.0]), WordCounts.from_sentences([[0, 1], [2, 0]], vocab_size=3))
        tensor([1, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(counts.words), generator=generator).to(counts.words.device)
    # Stable sorts: by sentence, then by score, then random.
    order = order[scores[counts.words[order]].argsort(stable=True)]
    order = order[counts.sentences[order].argsort(stable=True)]
    return counts.words[order[counts.sentence_starts[1:] - 1]]


def attended_profile(
    attended: torch.Tensor, counts: "WordCounts", purity: torch.Tensor, word: int | None = None
) -> tuple[float, float]:
    """Mean topic purity and mean number of occurrences of the attended words (figures 6 and 7).

    Args:
        attended (`torch.LongTensor` of shape `(sentences,)`): See [`attended_words`].
        counts ([`WordCounts`]): The sentences.
        purity (`torch.Tensor` of shape `(vocab_size,)`): See [`topic_purity`].
        word (`int`, *optional*): Only sentences with this word count; all by default.

    Returns:
        `tuple[float, float]`: mean purity, and mean number of sentences with the word, over the sentences that count;
        NaN without any.
    """
    if word is not None:
        attended = attended[counts.sentences_by_word[counts.word_starts[word] : counts.word_starts[word + 1]]]
    return purity[attended].mean().item(), counts.occurrences[attended].to(purity.dtype).mean().item()


class Interval(NamedTuple):
    """Mean over runs with the bounds of its confidence interval."""

    mean: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def run_interval(
    values: torch.Tensor, confidence: float = 0.95, limits: tuple[float, float] | None = None
) -> Interval:
    """Mean over runs with its confidence interval from Student's t distribution.

    Args:
        values (`torch.Tensor` of shape `(runs, …)`): Values of each run.
        confidence (`float`): Confidence level, between 0 and 1.
        limits (`tuple[float, float]`, *optional*): Minimum and maximum of possible values, such as (0, 1) for
            accuracies, to which the bounds are clamped.

    Returns:
        [`Interval`] of tensors of shape `(…)`; the bounds are NaN for a single run.

    Raises:
        ValueError: if `confidence` is out of range.

    Example:
        >>> [round(bound.item(), 3) for bound in run_interval(torch.tensor([1.0, 2.0, 3.0]))]
        [2.0, -0.484, 4.484]
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, such as 0.95, got {confidence}.")
    runs = len(values)
    mean = values.mean(0)
    if runs == 1:
        return Interval(mean, mean * torch.nan, mean * torch.nan)
    width = float(student_t.ppf((1 + confidence) / 2, runs - 1)) * values.std(0) / runs**0.5
    low, high = limits or (None, None)
    return Interval(mean, *(bound.clamp(low, high) if limits else bound for bound in (mean - width, mean + width)))


def share_by_bin(values: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Fraction of the values of each run in each bin of a histogram.

    Args:
        values (`torch.Tensor` of shape `(runs, n)`): Values of each run.
        edges (`torch.Tensor` of shape `(bins + 1,)`): Ascending edges of the bins; the last bin includes its upper
            edge, and values outside belong to no bin.

    Returns:
        `torch.Tensor` of shape `(runs, bins)`
    """
    counted = [torch.histogram(run.float().cpu(), edges.float().cpu())[0] for run in values]
    return torch.stack(counted) / values.shape[1]
