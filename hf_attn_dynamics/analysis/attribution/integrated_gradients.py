# Licensed under the Apache License, Version 2.0.
"""Agreement of integrated gradients (Sundararajan, Taly & Yan 2017) with Hidden Token Attribution.

Both attribute the outputs of the heads of a layer at one position, o, to the input embeddings of the first layer:

    contributions            the mean over heads of ‖∂o_h/∂x_i‖_F / Σ_m ‖∂o_h/∂x_m‖_F, at the sentence itself
    integrated gradients     ⟨x_i − b_i, ∫ ∂F/∂x_i⟩ from a baseline b to the sentence, of F = ⟨o, u⟩, with u the
                             direction that o has at the sentence
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...models.number_checks import is_integer
from ..model_views import ModelView, evaluation_view
from ..results import Result
from ..running import arguments_of, reader_of
from .across_layers import global_contribution
from .statistics import correlate_rows
from .trace import AttentionTrace, trace_attention


AT_ONCE = 16  # points of the path per batch


@dataclass(frozen=True, eq=False)
class IntegratedGradientsAgreement(Result):
    """Agreement of two attributions of each sentence, see [`integrated_gradients_agreement`].

    Args:
        pearson, spearman (`torch.Tensor` of shape `(batch,)`): Correlation over the tokens of the sentence of the
            contributions with the absolute values of the integrated gradients; NaN if one of them is constant.
        incompleteness (`torch.Tensor` of shape `(batch,)`): Relative error of the sum of integrated gradients, which
            should equal F(x) − F(b). It decreases with more steps.
        contributions, attributions (`torch.Tensor` of shape `(batch, length)`): Contributions, which sum to 1, and
            integrated gradients, which have signs; 0 at padding.
    """

    pearson: torch.Tensor
    spearman: torch.Tensor
    incompleteness: torch.Tensor
    contributions: torch.Tensor
    attributions: torch.Tensor

    columns = ["sentence", "pearson", "spearman", "incompleteness"]

    def records(self) -> Iterator[tuple]:
        """Rows of the table, see `columns`."""
        rows = zip(self.pearson.tolist(), self.spearman.tolist(), self.incompleteness.tolist())
        for sentence, row in enumerate(rows):
            yield sentence, *row


def integrated_gradients_agreement(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    contribution: torch.Tensor | None = None,
    layer: int = -1,
    position: int = 0,
    steps: int = 50,
    baseline_id: int | None = None,
) -> IntegratedGradientsAgreement:
    """Correlation of global contributions with captum's `LayerIntegratedGradients`, sentence by sentence.

    Each sentence runs without padding: neither padding nor other sentences change the result.

    Args:
        model (`PreTrainedModel`): An encoder with a module called `embeddings` (BERT, RoBERTa, ELECTRA, DistilBERT,
            ALBERT, ModernBERT …), including headwise and pruned models; it runs in evaluation mode.
        batch (`dict`): Arguments of a forward pass with `input_ids`; labels are ignored.
        contribution (`torch.Tensor` of shape `(layers, batch, heads, query, key)`, *optional*): Result of
            `global_contribution` for this batch; computed exactly by default.
        layer (`int`): Layer whose heads are attributed; the last by default.
        position (`int`): Token of each sentence at which the heads are attributed; negative numbers count from the
            end.
        steps (`int`): Number of points on the path between baseline and sentence (Gauss–Legendre quadrature).
        baseline_id (`int`, *optional*): Token of the baseline, a sentence of the same length that repeats this token;
            the padding token by default, to which RoBERTa assigns no positions.

    Returns:
        [`IntegratedGradientsAgreement`]

    Raises:
        ValueError: if `contribution` has another shape, `layer`, `position`, `steps` or `baseline_id` is out of range,
            the model has no such module, [`global_contribution`] does not accept the model or the batch, or outputs
            depend on padding, as BERT's do with padding on the left.
        ImportError: if captum is not installed.
    """
    try:
        from captum.attr import LayerIntegratedGradients
    except ImportError as error:
        raise ImportError(
            "integrated_gradients_agreement() needs captum; install hf_attn_dynamics[captum]."
        ) from error
    if not is_integer(steps) or steps < 1:
        raise ValueError(f"steps must be a whole number, at least 1, got {steps!r}.")
    reader = reader_of(model)
    inputs = arguments_of(reader, batch)
    embeddings, baseline_id = _embeddings(reader, inputs), _baseline_id(reader, baseline_id)
    trace = trace_attention(model, batch)
    _check_indices(trace, layer, position)
    shape = trace.table().shape
    if contribution is None:
        contribution = global_contribution(model, batch)
    elif contribution.shape != shape:
        raise ValueError(
            f"contribution must have the shape {tuple(shape)} that global_contribution() gives for this batch, got "
            f"{tuple(contribution.shape)}."
        )
    contributions, attributions = torch.zeros(2, *trace.real.shape, dtype=torch.float64)
    incompleteness = torch.full((len(trace.real),), math.nan, dtype=torch.float64)
    view = evaluation_view(reader)
    run = _head_outputs(view, trace, layer)
    with torch.no_grad():
        together = run(**inputs)
    for sentence, tokens in trace.sentences():
        row = contribution[layer, sentence, :, tokens[position]]
        contributions[sentence] = row.double().nanmean(0).cpu()  # over the remaining heads
        # Without padding, no mask is needed.
        alone = {
            name: values[sentence : sentence + 1, tokens]
            for name, values in inputs.items()
            if torch.is_tensor(values) and values.shape == trace.real.shape and name != "attention_mask"
        }
        ids = alone.pop("input_ids")
        with torch.no_grad():
            outputs = run(input_ids=ids, **alone)[0]
        _check_alone(outputs, together[sentence, tokens], sentence)
        explained = _along(outputs[position], run, alone, position)
        found, delta = LayerIntegratedGradients(explained, view[embeddings]).attribute(
            ids,
            torch.full_like(ids, baseline_id),
            additional_forward_args=tuple(alone.values()),
            n_steps=int(steps),
            internal_batch_size=AT_ONCE,
            return_convergence_delta=True,
        )
        of_tokens = found[0].detach().double().sum(-1)
        attributions[sentence, tokens.cpu()] = of_tokens.cpu()
        incompleteness[sentence] = delta.item() / (of_tokens.sum().item() - delta.item())
    return IntegratedGradientsAgreement(
        *correlate_rows(contributions, attributions.abs(), trace.real.cpu()),
        incompleteness,
        contributions,
        attributions,
    )


def _embeddings(reader: PreTrainedModel, inputs: Mapping[str, Any]) -> nn.Module:
    """The embedding module of a model."""
    if inputs.get("input_ids") is None:
        raise ValueError("batch has no input_ids, which the baseline of integrated gradients needs.")
    embeddings = getattr(reader, "embeddings", None)
    if not isinstance(embeddings, nn.Module):
        raise ValueError(
            f"{type(reader).__name__} has no module `embeddings`, to whose output integrated gradients attribute; "
            "pass an encoder such as BERT."
        )
    return embeddings


def _baseline_id(reader: PreTrainedModel, baseline_id: int | None) -> int:
    size = reader.get_input_embeddings().num_embeddings
    found = getattr(reader.config, "pad_token_id", None) if baseline_id is None else baseline_id
    if found is None:
        raise ValueError(f"{type(reader).__name__} names no padding token; give a baseline_id below {size}.")
    if not is_integer(found) or not 0 <= found < size:
        raise ValueError(f"baseline_id must be a token of the model, from 0 to {size - 1}, got {found!r}.")
    return int(found)


def _check_indices(trace: AttentionTrace, layer: int, position: int) -> None:
    count = len(trace.calls)
    if not is_integer(layer) or not -count <= layer < count:
        raise ValueError(f"layer must be one of {count} layers, got {layer!r}.")
    if not trace.calls[layer].layer.heads:
        raise ValueError(f"layer {layer} has no heads left; choose another.")
    shortest = min((len(tokens) for _, tokens in trace.sentences()), default=0)
    if not is_integer(position) or not -shortest <= position < shortest:
        raise ValueError(f"position must be a token of every sentence, and one has {shortest}, got {position!r}.")


def _head_outputs(view: ModelView, trace: AttentionTrace, layer: int) -> Callable[..., torch.Tensor]:
    """A function that runs a view and returns the head outputs of a layer, `(batch, length, heads * head_dim)`."""
    projections = [call.layer.output for call in trace.calls[: layer % len(trace.calls) + 1]]
    earlier = projections.count(projections[-1]) - 1  # a module may serve several layers (ALBERT)
    outputs: list[torch.Tensor] = []

    def run(**arguments: Any) -> torch.Tensor:
        outputs.clear()
        view.root(**arguments)
        return outputs[earlier]

    view.before(projections[-1], lambda module, args, kwargs: outputs.append(args[0]))
    return run


def _check_alone(outputs: torch.Tensor, within_batch: torch.Tensor, sentence: int) -> None:
    """Checks that the head outputs of a sentence are the same within the batch and alone."""
    distance = torch.dist(outputs.float(), within_batch.float()) / within_batch.float().norm()
    # Rounding errors are smaller, effects of shifted positions larger.
    if distance > 1e-2:
        raise ValueError(
            f"head outputs of sentence {sentence} of the batch depend on padding: pad on the right, since padding on "
            "the left shifts absolute positions."
        )


def _along(
    output: torch.Tensor, run: Callable[..., torch.Tensor], others: Mapping[str, torch.Tensor], position: int
) -> Callable[..., torch.Tensor]:
    """F of a sentence as a function of its ids and its other arguments in order: ⟨o, u⟩ of shape `(batch,)`."""
    direction = nn.functional.normalize(output, dim=-1)

    def along(ids: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return run(input_ids=ids, **dict(zip(others, values)))[:, position] @ direction

    return along
