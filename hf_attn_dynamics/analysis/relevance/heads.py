# Licensed under the Apache License, Version 2.0.
"""Which heads a prediction comes from: layer-wise relevance propagation (Voita et al. 2019, appendix A).

The top-1 logit is handed back from layer to layer, each neuron giving what it has to its inputs in the shares they
have in its value. Relevance takes the place of the gradient: while a model is read, each operation that depends on
the input is replaced, through PyTorch's function modes, by one whose backward pass hands on relevance. Attention runs
as `eager` functions, whose operations are seen. This is an implementation from the papers.

The institutions of the method's authors (Fraunhofer HHI, TU Berlin) state that layer-wise relevance propagation is
patented; whether that concerns a use is for its user to check.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...models.head_roles import HeadLayer, locate_heads
from ...models.head_sites import HeadSite
from ..head_scores import HeadScores, tabulate
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
    """Share of each head in the top-1 logit, by layer-wise relevance propagation (Voita et al. 2019, section 4).

    A prediction is a position of a masked or causal language model, a token classifier or ELECTRA's discriminator, a
    position of the target of an encoder–decoder, or a sentence of a classifier. Its top-1 logit has relevance 1, and
    hands it on. The relevance of a head is that of its neurons at the input of the output projection, summed over
    them and over tokens, normalised over the heads of the layer, and averaged over predictions. How sentences are
    padded and split into batches does not matter.

    What hands on what (appendix A.2; papers and published code differ in what this list says):
        - Sums `v = Σ W·u`: linear maps, additions, weighted values. `"ratio"`: each summand gets the share `W·u / v`.
          `"alpha_beta"` (α = 1, β = 0): positive summands alone get shares, in proportion; where there is none, the
          negative ones do.
        - Biases, and other constants that are added, are summands like others: they keep their share.
        - Products of two neurons: each factor gets `u / Σ u`; with `"alpha_beta"` `|u| / Σ |u|`. Products with a
          constant, such as a gate or the scale of attention scores, leave relevance to the neuron.
        - Attention is both: a context is a sum over keys of products of a weight and a value, a score a sum over
          features of products of query and key. So relevance also flows through queries and keys.
        - Activations and softmax hand on to each input what its output has.
        - Layer norm: the standard deviation is taken as a constant, which leaves a linear map (subtraction of the
          mean, and scale) and a bias; so is the root mean square of norms by it, which leaves a constant factor.
        - Denominators of either sign are ε in size at least. What is not shared out because of that goes to the
          inputs of the sum in equal parts, or to the other factor, so that nothing is lost.
        - Nothing is rescaled in between, and `"ratio"` takes no absolute values: only heads of a layer are normalised.

    With `"alpha_beta"` all relevance is between 0 and 1. With `"ratio"`, positive and negative relevance may be many
    times what they add up to, where neurons are small differences of large summands, or factors opposite. Heads then
    get large shares of either sign, and a mean may hang on few predictions, unless `normalize="absolute"` bounds them.
    [`relevance_conservation`] tells whether what is put in arrives.

    Everything is computed in the precision of the model. It runs in evaluation mode; its mode, its attention, its
    gradients and what it has frozen stay as they are.

    Args:
        model (`PreTrainedModel`): A model with a head, of an architecture that [`locate_heads`] knows and whose
            operations have rules: BERT and its kin, Marian, BART, T5, GPT-2, Llama, Mistral, Qwen, Gemma, and others
            that are made of the same operations; headwise or not, frozen or pruned.
        batch (`dict` or iterable of `dict`): One batch or several, as the model takes them; moved to its device.
            Positions with attention mask 0 (on the side of the decoder: decoder attention mask 0) make no prediction,
            nor do those whose label, if there are labels, is -100 (causal models shift labels; leave them out). Labels
            have no other effect, but that the decoder of an encoder–decoder may read them.
        rule (`str`): `"ratio"` or `"alpha_beta"`.
        epsilon (`float`): ε, between 0 and 1.
        normalize (`str`, *optional*): `"sum"` divides by the sum over the heads of the layer, as the paper does;
            `"absolute"` by the sum of absolute values, which stays bounded where heads cancel; `None` leaves shares
            of the logit. For each prediction, before the average; a layer without relevance stays zero.
        chunk_size (`int`): Number of positions of each sentence that share a backward pass. More need more memory,
            and pay where batches are too small for the device.
        progress (`bool`): Whether to show a progress bar.

    Returns:
        [`HeadScores`]: for each kind of site of shape (layers, heads); NaN where a head is removed.

    Raises:
        ValueError: if an option is unknown, there is no batch or no prediction, the model has no logits or an
            operation without a rule (the message names it and the class of its module), a batch leaves out heads, or
            a number is not finite.

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
    """Where relevance ends up, as shares of what is put in at the top-1 logits; see [`relevance_conservation`].

    Args:
        inputs (`float`): Share that arrives at the embeddings of tokens, positions and types, mean over predictions.
        biases (`float`): Share that biases and other constants keep, mean over predictions.
        error (`float`): `|1 − inputs − biases|` of the backward pass where it is largest; a pass is of one position
            of all sentences of a batch.
    """

    inputs: float
    biases: float
    error: float


def relevance_conservation(
    model: PreTrainedModel,
    batch: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    rule: str = "ratio",
    epsilon: float = 1e-6,
    progress: bool = False,
) -> RelevanceConservation:
    """Whether the relevance that is put in at the output arrives: `Σ inputs + Σ biases = 1` (appendix A.1).

    Rounding makes an error, the larger the more positive and negative relevance cancel; another one would be a rule
    that does not conserve. Without biases, all relevance arrives at the inputs.

    Args:
        model, batch, rule, epsilon, progress: As for [`head_relevance`].

    Returns:
        [`RelevanceConservation`]

    Raises:
        ValueError: as [`head_relevance`] does.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
        >>> batch = {"input_ids": torch.tensor([[5, 7, 8], [9, 6, 4]])}
        >>> relevance_conservation(BertForMaskedLM(config).double(), batch, "alpha_beta").error < 1e-9
        True
    """
    locate_heads(model)  # refuses what is no model
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
    """Relevance of heads, (sentences, heads); of all uses of a layer that a model uses several times."""
    found: dict[HeadSite, torch.Tensor] = {}
    relevances = backward([context for _, context in contexts])
    for (layer, _), relevance in zip(contexts, relevances):
        by_head = relevance.unflatten(-1, (len(layer.heads), layer.head_dim)).double().sum((1, -1))
        found[layer.site] = found.get(layer.site, 0) + by_head
    return found


def _normalized(relevance: torch.Tensor, how: str | None) -> torch.Tensor:
    """Relevance of heads, (predictions, heads), over that of all heads."""
    if how is None:
        return relevance
    total = (relevance if how == "sum" else relevance.abs()).sum(-1, keepdim=True)
    return relevance / total.where(total != 0, torch.ones_like(total))
