# Licensed under the Apache License, Version 2.0.
"""Scores and embedding norms of words while a bag-of-words attention classifier is trained (Lu et al. 2021).

The score of a word is s = qᵀκ, its vector v = ‖q‖ν, with its key κ, its embedding ν and the query q.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from scipy.stats import t as student_t


if TYPE_CHECKING:
    from ..data.word_counts import WordCounts


def score_norm_curve(score: torch.Tensor | float, others: torch.Tensor | float) -> torch.Tensor:
    """Norm of a word's vector in theory, given its score: ‖v‖ = √(2 (s + exp(s)/m − 1/m)) (corollary 1).

    It holds where training started from scores and vectors near 0 and other words have kept theirs, whatever the
    classifier.

    Args:
        score (`torch.Tensor` or `float`): Scores s.
        others (`torch.Tensor` or `float`): Number m of other words in the sentences with the word. Where sentences
            differ in length, their harmonic mean, see [`harmonic_others`]. Broadcasts with `score`.

    Returns:
        `torch.Tensor` of the shape of both; 0 for scores below 0, which such a word never has; NaN where `others` are,
        as for words that are in no sentence.

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
    """Both sides of theorem 1 at one time, see [`score_norm_terms`].

    Args:
        score (`torch.Tensor` of shape `(…, words)`): s_t + exp(s_t) ⟨1 / Z(χ∖t)⟩.
        norm (`torch.Tensor` of shape `(…, words)`): ½ ‖v_t − ⟨v̄(χ∖t)⟩‖².
    """

    score: torch.Tensor
    norm: torch.Tensor

    def residual(self, before: "ScoreNormTerms") -> torch.Tensor:
        """What is left of theorem 1 between two times: by how much more the first term has grown than the second."""
        return (self.score - before.score) - (self.norm - before.norm)


def score_norm_terms(
    scores: torch.Tensor, vectors: torch.Tensor, counts: "WordCounts", words: Sequence[int]
) -> ScoreNormTerms:
    """Terms of the identity between the score and the vector of words, which grow alike in training (theorem 1).

    ⟨·⟩ are means over the sentences χ with the word t. Without it, a sentence has Z(χ∖t) = Σ_w exp(s_w), and the
    average v̄(χ∖t) = Σ_w exp(s_w) v_w / Z(χ∖t). Sentences of t alone are not counted.

    Args:
        scores (`torch.Tensor` of shape `(…, vocab_size)`): Scores of all words.
        vectors (`torch.Tensor` of shape `(…, vocab_size, size)`): Their vectors.
        counts ([`WordCounts`]): The sentences of the training set.
        words (`list[int]`): Words t to look at.

    Returns:
        [`ScoreNormTerms`]: float64; to six digits where no score is more than 20 above those of other words.

    Raises:
        ValueError: if a word is not in the vocabulary or in no sentence with others, or scores or vectors are not
            those of all words.

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> counts = WordCounts.from_sentences([[0, 1, 2], [0, 2]], vocab_size=3)
        >>> terms = score_norm_terms(torch.zeros(3), torch.tensor([[2.0], [0.0], [0.0]]), counts, [0])
        >>> terms.score, terms.norm
        (tensor([0.7500], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    for name, size in (("scores", scores.shape[-1]), ("vectors", vectors.shape[-2])):
        if size != counts.vocab_size:
            raise ValueError(f"{name} are of {size} words, but counts of {counts.vocab_size}; give those of all.")
    # A word that is attended to has nearly all weight; what it leaves to others is a difference of large numbers.
    scores, vectors = scores.double(), vectors.double().mT  # as scores are, with the words last
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = counts.sum_over_words(weights)
    sums = counts.sum_over_words(weights[..., None, :] * vectors)
    ratios, means = [], []
    for word in words:
        if not 0 <= word < counts.vocab_size:
            raise ValueError(f"words have {word}, but counts are of the words from 0 to {counts.vocab_size - 1}.")
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
    """The sentences with a word and others, and how often the word is there."""
    start, end = counts.word_starts[word : word + 2].tolist()
    sentences, own = counts.sentences_by_word[start:end], counts.counts_by_word[start:end]
    has_others = counts.lengths[sentences] > own
    return sentences[has_others], own[has_others]


def harmonic_others(counts: "WordCounts") -> torch.Tensor:
    """Number of other words in the sentences with each word: the m for which 1/m is the mean of 1/m(χ).

    That is how lengths enter theorem 1 while the other words have scores of 0. Sentences of the word alone are not
    counted.

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

    Example:
        >>> sorted(recording_epochs(100, 4))
        [0, 1, 5, 22, 25, 50, 75, 100]
    """
    early = torch.logspace(0, math.log10(epochs), records).round().int().tolist()
    return {*range(0, epochs + 1, max(1, epochs // records)), *early}


class ScoreNormHistory:
    """Scores and norms of words over training, recorded at chosen epochs.

    Args:
        units (`list[int]`, *optional*): Words to keep; all by default.
        centred (`bool`): Whether scores and vectors are counted from those that are recorded first.

    Attributes:
        epochs (`list[int]`): When they were recorded.

    Example:
        >>> history = ScoreNormHistory(units=[1])
        >>> history.add(0, torch.tensor([[0.0, 1.0]]), torch.tensor([[[0.0, 0.0], [3.0, 4.0]]]))
        >>> history.scores, history.norms
        (tensor([[[1.]]]), tensor([[[5.]]]))
    """

    def __init__(self, units: Sequence[int] | None = None, centred: bool = False):
        self.units = None if units is None else list(units)
        self.centred = centred
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self.epochs: list[int] = []
        self._values: torch.Tensor | None = None

    def add(self, epoch: int, scores: torch.Tensor, vectors: torch.Tensor) -> None:
        """Records one epoch.

        Args:
            epoch (`int`): Updates so far.
            scores (`torch.Tensor` of shape `(runs, vocab_size)`): Of all words.
            vectors (`torch.Tensor` of shape `(runs, vocab_size, size)`): Of all words.
        """
        if self.units is not None:
            scores, vectors = scores[:, self.units], vectors[:, self.units]
        if self.centred:
            self._first = self._first or (scores.detach().clone(), vectors.detach().clone())
            scores, vectors = scores - self._first[0], vectors - self._first[1]
        # One block that doubles: many small ones between large tables that come and go would scatter the memory.
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

    def _recorded(self, place: int) -> torch.Tensor:
        if self._values is None:
            raise ValueError("the history is empty; add what was measured.")
        return self._values[place, : len(self.epochs)]


def curve_error(
    scores: torch.Tensor, norms: torch.Tensor, others: torch.Tensor | float, up_to: float = float("inf")
) -> torch.Tensor:
    """Largest distance of norms from those that theory gives for the scores, along the whole curve.

    Args:
        scores (`torch.Tensor` of shape `(epochs, …)`): Scores over training.
        norms (`torch.Tensor` of shape `(epochs, …)`): Norms at the same times.
        others (`torch.Tensor` or `float`): As for [`score_norm_curve`].
        up_to (`float`): Largest score to look at, for curves of different lengths.

    Returns:
        `torch.Tensor` of shape `(…)`.

    Example:
        >>> curve_error(torch.tensor([0.0, 3.35]), torch.tensor([0.0, 3.085]), others=20)
        tensor(0.0109)
    """
    errors = (norms - score_norm_curve(scores, others)).abs()
    return errors.masked_fill(scores > up_to, 0).amax(0)


def topic_purity(counts: "WordCounts", labels: torch.Tensor) -> torch.Tensor:
    """How much a word tells of two classes: δ(w) = |δ⁺(w) − δ⁻(w)|, the shares of each among its sentences.

    Args:
        counts ([`WordCounts`]): The sentences.
        labels (`torch.LongTensor` of shape `(sentences,)`): Their classes, 0 or 1.

    Returns:
        `torch.Tensor` of shape `(vocab_size,)`: from 0 to 1; NaN for words that are in no sentence.

    Raises:
        ValueError: if there is another label, or there are not as many as sentences.

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> topic_purity(WordCounts.from_sentences([[0, 1], [0], [0], [0]], vocab_size=2), torch.tensor([1, 1, 1, 0]))
        tensor([0.5000, 1.0000])
    """
    if other := sorted(set(labels.tolist()) - {0, 1}):
        raise ValueError(f"labels have {other[0]}; the purity of words is that of two classes, 0 and 1.")
    if labels.shape != (counts.num_sentences,):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} for {counts.num_sentences} sentences; give one each."
        )
    signs = (2 * labels - 1)[counts.sentences].to(torch.get_default_dtype())
    return (signs.new_zeros(counts.vocab_size).index_add_(0, counts.words, signs) / counts.occurrences).abs()


def attended_words(scores: torch.Tensor, counts: "WordCounts", seed: int = 0) -> torch.Tensor:
    """The word of each sentence that is attended to most, which is the one with the largest score (section 5.2).

    Args:
        scores (`torch.Tensor` of shape `(vocab_size,)`): Scores of all words.
        counts ([`WordCounts`]): The sentences.
        seed (`int`): Chooses among words of a sentence that have the same score, each with the same chance.

    Returns:
        `torch.LongTensor` of shape `(sentences,)`

    Example:
        >>> from hf_attn_dynamics.data.word_counts import WordCounts
        >>> attended_words(torch.tensor([0.0, 2.0, 1.0]), WordCounts.from_sentences([[0, 1], [2, 0]], vocab_size=3))
        tensor([1, 2])
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(counts.words), generator=generator).to(counts.words.device)
    # Each sort keeps the order of the one before among equals.
    order = order[scores[counts.words[order]].argsort(stable=True)]
    order = order[counts.sentences[order].argsort(stable=True)]
    return counts.words[order[counts.sentence_starts[1:] - 1]]


def attended_profile(
    attended: torch.Tensor, counts: "WordCounts", purity: torch.Tensor, word: int | None = None
) -> tuple[float, float]:
    """Mean topic purity and mean number of occurrences of the words that are attended to (figures 6 and 7).

    Args:
        attended (`torch.LongTensor` of shape `(sentences,)`): See [`attended_words`].
        counts ([`WordCounts`]): The sentences.
        purity (`torch.Tensor` of shape `(vocab_size,)`): See [`topic_purity`].
        word (`int`, *optional*): Only sentences with this word count; all by default.

    Returns:
        `tuple[float, float]`: purity, and number of sentences that a word is in. A word counts once for each sentence
        in which it is attended to. NaN if no sentence counts.
    """
    if word is not None:
        attended = attended[counts.sentences_by_word[counts.word_starts[word] : counts.word_starts[word + 1]]]
    return purity[attended].mean().item(), counts.occurrences[attended].to(purity.dtype).mean().item()


class Interval(NamedTuple):
    """A mean over runs, and the bounds of its confidence interval."""

    mean: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


def run_interval(
    values: torch.Tensor, confidence: float = 0.95, limits: tuple[float, float] | None = None
) -> Interval:
    """Mean over runs with its confidence interval, by Student's t distribution.

    Args:
        values (`torch.Tensor` of shape `(runs, …)`): One or more values of each run.
        confidence (`float`): Between 0 and 1.
        limits (`tuple[float, float]`, *optional*): Smallest and largest possible value, such as (0, 1) of an accuracy;
            the interval is cut there.

    Returns:
        [`Interval`] of tensors of shape `(…)`; of one run, the bounds are NaN.

    Raises:
        ValueError: if `confidence` is out of range.

    Example:
        >>> [round(bound.item(), 3) for bound in run_interval(torch.tensor([1.0, 2.0, 3.0]))]
        [2.0, -0.484, 4.484]
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, as 0.95 is, got {confidence}.")
    runs = len(values)
    mean = values.mean(0)
    if runs == 1:
        return Interval(mean, mean * torch.nan, mean * torch.nan)
    width = float(student_t.ppf((1 + confidence) / 2, runs - 1)) * values.std(0) / runs**0.5
    low, high = limits or (None, None)
    return Interval(mean, *(bound.clamp(low, high) if limits else bound for bound in (mean - width, mean + width)))


def share_by_bin(values: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """Share of each run's values between each two edges, as a histogram has it.

    Args:
        values (`torch.Tensor` of shape `(runs, n)`): Values of each run.
        edges (`torch.Tensor` of shape `(bins + 1,)`): Rising; values outside count to none, the last one to its bin.

    Returns:
        `torch.Tensor` of shape `(runs, bins)`
    """
    counted = [torch.histogram(run.float().cpu(), edges.float().cpu())[0] for run in values]
    return torch.stack(counted) / values.shape[1]
