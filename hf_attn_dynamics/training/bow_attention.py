# Licensed under the Apache License, Version 2.0.
"""Batched training of many bag-of-words attention models over the same sentences."""

from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import cross_entropy, pad

from ..data.word_counts import WordCounts
from ..models.modeling_bow_attention import BowAttentionForSequenceClassification
from .stacked import check_alike


class LabelledSentences:
    """Labelled sentences as word counts, for [`BowAttentionStack`].

    Args:
        sentences (iterable of `list[int]`): Words of each sentence, without padding.
        labels (sequence of `int`): Class of each sentence.
        vocab_size (`int`): Number of words.
        convolution (`bool`): Whether models attend to pairs of neighbouring words.

    Attributes:
        counts (`WordCounts`): Counts of the units of each sentence: words, or pairs of neighbouring words.
        labels (`torch.LongTensor` of shape `(sentences,)`)
        pairs (`torch.LongTensor` of shape `(units, 2)`, *optional*): First and second word of each pair.
        parts (`WordCounts`, *optional*): The two words of each pair, counted like a sentence; ids of second words are
            offset by `vocab_size`.

    Raises:
        ValueError: if the numbers of labels and sentences differ, a label is negative, or a sentence is too short.
    """

    def __init__(
        self, sentences: Iterable[Sequence[int]], labels: Sequence[int], vocab_size: int, convolution: bool = False
    ):
        sentences = [list(sentence) for sentence in sentences]
        if len(sentences) != len(labels):
            raise ValueError(f"labels must have one class for each of {len(sentences)} sentences, got {len(labels)}.")
        self.labels = torch.as_tensor(labels, dtype=torch.long)
        if (self.labels < 0).any():
            raise ValueError(
                f"labels must be at least 0, got {int(self.labels.min())}; leave out sentences without a class."
            )
        self.pairs = self.parts = None
        if convolution:
            codes = [[a * vocab_size + b for a, b in zip(words, words[1:])] for words in sentences]
            known = sorted({code for row in codes for code in row})
            index = {code: unit for unit, code in enumerate(known)}
            sentences, units = [[index[code] for code in row] for row in codes], len(known)
            self.pairs = torch.tensor([divmod(code, vocab_size) for code in known]).view(-1, 2)
            # A pair is the sum of a row in the first half of a table and a row in the second half.
            self.parts = WordCounts.from_sentences(self.pairs + torch.tensor([0, vocab_size]), 2 * vocab_size)
        self.counts = WordCounts.from_sentences(sentences, units if convolution else vocab_size)

    def to(self, device: torch.device | str) -> "LabelledSentences":
        """Copies the sentences to another device."""
        moved = object.__new__(LabelledSentences)
        moved.__dict__ = {name: None if one is None else one.to(device) for name, one in vars(self).items()}
        return moved


class BowAttentionStack:
    """Bag-of-words attention models of the same sizes, computed in one batch.

    If every query is frozen, scores s = qᵀκ replace query and keys as parameters: gradient descent on scores with the
    rate τ‖q‖² equals gradient descent on keys with τ (Lu et al. 2021, section 4).

    Args:
        models (`list[BowAttentionForSequenceClassification]`): The runs. Their parameters are copied; `unstack`
            writes them back.

    Attributes:
        runs (`dict[str, list[int]]`): Indices of the models with a linear classifier (`linear`) and with two layers
            (`mlp`).
        parameters (`dict[str, torch.Tensor]`): Parameters by their names in a model, prefixed with `linear.` or
            `mlp.`; the first dimension is the runs with this classifier.

    Raises:
        ValueError: if there is no model, sizes differ, or the columns of a fixed classifier are not linearly
            independent, as theorem 2 requires.

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
        check_alike(models, ("vocab_size", "hidden_size", "key_size", "num_labels", "convolution"))
        if mlps := [model for model in models if model.config.classifier == "mlp"]:
            check_alike(mlps, ["classifier_hidden_size"])
        for run, model in enumerate(models):
            check_fixed_classifier(model, run)
        self.models = list(models)
        self.convolution = models[0].config.convolution
        self._pads = list({model.config.pad_token_id for model in models} - {None})
        # With convolutions, scores belong to pairs, not to words.
        self.folds_query = not self.convolution and all(model.config.freeze_query for model in models)
        self.runs: dict[str, list[int]] = {}
        for run, model in enumerate(models):
            self.runs.setdefault("mlp" if model.config.classifier == "mlp" else "linear", []).append(run)
        self._order = torch.tensor([run for runs in self.runs.values() for run in runs]).argsort().tolist()
        self.query = torch.stack([model.query.detach() for model in models])
        self.parameters: dict[str, torch.Tensor] = {}
        self._trained: dict[str, torch.Tensor] = {}
        for kind, runs in self.runs.items():
            for name, _ in models[runs[0]].named_parameters():
                self._take(f"{kind}.{name}", [models[run].get_parameter(name) for run in runs])
            if self.folds_query:
                keys, trained = (of.pop(f"{kind}.keys.weight") for of in (self.parameters, self._trained))
                query = self.parameters.pop(f"{kind}.query")
                self.parameters[f"{kind}.scores"] = torch.einsum("rwk,rk->rw", keys, query)
                self._trained[f"{kind}.scores"] = trained

    def _take(self, name: str, own: list[torch.Tensor]) -> None:
        """Stacks one parameter of some runs."""
        stacked = torch.stack([parameter.detach() for parameter in own])
        if name.endswith(("embeddings.weight", "keys.weight")):
            # Words are contiguous in memory, the layout of products with few outputs and of gradients.
            stacked = stacked.mT.contiguous().mT
        self.parameters[name] = stacked
        self._trained[name] = torch.tensor([parameter.requires_grad for parameter in own], device=stacked.device)

    def learning_rates(self, learning_rate: float | Sequence[float]) -> dict[str, float | torch.Tensor]:
        """Learning rates for `stacked_gradient_descent`: τ for trained parameters, 0 for frozen ones.

        Args:
            learning_rate (`float` or sequence of `float`): τ of all runs, or of each run.

        Raises:
            ValueError: if a rate is not greater than 0, or the number of rates differs from that of runs.
        """
        rates = torch.as_tensor(learning_rate, dtype=self.query.dtype, device=self.query.device)
        if rates.dim() and rates.shape != (len(self.models),):
            raise ValueError(f"learning_rate has {rates.numel()} values for {len(self.models)} runs.")
        if not (rates > 0).all():
            raise ValueError(f"learning_rate must be greater than 0, got {rates.min().item():g}.")
        rates = rates.expand(len(self.models))
        found: dict[str, float | torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            kind, _, inner = name.partition(".")
            own = rates * self.query.square().sum(-1) if inner == "scores" else rates
            own = own[self.runs[kind]] * self._trained[name]
            # A scalar is faster.
            alike = bool((own == own[0]).all())
            found[name] = own[0].item() if alike else own.view(-1, *[1] * (parameter.dim() - 1))
        return found

    def logits(self, data: LabelledSentences) -> torch.Tensor:
        """Logits of shape `(runs, sentences, num_labels)`.

        NaN if all scores of a sentence are so far below the largest one of the run (90 in single precision) that their
        exponentials underflow.

        Raises:
            ValueError: if the sentences were counted with another `vocab_size` or `convolution`, or have padding.
        """
        return self._in_order([self._logits(kind, data) for kind in self.runs])

    def _in_order(self, by_kind: list[torch.Tensor]) -> torch.Tensor:
        """Concatenates results of the runs of each classifier in the order of the models."""
        return torch.cat(by_kind)[self._order]

    def _own(self, kind: str) -> dict[str, torch.Tensor]:
        """Parameters of the runs with one kind of classifier, by their names in a model."""
        prefix = f"{kind}."
        return {name.removeprefix(prefix): value for name, value in self.parameters.items() if name.startswith(prefix)}

    def _logits(self, kind: str, data: LabelledSentences) -> torch.Tensor:
        """Logits of the runs with one kind of classifier."""
        self._check(data)
        own = self._own(kind)
        scores = self._scores(own, data)
        weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()[:, None]
        # A linear map of an average is the average of the mapped features. These have fewer columns (labels or hidden
        # units) to sum over the words of each sentence.
        first = own["classifier.weight" if kind == "linear" else "classifier.0.weight"]
        terms = weights * pad(self._map_features(first, "embedding", own, data), (0, 0, 0, 1), value=1)
        sums = data.counts.sum_over_words(terms)
        averages = (sums[:, :-1] / sums[:, -1:]).mT
        if kind == "linear":
            return averages
        hidden = (averages + own["classifier.0.bias"][:, None]).relu()
        return hidden @ own["classifier.2.weight"].mT + own["classifier.2.bias"][:, None]

    def _scores(self, own: dict[str, torch.Tensor], data: LabelledSentences) -> torch.Tensor:
        """Scores qᵀκ of shape `(runs, units)`."""
        return own["scores"] if self.folds_query else self._map_features(own["query"][:, None], "key", own, data)[:, 0]

    def _map_features(
        self, weight: torch.Tensor, of: str, own: dict[str, torch.Tensor], data: LabelledSentences
    ) -> torch.Tensor:
        """Applies linear maps to the embedding or the key of each unit, after the convolution.

        Args:
            weight (`torch.Tensor` of shape `(runs, outputs, size)`): A map for each run.
            of (`str`): `embedding` or `key`.

        Returns:
            `torch.Tensor` of shape `(runs, outputs, units)`.
        """
        table = own[f"{of}s.weight"].mT
        if not self.convolution:
            return weight @ table
        # The convolution of a pair is the sum of one term for each of its two words.
        bias = weight @ own[f"{of}_convolution.bias"][..., None]
        first, second = (weight @ of_place @ table for of_place in own[f"{of}_convolution.weight"].unbind(-1))
        return data.parts.sum_over_words(torch.cat([first + bias, second], -1))

    def _check(self, data: LabelledSentences) -> None:
        if (data.parts is not None) != self.convolution:
            raise ValueError(f"data must have convolution={self.convolution}, like the models.")
        vocab_size = self.models[0].config.vocab_size
        if (data.parts.vocab_size // 2 if self.convolution else data.counts.vocab_size) != vocab_size:
            raise ValueError(f"data must have vocab_size={vocab_size}, like the models.")
        occurrences = (data.parts if self.convolution else data.counts).occurrences.view(-1, vocab_size)
        if self._pads and occurrences[:, self._pads].any():
            raise ValueError(
                f"data contain padding, {self._pads[0]}, which models do not attend to; pass unpadded sentences."
            )

    def losses(self, data: LabelledSentences) -> torch.Tensor:
        """Mean cross-entropy over the sentences, of shape `(runs,)`, differentiable."""
        by_kind = []
        for kind in self.runs:
            logits = self._logits(kind, data)
            labels = data.labels.expand(logits.shape[:-1])
            by_kind.append(cross_entropy(logits.mT, labels, reduction="none").mean(-1))
        return self._in_order(by_kind)

    @torch.no_grad()
    def accuracies(self, data: LabelledSentences) -> torch.Tensor:
        """Fraction of sentences that are classified correctly, of shape `(runs,)`."""
        return (self.logits(data).argmax(-1) == data.labels).float().mean(-1)

    @torch.no_grad()
    def score_norms(self, data: LabelledSentences) -> tuple[torch.Tensor, torch.Tensor]:
        """Score s = qᵀκ and vector v = ‖q‖ν of each unit.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: of shapes `(runs, units)` and `(runs, units, hidden_size)`.
        """
        self._check(data)
        scores, vectors = [], []
        for kind, runs in self.runs.items():
            own = self._own(kind)
            norms = own.get("query", self.query[runs]).norm(dim=-1)
            scale = norms[:, None, None] * torch.eye(self.models[0].config.hidden_size, device=norms.device)
            scores.append(self._scores(own, data))
            vectors.append(self._map_features(scale, "embedding", own, data).mT)
        return self._in_order(scores), self._in_order(vectors)

    @torch.no_grad()
    def unstack(self) -> list[BowAttentionForSequenceClassification]:
        """Writes the parameters back into the models.

        Returns:
            `list[BowAttentionForSequenceClassification]`: the models.
        """
        for name, parameter in self.parameters.items():
            kind, _, inner = name.partition(".")
            for run, value in zip(self.runs[kind], parameter):
                model = self.models[run]
                if inner == "scores":
                    # Gradients of keys are multiples of the query, so only their component along it has changed.
                    change = value - model.keys.weight @ model.query
                    model.keys.weight.add_(change[:, None] * model.query / model.query.square().sum())
                else:
                    model.get_parameter(inner).copy_(value)
        return self.models


def check_fixed_classifier(model: BowAttentionForSequenceClassification, run: int = 0) -> None:
    """Raises ValueError if the columns of a fixed classifier are linearly dependent, which theorem 2 excludes."""
    if model.config.classifier != "fixed":
        return
    columns = model.classifier.weight.detach()
    rank = int(torch.linalg.matrix_rank(columns.float() if columns.dtype.itemsize < 4 else columns))
    if rank < len(columns):
        raise ValueError(
            f"the fixed classifier of model {run} has {len(columns)} columns of rank {rank}, but they must be "
            "linearly independent for training to find the topic words; initialise it again, or train it."
        )
