# Licensed under the Apache License, Version 2.0.
"""What a model would say if it attended to a single source word (Snell et al. 2021, section 2.2)."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ...models.embedding_words import real_positions
from ...models.ignored_labels import IGNORED, is_labelled
from ...models.precision import at_least_single
from ..model_views import evaluation_view
from ..running import on_device


class LexicalProbe(NamedTuple):
    """What [`lexical_probe`] found: probabilities, and their log-odds ln β/(1 - β), in single precision at least.

    Of shape `(batch, target length, source length)` for translation, `(batch, length)` for classification. Source
    padding has probability 0 and log-odds -∞; targets without label have NaN.
    """

    beta: torch.Tensor
    log_odds: torch.Tensor


@torch.no_grad()
def lexical_probe(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], chunk_size: int = 256) -> LexicalProbe:
    """How probable the correct output is when attention goes to one source word only: β.

    `β_tl = softmax(N([h_l, s_t]))_{y_t}` for translation (equation 4), `β_l = σ((2y - 1) wᵀh_l)` for two classes
    (equation 9), a softmax for more of them. The same of a model trained with uniform attention is β^uf, that of a
    proxy, which has embeddings in the place of states, β^px. For two classes the log-odds of the positive label are
    the γ_l of section 6.1.

    Args:
        model (`PreTrainedModel`): `LstmSeq2SeqForConditionalGeneration`, `LstmForSequenceClassification`,
            `ProxyForSeq2Seq` or `ProxyForSequenceClassification`. It is evaluated, whatever its mode.
        batch (`dict[str, torch.Tensor]`): `input_ids` or `inputs_embeds`, `attention_mask` if there is padding that
            ids do not show, and `labels`, of shape `(batch, target length)` or `(batch,)`; -100 where there is none.
            A decoder reads `decoder_input_ids`, if there are, and otherwise the labels.
        chunk_size (`int`): Pairs of source and target positions at a time, over the batch, but at least one target
            position of each sentence; each pair takes memory for the logits of all output words.

    Returns:
        [`LexicalProbe`]

    Raises:
        ValueError: if the model has no readout of single words, labels are missing or not those of the sentences, or
            `chunk_size` is out of range.

    Example:
        >>> from hf_attn_dynamics import LstmConfig, LstmForSequenceClassification, lexical_probe
        >>> model = LstmForSequenceClassification(LstmConfig(vocab_size=50, hidden_size=8))
        >>> batch = {"input_ids": torch.tensor([[7, 8, 9, 0]]), "labels": torch.tensor([1])}
        >>> probe = lexical_probe(model, batch)
        >>> probe.beta.shape, probe.beta[0, 3].item(), torch.allclose(probe.beta, probe.log_odds.sigmoid())
        (torch.Size([1, 4]), 0.0, True)
    """
    if not hasattr(model, "word_contexts"):
        raise ValueError(
            f"model is a {type(model).__name__}, which has no lexical probe; give an LSTM model with attention or its "
            "proxy."
        )
    if batch.get("labels") is None:
        raise ValueError("batch has no labels; the probe asks for the probability of the correct output.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    batch = on_device(batch, model)
    inputs = {name: batch.get(name) for name in ("input_ids", "attention_mask", "inputs_embeds", "labels")}
    given = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    labels = inputs["labels"]
    reader = evaluation_view(model).root
    contexts, *states = reader.word_contexts(**inputs, **decoder_inputs(batch))
    # They would be spread over the sentences.
    if labels.dim() != contexts.dim() - 2 or len(labels) != len(contexts):
        shape = "(batch,)" if contexts.dim() == 3 else "(batch, target length)"
        raise ValueError(f"labels must have shape {shape} for {len(contexts)} sentences, got {tuple(labels.shape)}.")
    if ((labels < 0) & is_labelled(labels)).any():
        raise ValueError(f"labels must be outputs from 0 on, or {IGNORED} for none, got {int(labels.min())}.")
    if labels.dim() == 1:
        log_odds = _log_odds(reader.readout(contexts), labels[:, None])
    else:
        step = max(1, chunk_size // (contexts.shape[0] * contexts.shape[2]))
        log_odds = torch.cat(
            [
                _log_odds(
                    reader.readout(contexts, *(one[:, start : start + step] for one in states)),
                    labels[:, start : start + step, None],
                )
                for start in range(0, labels.shape[1], step)
            ],
            1,
        )
    real = real_positions(given, inputs["attention_mask"], model.config.pad_token_id)
    if labels.dim() == 2:
        real = real[:, None]
    log_odds = log_odds.masked_fill(~real, -torch.inf).masked_fill(~is_labelled(labels)[..., None], torch.nan)
    return LexicalProbe(log_odds.sigmoid(), log_odds)


def decoder_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a decoder reads in the place of the labels, if a batch has it."""
    return {name: batch[name] for name in ("decoder_input_ids",) if batch.get(name) is not None}


def _log_odds(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-odds of the labels, which broadcast to all but the last dimension of the logits."""
    # In half precision, most words would have the same log-odds, and agree with any others.
    logits = at_least_single(logits)
    correct = labels.clamp(min=0)[..., None]
    logits = logits.expand(*torch.broadcast_shapes(logits.shape[:-1], labels.shape), -1)
    correct = correct.expand(*logits.shape[:-1], 1)
    # What all others have together: exact also where the correct output has nearly all there is.
    others = logits.scatter(-1, correct, -torch.inf).logsumexp(-1)
    return logits.gather(-1, correct)[..., 0] - others
