# Licensed under the Apache License, Version 2.0.
"""Many bag-of-words attention models over the same sentences, computed as one."""

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import cross_entropy

from ..data.word_counts import WordCounts
from ..models.modeling_bow_attention import BowAttentionForSequenceClassification


class LabelledSentences:
    """Labelled sentences in the form that [`BowAttentionStack`] reads.

    Args:
        sentences (iterable of `list[int]`): Words of each sentence, without padding.
        labels (sequence of `int`): Class of each sentence.
        vocab_size (`int`): Number of words.
        convolution (`bool`): Whether models attend to pairs of neighbouring words.

    Attributes:
        counts (`WordCounts`): Of the units of each sentence, which are words, or those pairs that occur.
        labels (`torch.LongTensor` of shape `(sentences,)`)
        pairs (`torch.LongTensor` of shape `(units, 2)`, *optional*): First and second word of each pair.
        parts (`WordCounts`, *optional*): The two words of each pair, in the place of a sentence; second words come
            after all first ones.

    Raises:
        ValueError: if there are not as many labels as sentences, or a sentence is too short.
    """

    def __init__(
        self, sentences: Iterable[Sequence[int]], labels: Sequence[int], vocab_size: int, convolution: bool = False
    ):
        sentences = [list(sentence) for sentence in sentences]
        if len(sentences) != len(labels):
            raise ValueError(f"labels are {len(labels)} for {len(sentences)} sentences.")
        self.labels = torch.as_tensor(labels, dtype=torch.long)
        self.pairs = self.parts = None
        if convolution:
            codes = [[a * vocab_size + b for a, b in zip(words, words[1:])] for words in sentences]
            known = sorted({code for row in codes for code in row})
            place = {code: unit for unit, code in enumerate(known)}
            sentences, units = [[place[code] for code in row] for row in codes], len(known)
            self.pairs = torch.tensor([divmod(code, vocab_size) for code in known]).view(-1, 2)
            # A pair is the sum of its two words, the second one taken from the second half of a table.
            self.parts = WordCounts.from_sentences(self.pairs + torch.tensor([0, vocab_size]), 2 * vocab_size)
        self.counts = WordCounts.from_sentences(sentences, units if convolution else vocab_size)

    def to(self, device: torch.device | str) -> "LabelledSentences":
        """The same sentences on another device."""
        moved = object.__new__(LabelledSentences)
        moved.__dict__ = {name: None if one is None else one.to(device) for name, one in vars(self).items()}
        return moved


class BowAttentionStack:
    """Models of the same sizes, computed as one; they may differ in weights, classifier and what is frozen.

    A query that no model trains is folded into scores s = qᵀκ, which then take the place of the keys: their gradient
    descent with the rate τ‖q‖² is that of the keys with τ (Lu et al. 2021, section 4).

    Args:
        models (`list[BowAttentionForSequenceClassification]`): The runs. Their parameters are copied; `unstack`
            writes them back.

    Attributes:
        parameters (`dict[str, torch.Tensor]`): By their names in a model, with the runs as first dimension. Those of
            classifiers have `linear.` or `mlp.` in front, and belong to the runs that have such a one.

    Raises:
        ValueError: if there is no model, sizes differ, or the columns of a fixed classifier are not linearly
            independent: then no theorem says that training finds the topic words (theorem 2).

    Example:
        >>> from hf_attn_dynamics import BowAttentionConfig, BowAttentionForSequenceClassification
        >>> from hf_attn_dynamics.training import LabelledSentences, stacked_gradient_descent
        >>> models = [
        ...     BowAttentionForSequenceClassification(BowAttentionConfig(vocab_size=6, num_labels=2, classifier=kind))
        ...     for kind in ("fixed", "linear", "mlp")
        ... ]
        >>> stack = BowAttentionStack(models)
        >>> data = LabelledSentences([[1, 3, 4], [2, 3, 5]], [0, 1], vocab_size=6)
        >>> ended = stacked_gradient_descent(
        ...     lambda: stack.losses(data), stack.parameters, stack.learning_rates(0.5), epochs=300
        ... )
        >>> stack.accuracies(data).tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, models: Sequence[BowAttentionForSequenceClassification]):
        if not models:
            raise ValueError("models are empty; give at least one.")
        for name in ("vocab_size", "hidden_size", "key_size", "num_labels", "convolution"):
            values = {getattr(model.config, name) for model in models}
            if len(values) > 1:
                raise ValueError(f"models must have one {name}, got {sorted(values)}.")
        for run, model in enumerate(models):
            check_fixed_classifier(model, run)
        self.models = list(models)
        self.convolution = models[0].config.convolution
        # With convolutions, scores are of pairs and not of words.
        self.folds_query = not self.convolution and all(model.config.freeze_query for model in models)
        self.runs = {
            "linear": [run for run, model in enumerate(models) if model.config.classifier != "mlp"],
            "mlp": [run for run, model in enumerate(models) if model.config.classifier == "mlp"],
        }
        self._order = torch.tensor(self.runs["linear"] + self.runs["mlp"]).argsort().tolist()
        self.query = torch.stack([model.query.detach() for model in models])
        self.parameters: dict[str, torch.Tensor] = {}
        self._scratch: dict[torch.Size, torch.Tensor] = {}
        self._trained: dict[str, torch.Tensor] = {}
        for kind, runs in self.runs.items():
            self._take(True, runs, f"{kind}.")
        self._take(False, list(range(len(models))))
        if self.folds_query:
            keys = self.parameters.pop("keys.weight")
            self.parameters["scores"] = _stacked((keys * self.query[:, None]).sum(-1).unbind())
            self._trained["scores"] = self._trained.pop("keys.weight")
            del self.parameters["query"]

    def _take(self, classifier: bool, runs: list[int], prefix: str = "") -> None:
        """Stacks the parameters of some runs: those of the classifier, or all others."""
        names = [name for name, _ in self.models[runs[0]].named_parameters()] if runs else []
        for name in names:
            if name.startswith("classifier.") == classifier:
                own = [self.models[run].get_parameter(name) for run in runs]
                self.parameters[prefix + name] = _stacked([parameter.detach() for parameter in own])
                trained = torch.tensor([parameter.requires_grad for parameter in own], device=own[0].device)
                self._trained[prefix + name] = trained

    def learning_rates(self, learning_rate: float | Sequence[float]) -> dict[str, float | torch.Tensor]:
        """Learning rate of each parameter, for `stacked_gradient_descent`: τ where it is trained, 0 where frozen.

        Args:
            learning_rate (`float` or sequence of `float`): τ of all runs, or of each.

        Raises:
            ValueError: if a rate is not greater than 0, or there are not as many as runs.
        """
        rates = torch.as_tensor(learning_rate, dtype=self.query.dtype, device=self.query.device)
        if rates.dim() and rates.shape != (len(self.models),):
            raise ValueError(f"learning_rate has {rates.numel()} values for {len(self.models)} runs.")
        if not (rates > 0).all():
            raise ValueError(f"learning_rate must be greater than 0, got {rates.min().item():g}.")
        rates = rates.expand(len(self.models))
        found: dict[str, float | torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            own = rates[self.runs[kind]] if (kind := name.partition(".")[0]) in self.runs else rates
            if name == "scores":
                own = own * self.query.square().sum(-1)
            own = own * self._trained[name]
            # One number for all is faster.
            alike = bool((own == own[0]).all())
            found[name] = own[0].item() if alike else own.view(-1, *[1] * (parameter.dim() - 1))
        return found

    def scores_and_features(self, data: LabelledSentences) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention of each run is computed from.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: scores qᵀκ of shape `(units, runs)`, and features, embeddings or what
            the convolution makes of two, of shape `(units, runs, hidden_size)`.

        Raises:
            ValueError: if the sentences were counted for other models.
        """
        if (data.parts is not None) != self.convolution:
            raise ValueError(f"data must be made with convolution={self.convolution}, as the models are.")
        vocab_size = self.models[0].config.vocab_size
        if (data.parts.vocab_size // 2 if self.convolution else data.counts.vocab_size) != vocab_size:
            raise ValueError(f"data must be made with vocab_size={vocab_size}, as the models are.")
        embeddings = self._tables("embedding")
        if self.folds_query:
            return self.parameters["scores"].transpose(0, 1), embeddings
        # A score is linear in the key, and a pair of words adds up what each of them has.
        scores = torch.einsum("wrk,rk->wr", self._tables("key"), self.parameters["query"])
        if not self.convolution:
            return scores, embeddings
        return data.parts.sum_over_words(scores), data.parts.sum_over_words(embeddings)

    def _tables(self, kind: str) -> torch.Tensor:
        """Embeddings or keys of the words, or of the first and then the second words of pairs; words first."""
        table = self.parameters["embeddings.weight" if kind == "embedding" else "keys.weight"]
        if not self.convolution:
            return table.transpose(0, 1)
        weight = self.parameters[f"{kind}_convolution.weight"]  # (runs, out, in, 2)
        first, second = torch.einsum("rvi,roip->pvro", table, weight)
        return torch.cat([first + self.parameters[f"{kind}_convolution.bias"], second])

    def contexts(self, data: LabelledSentences) -> torch.Tensor:
        """Attention output of each sentence and run, of shape `(sentences, runs, hidden_size)`.

        NaN where all scores of a sentence are so far below the largest one of the run (90 in single precision) that
        their exponentials are 0.
        """
        scores, features = self.scores_and_features(data)
        scratch = self._scratch.get(features.shape)
        if scratch is None:
            scratch = self._scratch[features.shape] = torch.empty_like(features, requires_grad=False)
        return _Attend.apply(scores, features, data.counts, scratch)

    def logits(self, data: LabelledSentences) -> torch.Tensor:
        """Logits of shape `(sentences, runs, num_labels)`."""
        contexts = self.contexts(data)
        linear, mlp = self.runs.values()
        if not mlp:
            return self._linear(contexts)
        if not linear:
            return self._mlp(contexts)
        return torch.cat([self._linear(contexts[:, linear]), self._mlp(contexts[:, mlp])], 1)[:, self._order]

    def _linear(self, contexts: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nrd,rjd->nrj", contexts, self.parameters["linear.classifier.weight"])

    def _mlp(self, contexts: torch.Tensor) -> torch.Tensor:
        weights, biases = (
            [self.parameters[f"mlp.classifier.{layer}.{name}"] for layer in (0, 2)] for name in ("weight", "bias")
        )
        hidden = (torch.einsum("nrd,rhd->nrh", contexts, weights[0]) + biases[0]).relu()
        return torch.einsum("nrh,rjh->nrj", hidden, weights[1]) + biases[1]

    def losses(self, data: LabelledSentences) -> torch.Tensor:
        """Mean cross-entropy over the sentences, of shape `(runs,)`, differentiable."""
        logits = self.logits(data)
        losses = cross_entropy(logits.transpose(1, 2), data.labels[:, None].expand(logits.shape[:2]), reduction="none")
        return losses.mean(0)

    @torch.no_grad()
    def accuracies(self, data: LabelledSentences) -> torch.Tensor:
        """Share of sentences that are classified correctly, of shape `(runs,)`."""
        return (self.logits(data).argmax(-1) == data.labels[:, None]).float().mean(0)

    @torch.no_grad()
    def score_norms(self, data: LabelledSentences) -> tuple[torch.Tensor, torch.Tensor]:
        """Score s = qᵀκ and vector v = ‖q‖ν of each unit.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: of shapes `(runs, units)` and `(runs, units, hidden_size)`.
        """
        scores, features = self.scores_and_features(data)
        norms = self.parameters.get("query", self.query).norm(dim=-1)
        return scores.transpose(0, 1), features.transpose(0, 1) * norms[:, None, None]

    @torch.no_grad()
    def unstack(self) -> list[BowAttentionForSequenceClassification]:
        """Writes the parameters back into the models.

        Returns:
            `list[BowAttentionForSequenceClassification]`: the models that were given.
        """
        for name, parameter in self.parameters.items():
            kind, _, inner = name.partition(".")
            runs, inner = (self.runs[kind], inner) if kind in self.runs else (range(len(self.models)), name)
            for run, value in zip(runs, parameter):
                model = self.models[run]
                if name == "scores":
                    # Gradients of keys are multiples of the query, so only their part along it has changed.
                    change = value - model.keys.weight @ model.query
                    model.keys.weight.add_(change[:, None] * model.query / model.query.square().sum())
                else:
                    model.get_parameter(inner).copy_(value)
        return self.models


def check_fixed_classifier(model: BowAttentionForSequenceClassification, run: int = 0) -> None:
    """Refuses a fixed classifier that theorem 2 does not cover.

    Raises:
        ValueError: if its columns are not linearly independent.
    """
    if model.config.classifier != "fixed":
        return
    columns = model.classifier.weight.detach()
    rank = int(torch.linalg.matrix_rank(columns.float() if columns.dtype.itemsize < 4 else columns))
    if rank < len(columns):
        raise ValueError(
            f"the fixed classifier of model {run} has {len(columns)} columns of rank {rank}; they must be linearly "
            "independent for training to find the topic words. Initialise it again, or train it."
        )


class _Attend(torch.autograd.Function):
    """Contexts Σ_w exp(s_w) f_w / Σ_w exp(s_w) of all runs, and their gradients.

    Large tables are written into `scratch`: to allocate one takes longer than to compute it.
    """

    @staticmethod
    def forward(
        ctx, scores: torch.Tensor, features: torch.Tensor, counts: WordCounts, scratch: torch.Tensor
    ) -> torch.Tensor:
        # Without the largest score of a run, exponentials can not overflow.
        weights = (scores - scores.amax(0)).exp()
        totals = counts.sum_over_words(weights)
        contexts = counts.sum_over_words(torch.mul(features, weights[..., None], out=scratch)) / totals[..., None]
        ctx.save_for_backward(features, weights, totals, contexts)
        ctx.counts, ctx.scratch = counts, scratch
        return contexts

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        features, weights, totals, contexts = ctx.saved_tensors
        of_words = ctx.counts.sum_over_sentences(gradient / totals[..., None])
        of_contexts = ctx.counts.sum_over_sentences((gradient * contexts).sum(-1) / totals)
        of_scores = weights * (torch.mul(features, of_words, out=ctx.scratch).sum(-1) - of_contexts)
        return of_scores, of_words.mul_(weights[..., None]), None, None


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new leaf of shape `(runs, …)`; the runs lie side by side in memory, as sums over words read them."""
    return torch.stack(tensors, 1).transpose(0, 1)
