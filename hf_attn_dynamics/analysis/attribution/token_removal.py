# Licensed under the Apache License, Version 2.0.
"""Faithfulness of attributions: what removing tokens in their order does to the prediction."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...models.packing import packing_of
from ..model_views import evaluation_view
from ..results import Result
from ..running import on_device, real_tokens


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Faithfulness(Result):
    """Probability of the prediction while tokens are removed, see [`faithfulness`].

    Args:
        removed (`torch.Tensor` of shape `(steps + 1,)`): Fractions removed of the tokens that can be, from 0 to 1.
        most_first (`torch.Tensor` of shape `(steps + 1,)`): Mean probability of the original prediction if tokens with
            the highest attribution are removed first.
        least_first (`torch.Tensor` of shape `(steps + 1,)`): The same, the lowest attribution first.
        sentences (`int`): Number of sentences.
    """

    removed: torch.Tensor
    most_first: torch.Tensor
    least_first: torch.Tensor
    sentences: int

    columns = ["removed", "most_first", "least_first"]

    @property
    def comprehensiveness(self) -> float:
        """Area over the perturbation curve: mean loss of probability over the steps, most important tokens first."""
        return (self.most_first[0] - self.most_first[1:]).mean().item()

    @property
    def sufficiency(self) -> float:
        """Mean loss of probability over the steps, least important tokens first; low if important tokens suffice."""
        return (self.least_first[0] - self.least_first[1:]).mean().item()

    @property
    def gap(self) -> float:
        """Comprehensiveness minus sufficiency: 0 for an order that does not matter, higher if it is faithful."""
        return self.comprehensiveness - self.sufficiency

    def plot(self, path: str | Path | None = None, title: str = "") -> "Figure":
        """Draws both curves.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model, data and attribution; the picture itself says what it shows.
        """
        from ..plots.attribution import plot_faithfulness

        return plot_faithfulness({"": self}, path, title)

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        yield from zip(self.removed.tolist(), self.most_first.tolist(), self.least_first.tolist())


def faithfulness(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    attribution: torch.Tensor,
    steps: int = 10,
    kept_ids: Collection[int] = (),
    replacement_id: int | None = None,
    batch_size: int = 64,
) -> Faithfulness:
    """How much the prediction of a model depends on the tokens to which an attribution assigns it.

    Tokens are removed in the order of their attribution, and in the opposite order, a tenth of the tokens at a time
    (`steps`). Where no token is kept, one stays. The prediction is the class with the highest probability; of a causal
    language model, it is the next token after the last one, which is never removed. One number ranks attributions on
    the same sentences: `gap`, the area between both curves.

    Args:
        model (`PreTrainedModel`): A classifier of sentences, or a causal language model.
        batch (`dict`): Arguments of the forward pass; labels are ignored.
        attribution (`torch.Tensor` of shape `(batch, length)`): One number per token, such as
            `token_relevance(model, batch)["encoder"][:, 0]`; values at padding are ignored.
        steps (`int`): Number of steps.
        kept_ids (collection of `int`): Token ids that are never removed, such as `tokenizer.all_special_ids`.
        replacement_id (`int`, *optional*): Token that takes the place of removed ones, such as
            `tokenizer.mask_token_id`; by default, they are left out and the others move up.
        batch_size (`int`): Sentences per batch.

    Returns:
        [`Faithfulness`]

    Raises:
        ValueError: if the attribution has another shape or is not finite at a token, a number is below 1, the model
            has no probabilities of classes or next tokens, a sentence has no token that can be removed, a row holds
            several sentences, or an argument of the batch has no number per token, so that none can be removed.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from hf_attn_dynamics import token_relevance
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> model = BertForSequenceClassification(config)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8, 9, 4, 6]])}
        >>> relevance = token_relevance(model, batch)["encoder"][:, 0]
        >>> faithfulness(model, batch, relevance, steps=3).removed.tolist()
        [0.0, 0.3333333333333333, 0.6666666666666666, 1.0]
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    inputs = {name: value for name, value in on_device(batch, model).items() if name != "labels"}
    ids = inputs.get("input_ids")
    if not torch.is_tensor(ids) or ids.dim() != 2:
        raise ValueError("batch needs input_ids of shape (batch, length), from which tokens are removed.")
    if packing_of(model, {**inputs, "use_cache": False}) is not None:
        raise ValueError("tokens are removed from rows of one sentence, but this batch has several in a row.")
    for name, value in inputs.items():
        if torch.is_tensor(value) and value.shape != ids.shape:
            raise ValueError(
                f"tokens cannot be removed from {name} of shape {tuple(value.shape)}, which is not that of input_ids, "
                f"{tuple(ids.shape)}; leave it out."
            )
    real = real_tokens(model, "encoder", inputs, tuple(ids.shape), ids.device)
    if tuple(attribution.shape) != tuple(ids.shape):
        raise ValueError(
            f"attribution must have shape {tuple(ids.shape)}, one number per token, got {tuple(attribution.shape)}."
        )
    attribution = attribution.to(ids.device).double()
    if not attribution[real].isfinite().all():
        raise ValueError("attribution must be finite at all tokens.")
    is_causal = _predicts_next(model)
    kept = torch.isin(ids, torch.tensor([*kept_ids], dtype=ids.dtype, device=ids.device)) & real
    if is_causal:
        kept = kept | (real & (real.cumsum(1) == real.sum(1, keepdim=True)))
    versions = []
    for sentence in range(len(ids)):
        choices = (real[sentence] & ~kept[sentence]).nonzero()[:, 0]
        # A model reads at least one token.
        most = len(choices) - (not bool(kept[sentence].any()))
        if most < 1:
            raise ValueError(f"sentence {sentence} has no token that can be removed; leave it out.")
        ranked = choices[attribution[sentence, choices].argsort(descending=True, stable=True)]
        for step in range(steps + 1):
            number = round(step / steps * most)
            versions.append(_Version(sentence, step, 0, ranked[:number]))
            versions.append(_Version(sentence, step, 1, ranked[len(ranked) - number :]))
    removal = _Removal(evaluation_view(model).root, inputs, real, replacement_id, is_causal)
    whole = [_Version(sentence, 0, 0, ids.new_empty(0)) for sentence in range(len(ids))]
    predicted = [int(one.argmax()) for _, one in removal.probabilities(whole, batch_size)]
    curves = torch.zeros(2, steps + 1, dtype=torch.float64)
    for version, probabilities in removal.probabilities(versions, batch_size):
        probability = probabilities[predicted[version.sentence]].double().cpu()
        curves[version.order, version.step] += probability / len(ids)
    fractions = torch.arange(steps + 1, dtype=torch.float64) / steps
    return Faithfulness(fractions, curves[0], curves[1], len(ids))


def _predicts_next(model: PreTrainedModel) -> bool:
    """Whether a model has logits of next tokens; raises ValueError for models without logits of either kind."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        if model.config.num_labels == 1 or model.config.problem_type == "multi_label_classification":
            what = "a single output" if model.config.num_labels == 1 else "several labels for a sentence"
            raise ValueError(f"{name} has {what}, not probabilities of classes that exclude each other.")
        return False
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return True
    raise ValueError(
        f"{name} is neither a classifier of sentences nor a causal language model; load it by "
        "AutoModelForSequenceClassification or AutoModelForCausalLM."
    )


class _Version(NamedTuple):
    """A sentence without some tokens.

    Args:
        sentence, step (`int`): Indices.
        order (`int`): 0 if tokens with the highest attribution are removed first, 1 for the lowest.
        removed (`torch.Tensor`): Indices of the tokens to remove.
    """

    sentence: int
    step: int
    order: int
    removed: torch.Tensor


@dataclass
class _Removal:
    """Runs a model on sentences without some tokens.

    Args:
        reader (`PreTrainedModel`): The model, in evaluation mode.
        inputs (`dict`): Arguments of the forward pass.
        real (`torch.Tensor` of shape `(batch, length)`): True at tokens.
        replacement_id (`int`, *optional*): Token in the place of removed ones.
        is_causal (`bool`): Whether the model predicts the token after the last one.
    """

    reader: PreTrainedModel
    inputs: Mapping[str, Any]
    real: torch.Tensor
    replacement_id: int | None
    is_causal: bool

    @torch.no_grad()
    def probabilities(self, versions: Sequence[_Version], batch_size: int) -> Iterator[tuple[_Version, torch.Tensor]]:
        """Yields each version with its probabilities of classes, or of next tokens, batch by batch."""
        for start in range(0, len(versions), batch_size):
            some = versions[start : start + batch_size]
            batch = self._batch(some)
            logits = self.reader(**batch).logits
            if self.is_causal:
                last = batch["attention_mask"].sum(1) - 1
                logits = logits[torch.arange(len(last), device=logits.device), last]
            yield from zip(some, logits.float().softmax(-1))

    def _batch(self, versions: Sequence[_Version]) -> dict[str, torch.Tensor]:
        rows = []
        for version in versions:
            stays = self.real[version.sentence].clone()
            if self.replacement_id is None:
                stays[version.removed] = False
            rows.append(stays.nonzero()[:, 0])
        index = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        sentences = torch.tensor([version.sentence for version in versions], device=index.device)[:, None]
        # Without positions: the others move up.
        batch = {
            name: value[sentences, index] if torch.is_tensor(value) else value
            for name, value in self.inputs.items()
            if name != "position_ids"
        }
        if self.replacement_id is not None:
            for ids, places, version in zip(batch["input_ids"], index, versions):
                ids[torch.isin(places, version.removed)] = self.replacement_id
        # Decoders find the last token of a sentence by the id of padding.
        padding = getattr(self.reader.config.get_text_config(), "pad_token_id", None)
        if padding is not None:
            batch["input_ids"] = batch["input_ids"].masked_fill(mask == 0, padding)
        return {**batch, "attention_mask": mask, "return_dict": True}
