# Licensed under the Apache License, Version 2.0.
"""Lexical probe: predictions of a model that attends to a single source word (Snell et al. 2021, section 2.2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from ...models.embedding_words import real_positions
from ...models.ignored_labels import IGNORED, is_labelled
from ...models.precision import at_least_single
from ..model_views import evaluation_view
from ..running import on_device
from .source_maps import plot_sentence, table_of_rows


if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LexicalProbe(NamedTuple):
    """Result of [`lexical_probe`]: probabilities β, and log-odds ln β/(1 - β), in single precision at least.

    Both have shape `(batch, target length, source length)` for translation, `(batch, length)` for classification.
    Source padding has probability 0 and log-odds -∞; targets without a label are NaN.
    """

    beta: torch.Tensor
    log_odds: torch.Tensor

    def _repr_html_(self) -> str:
        """The highest probability of each output word, for notebooks."""
        sentences = f"{len(self.beta):,} sentence{'s' * (len(self.beta) != 1)}"
        caption = f"LexicalProbe of {sentences}: probability β of the correct output, attending to one source word"
        return table_of_rows(self.beta, self._is_padding, caption)

    def plot(
        self,
        path: str | Path | None = None,
        title: str = "",
        sentence: int = 0,
        source: Sequence[str] | None = None,
        target: Sequence[str] | None = None,
    ) -> "Figure":
        """Draws the probabilities β of one sentence of the batch: a row for each output word, without padding.

        Args:
            path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
            title (`str`): Model and data; the picture itself says what it shows.
            sentence (`int`): Index of the sentence in the batch.
            source, target (`list[str]`, *optional*): Tokens of both sides, with or without those of padding; positions
                by default. For classification, there is a single row.

        Returns:
            `matplotlib.figure.Figure`

        Raises:
            ValueError: if there is no such sentence, it has no label, or there is another number of tokens.
        """
        names = "lexical probe β", "probability of the correct output"
        return plot_sentence(self.beta, self._is_padding, names, sentence, source, target, path, title)

    @property
    def _is_padding(self) -> torch.Tensor:
        # The probability of a word can also be rounded to 0.
        return self.log_odds == -torch.inf


@torch.no_grad()
def lexical_probe(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], chunk_size: int = 256) -> LexicalProbe:
    """Probability of the correct output if all attention is on one source word: β.

    `β_tl = softmax(N([h_l, s_t]))_{y_t}` for translation (equation 4), `β_l = σ((2y - 1) wᵀh_l)` for two classes
    (equation 9), a softmax for more classes. For a model trained with uniform attention, this is β^uf; for a proxy,
    which has embeddings in place of hidden states, β^px. For two classes, the log-odds of the positive label are the
    γ_l of section 6.1.

    Args:
        model (`PreTrainedModel`): `LstmSeq2SeqForConditionalGeneration`, `LstmForSequenceClassification`,
            `ProxyForSeq2Seq` or `ProxyForSequenceClassification`; it runs in evaluation mode.
        batch (`dict[str, torch.Tensor]`): `input_ids` or `inputs_embeds`, `attention_mask` if token ids do not show
            padding, and `labels`, of shape `(batch, target length)` or `(batch,)`; -100 is ignored. A decoder reads
            `decoder_input_ids`, if given, or else the labels.
        chunk_size (`int`): Pairs of source and target positions per chunk, with at least one target position of each
            sentence; each pair needs memory for the logits of all output words.

    Returns:
        [`LexicalProbe`]

    Raises:
        ValueError: if the model has no lexical probe, labels are missing, have another shape or are no outputs, or
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
        raise ValueError("batch has no labels; the probe returns the probability of the correct output.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    batch = on_device(batch, model)
    inputs = {name: batch.get(name) for name in ("input_ids", "attention_mask", "inputs_embeds", "labels")}
    given = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    labels = inputs["labels"]
    reader = evaluation_view(model).root
    contexts, *states = reader.word_contexts(**inputs, **decoder_inputs(batch))
    # Other labels would broadcast.
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
    """The decoder inputs of a batch, if it has any; else the decoder reads the labels."""
    return {name: batch[name] for name in ("decoder_input_ids",) if batch.get(name) is not None}


def _log_odds(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-odds of the labels, which broadcast to all but the last dimension of the logits."""
    # In half precision, most words would have equal log-odds.
    logits = at_least_single(logits)
    if (labels >= logits.shape[-1]).any():
        raise ValueError(f"labels must be outputs from 0 to {logits.shape[-1] - 1}, got {int(labels.max())}.")
    correct = labels.clamp(min=0)[..., None]
    logits = logits.expand(*torch.broadcast_shapes(logits.shape[:-1], labels.shape), -1)
    correct = correct.expand(*logits.shape[:-1], 1)
    # Log-sum-exp of all other outputs, which is accurate if the correct one has probability close to 1.
    others = logits.scatter(-1, correct, -torch.inf).logsumexp(-1)
    return logits.gather(-1, correct)[..., 0] - others
