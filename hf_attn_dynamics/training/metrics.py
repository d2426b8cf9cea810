# Licensed under the Apache License, Version 2.0.
"""Token-level metrics for `Trainer` that do not keep the logits of a whole evaluation in memory.

HeadwiseTrainer(
    ..., compute_metrics=replaced_token_metrics, preprocess_logits_for_metrics=replaced_token_predictions
)
HeadwiseSeq2SeqTrainer(..., compute_metrics=target_token_metrics, preprocess_logits_for_metrics=target_token_scores)
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction

from ..models.ignored_labels import is_labelled


def replaced_token_predictions(
    logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and labels of replaced-token detection, one byte each.

    Args:
        logits (`torch.Tensor` of shape `(batch, length)`): Logits of "replaced"; or a tuple of all outputs of a model
            without its loss, which begins with them. An integer tensor in the tuple has the labels of a model that
            replaces tokens itself.
        labels (`torch.Tensor` of shape `(batch, length)`): 1 replaced, 0 original, -100 padding; ignored if the model
            replaces tokens itself.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: predictions (0 or 1) and labels (0, 1 or -100), int8, of the same shape.
    """
    outputs = logits if isinstance(logits, tuple) else (logits,)
    truth = next((o for o in outputs if torch.is_tensor(o) and not o.is_floating_point()), labels)
    return (outputs[0] > 0).to(torch.int8), truth.to(torch.int8)


def replaced_token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Metrics of replaced-token detection over all tokens whose label is not -100.

    Args:
        prediction (`EvalPrediction`): Its `predictions` are the output of [`replaced_token_predictions`].

    Returns:
        `dict[str, float]`: `accuracy`; `precision`, `recall` and `f1` of "replaced", 0 if undefined; and `share`, the
        fraction of replaced tokens. NaN without tokens.

    Example:
        >>> predictions = np.array([[1, 1, 0, 0, 0]]), np.array([[1, 0, 1, 0, -100]])
        >>> replaced_token_metrics(EvalPrediction(predictions, label_ids=None))
        {'accuracy': 0.5, 'precision': 0.5, 'recall': 0.5, 'f1': 0.5, 'share': 0.5}
    """
    predicted, truth = (np.asarray(values) for values in prediction.predictions)
    counted = is_labelled(truth)
    predicted, truth = predicted[counted] == 1, truth[counted] == 1
    found, said, there, total = (int(v.sum()) for v in (predicted & truth, predicted, truth, counted))
    return {
        "accuracy": _share((predicted == truth).sum(), total, float("nan")),
        "precision": _share(found, said),
        "recall": _share(found, there),
        "f1": _share(2 * found, said + there),
        "share": _share(there, total, float("nan")),
    }


def target_token_scores(
    logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood and correctness of each target token under teacher forcing.

    Args:
        logits (`torch.Tensor` of shape `(batch, length, tokens)`): Logits of the target tokens; or a tuple of all
            outputs of a model without its loss, which begins with them.
        labels (`torch.Tensor` of shape `(batch, length)`): Target tokens; -100 padding.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: negative log-likelihoods in nats, float32, 0 at padding; and 1 where the
        token is the most likely one, int8; both of shape `(batch, length)`.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    nll = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return nll, (logits.argmax(-1) == labels).to(torch.int8)


def target_token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Means over all target tokens whose label is not -100, for any batch size.

    Args:
        prediction (`EvalPrediction`): Its `predictions` are the output of [`target_token_scores`].

    Returns:
        `dict[str, float]`: `nll`, in nats, and `token_accuracy`. NaN without tokens.

    Example:
        >>> scores = np.array([[0.25, 0.75, 0.0]]), np.array([[1, 0, 0]])
        >>> target_token_metrics(EvalPrediction(scores, label_ids=np.array([[5, 7, -100]])))
        {'nll': 0.5, 'token_accuracy': 0.5}
    """
    counted = is_labelled(np.asarray(prediction.label_ids))
    nll, hits = (np.asarray(values)[counted].sum(dtype=np.float64) for values in prediction.predictions)
    total = int(counted.sum())
    return {name: _share(part, total, float("nan")) for name, part in (("nll", nll), ("token_accuracy", hits))}


def _share(part: int, whole: int, undefined: float = 0.0) -> float:
    return float(part / whole) if whole else undefined
