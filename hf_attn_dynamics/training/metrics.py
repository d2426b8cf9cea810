# Licensed under the Apache License, Version 2.0.
"""How well replaced tokens are told from original ones, as `Trainer` takes it.

HeadwiseTrainer(
    ..., compute_metrics=replaced_token_metrics, preprocess_logits_for_metrics=replaced_token_predictions
)
"""

import numpy as np
import torch
from transformers import EvalPrediction


def replaced_token_predictions(
    logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each token was taken for and what it was, a byte each, so that no logits are kept for a whole evaluation.

    Args:
        logits (`torch.Tensor` of shape `(batch, length)`): Logits of "replaced"; or a tuple that begins with them, all
            outputs of a model that are not its loss. Where the model replaced tokens itself, integers among them say
            which.
        labels (`torch.Tensor` of shape `(batch, length)`): 1 replaced, 0 original, -100 padding; read where the model
            did not replace tokens itself.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: predictions (0 or 1) and truth (0, 1 or -100), int8, of the same shape.
    """
    outputs = logits if isinstance(logits, tuple) else (logits,)
    truth = next((o for o in outputs if torch.is_tensor(o) and not o.is_floating_point()), labels)
    return (outputs[0] > 0).to(torch.int8), truth.to(torch.int8)


def replaced_token_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Metrics of replaced-token detection over all tokens whose truth is not -100.

    Args:
        prediction (`EvalPrediction`): Its `predictions` are what [`replaced_token_predictions`] returns.

    Returns:
        `dict[str, float]`: `accuracy`; `precision`, `recall` and `f1` of "replaced", 0 where they are not defined; and
        `share`, that of the tokens which were replaced. NaN without any token.

    Example:
        >>> predictions = np.array([[1, 1, 0, 0, 0]]), np.array([[1, 0, 1, 0, -100]])
        >>> replaced_token_metrics(EvalPrediction(predictions, label_ids=None))
        {'accuracy': 0.5, 'precision': 0.5, 'recall': 0.5, 'f1': 0.5, 'share': 0.5}
    """
    predicted, truth = (np.asarray(values) for values in prediction.predictions)
    counted = truth != -100
    predicted, truth = predicted[counted] == 1, truth[counted] == 1
    found, said, there, total = (int(v.sum()) for v in (predicted & truth, predicted, truth, counted))
    return {
        "accuracy": _share((predicted == truth).sum(), total, float("nan")),
        "precision": _share(found, said),
        "recall": _share(found, there),
        "f1": _share(2 * found, said + there),
        "share": _share(there, total, float("nan")),
    }


def _share(part: int, whole: int, undefined: float = 0.0) -> float:
    return float(part / whole) if whole else undefined
