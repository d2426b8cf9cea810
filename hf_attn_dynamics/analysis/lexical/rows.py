# Licensed under the Apache License, Version 2.0.
"""Attention, lexical probe, saliency and word alignment of a corpus as rows over source positions.

A corpus is a list of padded batches. Each output word (in classification, each sentence) is a row over the positions
of its source, in the order of the batches. Rows of the same batches can be compared:
`agreement(u, v, row_mask(batches))` averages over all of them (Snell et al. 2021, section 3.1).
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ...models.ignored_labels import IGNORED, is_labelled
from ...models.token_mask import non_padding
from ..model_views import evaluation_view
from ..running import on_device
from .agreements import agreement, kendall_tau
from .ibm_model import IbmModel1
from .optimum import optimal_attention
from .probe import decoder_inputs, lexical_probe
from .saliency import word_saliency


Batch = Mapping[str, torch.Tensor]


def source_rows(model: PreTrainedModel, batches: Sequence[Batch], quantity: str) -> torch.Tensor:
    """A quantity of a model for all output words of a corpus and all source positions.

    Args:
        model (`PreTrainedModel`): A model that [`lexical_probe`] accepts; it runs in evaluation mode.
        batches (sequence of `dict[str, torch.Tensor]`): `input_ids`, `attention_mask` and `labels`, of shape
            `(batch, target length)` or `(batch,)`; -100 is ignored.
        quantity (`str`):
            `attention`, α: mean over heads, for models with attention.
            `probe`, β: log-odds of [`lexical_probe`], which are monotonic in β and do not round to 1.
            `saliency`, Δ: [`word_saliency`] of the loss of each output word.
            `optimal_attention`, α^opt: [`optimal_attention`] of translation models with `readout="additive"`; slow.

    Returns:
        `torch.Tensor` of shape `(rows, longest source)` on the CPU; undefined at padding.

    Raises:
        ValueError: if the quantity is unknown or not defined for the model, a batch is incomplete, or there are no
            labels.

    Example:
        >>> from hf_attn_dynamics import LstmConfig, LstmForSequenceClassification
        >>> model = LstmForSequenceClassification(LstmConfig(vocab_size=50, hidden_size=8, attention="uniform"))
        >>> batch = {
        ...     "input_ids": torch.tensor([[7, 8, 9], [5, 6, 0]]),
        ...     "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        ...     "labels": torch.tensor([1, 0]),
        ... }
        >>> source_rows(model, [batch], "attention")
        tensor([[0.3333, 0.3333, 0.3333],
                [0.5000, 0.5000, 0.0000]])
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity must be {', '.join(QUANTITIES)}, got {quantity!r}.")
    _check_batches(batches)
    parts = []
    reader = evaluation_view(model).root
    for batch in batches:
        batch = on_device(batch, model)
        parts.append(QUANTITIES[quantity](reader, batch)[is_labelled(batch["labels"])].cpu())
    return _joined(parts)


def ibm_rows(model: IbmModel1, batches: Sequence[Batch]) -> torch.Tensor:
    """Alignment probabilities α^IBM of all output words of a corpus, see [`IbmModel1.alignment_probabilities`].

    Args:
        model ([`IbmModel1`]): A model fitted on pairs of token ids.
        batches (sequence of `dict[str, torch.Tensor]`): See [`source_rows`], with target words.

    Returns:
        `torch.Tensor` of shape `(rows, longest source)`, float64: NaN for target words that never occurred with any
        word of their source in training.

    Raises:
        ValueError: if a batch is incomplete, or the model is not fitted.
    """
    _check_batches(batches)
    parts = []
    for batch in batches:
        real, wanted = _tokens_and_outputs(batch)
        pairs = [
            (ids[is_real].tolist(), labels[is_wanted].tolist())
            for ids, is_real, labels, is_wanted in zip(batch["input_ids"], real, batch["labels"], wanted)
        ]
        for is_real, alpha in zip(real.cpu(), model.alignment_probabilities(pairs)):
            rows = torch.zeros(len(alpha), len(is_real), dtype=torch.float64)
            rows[:, is_real] = torch.from_numpy(alpha)
            parts.append(rows.masked_fill(rows.sum(1, keepdim=True) == 0, torch.nan))
    return _joined(parts)


def row_mask(batches: Sequence[Batch]) -> torch.BoolTensor:
    """Padding mask of rows, for [`agreement`] and [`kendall_tau`].

    Args:
        batches (sequence of `dict[str, torch.Tensor]`): See [`source_rows`].

    Returns:
        `torch.BoolTensor` of shape `(rows, longest source)`

    Raises:
        ValueError: if a batch is incomplete.
    """
    _check_batches(batches)
    parts = []
    for batch in batches:
        real, wanted = _tokens_and_outputs(batch)
        if wanted.dim() == 2:
            real = real[:, None].expand(-1, wanted.shape[1], -1)
        parts.append(real[wanted].cpu())
    return _joined(parts)


@torch.no_grad()
def performance(model: PreTrainedModel, batches: Sequence[Batch]) -> dict[str, float]:
    """Loss and accuracy of a model.

    Args:
        model (`PreTrainedModel`): A model that returns logits for every label.
        batches (sequence of `dict[str, torch.Tensor]`): Arguments of the forward pass, with `labels`.

    Returns:
        `dict[str, float]`: `loss`, the mean over all labels in nats, and `accuracy`, the fraction of labels that are
        the most probable output; for translation models, token accuracy with teacher forcing.

    Raises:
        ValueError: if there is no label.
    """
    loss = correct = total = 0
    reader = evaluation_view(model).root
    for batch in batches:
        batch = on_device(batch, model)
        wanted = is_labelled(batch["labels"])
        logits, labels = reader(**batch, return_dict=True).logits[wanted], batch["labels"][wanted]
        loss += functional.cross_entropy(logits.float(), labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        total += len(labels)
    if not total:
        raise ValueError("batches have no labels; give labels other than -100.")
    return {"loss": loss / total, "accuracy": correct / total}


class AgreementTracker:
    """Metrics of a model in training: its performance, and the agreement of one of its quantities with a reference.

    Use it as `measure` of [`CheckpointCallback`]. It does not keep the rows of checkpoints.

    Args:
        batches (sequence of `dict[str, torch.Tensor]`): See [`source_rows`].
        quantity (`str`, *optional*): Quantity to compare; none by default.
        reference (`torch.Tensor` of shape `(rows, longest source)`, *optional*): Reference rows of the same batches,
            such as the attention of a fully trained model.

    Raises:
        ValueError: if only one of `quantity` and `reference` is given, or `reference` has another shape.

    Example:
        >>> from hf_attn_dynamics import LstmConfig, LstmForSequenceClassification
        >>> model = LstmForSequenceClassification(LstmConfig(vocab_size=50, hidden_size=8))
        >>> batch = {"input_ids": torch.tensor([[7, 8, 9]]), "attention_mask": torch.ones(1, 3)}
        >>> batches = [{**batch, "labels": torch.tensor([1])}]
        >>> metrics = AgreementTracker(batches, "attention", source_rows(model, batches, "attention"))(model)
        >>> list(metrics), metrics["agreement"]
        (['loss', 'accuracy', 'agreement', 'kendall_tau'], 1.0)
    """

    def __init__(self, batches: Sequence[Batch], quantity: str | None = None, reference: torch.Tensor | None = None):
        if (quantity is None) != (reference is None):
            raise ValueError(f"quantity={quantity!r} needs a reference, and a reference a quantity; give both.")
        self.batches = batches
        self.quantity = quantity
        self.reference = reference
        self.mask = row_mask(batches)
        if reference is not None and reference.shape != self.mask.shape:
            raise ValueError(
                f"reference has shape {tuple(reference.shape)}, but the batches have {tuple(self.mask.shape)} output "
                "words and source positions; take the rows of the same batches."
            )

    def __call__(self, model: PreTrainedModel) -> dict[str, float]:
        """`loss` and `accuracy` of a model; with a quantity, `agreement` A(reference, quantity) and `kendall_tau`."""
        metrics = performance(model, self.batches)
        if self.quantity is not None:
            rows = source_rows(model, self.batches, self.quantity).to(self.reference)
            metrics["agreement"] = agreement(self.reference, rows, self.mask).item()
            metrics["kendall_tau"] = kendall_tau(self.reference, rows, self.mask).item()
        return metrics


@torch.no_grad()
def _attention(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    if not hasattr(model, "attention"):
        raise ValueError(f"model is a {type(model).__name__}, not an LSTM model with attention.")
    if batch["labels"].dim() == 1:
        return model(**batch, return_dict=True).attention_weights
    return model(**batch, output_attentions=True, return_dict=True).cross_attentions[0].mean(1)


def _probe(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return lexical_probe(model, batch).log_odds


def _saliency(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    inputs = {name: value for name, value in batch.items() if name != "input_ids"}
    # cuDNN does not support gradients of LSTMs in evaluation mode.
    with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        logits, labels = model(**inputs, inputs_embeds=embeddings, return_dict=True).logits, batch["labels"]
        # cross_entropy expects classes in the second dimension.
        losses = functional.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=IGNORED, reduction="none")
        return word_saliency(losses, embeddings)


@torch.no_grad()
def _optimal(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    if getattr(model.config, "readout", None) != "additive":
        raise ValueError(
            f"model is a {type(model).__name__} whose readout is not additive, so optimal attention is not a convex "
            "problem; create it with readout='additive'."
        )
    contexts, states = model.word_contexts(
        batch["input_ids"], batch["attention_mask"], labels=batch["labels"], **decoder_inputs(batch)
    )
    output = model.readout.output
    source_logits = functional.linear(contexts[:, 0], output.weight)
    return optimal_attention(
        source_logits, batch["labels"], output(states[:, :, 0]), batch["attention_mask"], chunk_size=16
    ).attention


QUANTITIES = {
    "attention": _attention,
    "probe": _probe,
    "saliency": _saliency,
    "optimal_attention": _optimal,
}


def _tokens_and_outputs(batch: Batch) -> tuple[torch.BoolTensor, torch.BoolTensor]:
    """Masks of non-padding source positions, and of labels that are not ignored."""
    mask = batch["attention_mask"]
    return non_padding(mask, mask.shape), is_labelled(batch["labels"])


def _check_batches(batches: Sequence[Batch]) -> None:
    if not len(batches):
        raise ValueError("batches are empty; give at least one.")
    for number, batch in enumerate(batches):
        for name in ("input_ids", "attention_mask", "labels"):
            if batch.get(name) is None:
                raise ValueError(f"batch {number} of batches has no {name}.")
    if not any(is_labelled(batch["labels"]).any() for batch in batches):
        raise ValueError(f"batches have no labels; give labels other than {IGNORED}.")


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates rows, padded to the longest ones."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([functional.pad(part, (0, longest - part.shape[1])) for part in parts])
