# Licensed under the Apache License, Version 2.0.
"""Layer-wise relevance propagation to heads (Voita et al. 2019, appendix A).

The top-1 logit is redistributed from layer to layer: each neuron passes its relevance to its inputs in proportion to
their contributions to its value. Relevance takes the place of the gradient: a PyTorch function mode replaces each
operation that depends on the input by one whose backward pass propagates relevance. Attention runs as `eager`
operations, which the function mode can intercept. The implementation follows the papers.

The institutions of the method's authors (Fraunhofer HHI, TU Berlin) state that layer-wise relevance propagation is
patented; users have to check whether that concerns their use.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import HeadSite
from ..head_scores import HeadScores, tabulate
from ..notebook import html_table
from .propagation import Propagation
from .rules import Rule


NORMALIZATIONS = ("sum", "absolute", None)


def head_relevance(
    model: PreTrainedModel,
    batch: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    rule: str = "ratio",
    epsilon: float = 1e-6,
    normalize: str | None = "sum",
    chunk_size: int = 1,
    progress: bool = False,
) -> HeadScores:
    """Relevance of each head for the top-1 logit, by layer-wise relevance propagation (Voita et al. 2019, section 4).

    A prediction is a position of a masked or causal language model, a token classifier or ELECTRA's discriminator, a
    position of the target of an encoder–decoder model, or a sentence of a classifier. Its top-1 logit has relevance 1.
    The relevance of a head is the relevance of its neurons at the input of the output projection, summed over neurons
    and tokens, normalized over the heads of the layer, and averaged over predictions. It depends neither on padding
    nor on batching.

    Rules (appendix A.2; papers and published code differ in these points):
        - Sums `v = Σ W·u`: linear maps, additions, weighted values. With `"ratio"`, each summand gets the fraction
          `W·u / v`. With `"alpha_beta"` (α = 1, β = 0), only positive summands get relevance, in proportion; if there
          are none, the negative ones do.
        - Biases and other added constants are summands like others: they keep their part of the relevance.
        - Products of two neurons: each factor gets `u / Σ u`; with `"alpha_beta"`, `|u| / Σ |u|`. In products with a
          constant, such as a gate or the scale of attention scores, the neuron gets all relevance.
        - Attention consists of both: a context is a sum over keys of weight times value, a score a sum over features
          of query times key. Relevance therefore also flows through queries and keys.
        - Activations and softmax pass the relevance of each output to the input at the same index.
        - Layer norm: with the standard deviation as a constant, it is a linear map (subtraction of the mean, and
          scale) and a bias. RMS norm: with the root mean square as a constant, it is a constant factor.
        - With `"attn_lrp"` (Achtibat et al. 2024), sums are those of `"ratio"`, both factors of a product get half of
          its relevance, and softmax hands on relevance by its first-order expansion, whose constant keeps the rest.
        - Denominators of either sign are at least ε in absolute value. Relevance that is lost thereby goes to the
          inputs of the sum in equal parts, or to the other factor, so that relevance is conserved.
        - Relevance is not rescaled in between, and `"ratio"` takes no absolute values: only the heads of a layer are
          normalized.

    With `"alpha_beta"`, all relevance is between 0 and 1. With `"ratio"`, positive and negative relevance can be much
    larger than their sum, where a neuron is a small difference of large summands or factors have opposite signs.
    Heads can then have large values of either sign, and a few predictions can dominate the mean;
    `normalize="absolute"` bounds them. [`relevance_conservation`] checks that relevance is conserved.

    All numbers have the precision of the model. The model runs in evaluation mode; its mode, its attention kernel, its
    gradients and its frozen parameters are not changed.

    Args:
        model (`PreTrainedModel`): A model with a task head, of an architecture that [`locate_heads`] supports and
            whose operations have rules: BERT and similar encoders, Marian, BART, T5, GPT-2, Llama, Mistral, Qwen,
            Gemma, and others with the same operations; headwise or not, frozen or pruned.
        batch (`dict` or iterable of `dict`): One or several batches: arguments of the forward pass. Tensors are moved
            to the device of the model. Positions with (decoder) attention mask 0 are not predictions, nor are
            positions with label -100, if there are labels (causal models shift labels, so leave them out). Labels have
            no other effect, except as the input of the decoder of an encoder–decoder model.
        rule (`str`): `"ratio"`, `"alpha_beta"` or `"attn_lrp"`.
        epsilon (`float`): ε, between 0 and 1.
        normalize (`str`, *optional*): `"sum"` divides by the sum over the heads of the layer, as in the paper;
            `"absolute"` by the sum of absolute values, which is bounded if heads cancel; `None` returns fractions of
            the logit. Applied to each prediction before averaging; a layer without relevance stays zero.
        chunk_size (`int`): Positions of each sentence per backward pass. Larger chunks need more memory and are faster
            if batches are too small for the device.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadScores`]: NaN for removed heads.

    Raises:
        ValueError: if an option is unknown, there is no batch or no prediction, the model has no logits, an operation
            has no rule (the message names it and the class of its module), heads do not run on a batch, or a number is
            not finite.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]])}
        >>> scores = head_relevance(BertForMaskedLM(config), batch, rule="alpha_beta")
        >>> scores["encoder"].shape, scores["encoder"].sum(1).round(decimals=6).tolist()
        (torch.Size([2, 4]), [1.0, 1.0])
    """
    if normalize not in NORMALIZATIONS:
        raise ValueError(f"normalize must be 'sum', 'absolute' or None, got {normalize!r}.")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer of at least 1, got {chunk_size!r}.")
    layers = locate_heads(model)
    sums = {layer.site: torch.zeros(len(layer.heads), dtype=torch.float64) for layer in layers}
    predictions = 0
    propagation = Propagation(model, Rule(rule, epsilon), layers)
    for select, backward in propagation.passes(batch, chunk_size, progress):
        rows = select.any(1)
        for site, relevance in _by_site(propagation.contexts, backward).items():
            sums[site] += _normalized(relevance[rows], normalize).sum(0).cpu()
        predictions += int(rows.sum())
    return tabulate(layers, {site: total / predictions for site, total in sums.items()})


@dataclass(frozen=True)
class RelevanceConservation:
    """Where relevance ends, as fractions of the relevance of the top-1 logits; see [`relevance_conservation`].

    Args:
        inputs (`float`): Fraction at the embeddings of tokens, positions and segments, mean over predictions.
        biases (`float`): Fraction at biases and other constants, mean over predictions.
        error (`float`): The largest `|1 − inputs − biases|` of all backward passes; a backward pass covers one
            position of all sentences of a batch.
    """

    inputs: float
    biases: float
    error: float

    def _repr_html_(self) -> str:
        """The fractions as a table, for notebooks."""
        rows = [["inputs", self.inputs], ["biases and constants", self.biases], ["largest error", f"{self.error:.1e}"]]
        return html_table(["where relevance ends", "fraction"], rows)


def relevance_conservation(
    model: PreTrainedModel,
    batch: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    rule: str = "ratio",
    epsilon: float = 1e-6,
    progress: bool = False,
) -> RelevanceConservation:
    """Checks that relevance is conserved: `Σ inputs + Σ biases = 1` (appendix A.1).

    Rounding causes an error, which is larger the more positive and negative relevance cancel; any other error would
    be a rule that does not conserve relevance. Without biases, all relevance arrives at the inputs.

    Args:
        model, batch, rule, epsilon, progress: See [`head_relevance`].

    Returns:
        [`RelevanceConservation`]

    Raises:
        ValueError: for `rule="attn_lrp"`, which does not conserve relevance; and see [`head_relevance`].

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]])}
        >>> relevance_conservation(BertForMaskedLM(config).double(), batch, "alpha_beta").error < 1e-9
        True
    """
    if rule == "attn_lrp":
        raise ValueError(
            "rule='attn_lrp' does not conserve relevance: softmax keeps a part; check 'ratio' or 'alpha_beta'."
        )
    locate_heads(model)  # raises ValueError unless it is a model
    arrived, kept, predictions, error = 0.0, 0.0, 0, 0.0
    propagation = Propagation(model, Rule(rule, epsilon), keep_constants=True)
    for select, backward in propagation.passes(batch, 1, progress):
        ends = propagation.inputs + propagation.constants
        totals = [relevance.double().sum().item() for relevance in backward(ends)]
        inputs, constants = sum(totals[: len(propagation.inputs)]), sum(totals[len(propagation.inputs) :])
        count = int(select.sum())
        arrived, kept, predictions = arrived + inputs, kept + constants, predictions + count
        error = max(error, abs(1 - (inputs + constants) / count))
    return RelevanceConservation(arrived / predictions, kept / predictions, error)


def _by_site(contexts: list[tuple[HeadLayer, torch.Tensor]], backward: Callable) -> dict[HeadSite, torch.Tensor]:
    """Relevance of heads, (sentences, heads), summed over the calls of a layer."""
    found: dict[HeadSite, torch.Tensor] = {}
    relevances = backward([context for _, context in contexts])
    for (layer, _), relevance in zip(contexts, relevances):
        by_head = relevance.unflatten(-1, (len(layer.heads), layer.head_dim)).double().sum((1, -1))
        found[layer.site] = found.get(layer.site, 0) + by_head
    return found


def _normalized(relevance: torch.Tensor, how: str | None) -> torch.Tensor:
    """Normalizes the relevance of heads, (predictions, heads), over the heads of the layer."""
    if how is None:
        return relevance
    total = (relevance if how == "sum" else relevance.abs()).sum(-1, keepdim=True)
    return relevance / total.where(total != 0, torch.ones_like(total))
