# Licensed under the Apache License, Version 2.0.
"""Outputs of headwise models: those of the stock models, and what heads add to the loss."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput
from transformers.utils import ModelOutput


@dataclass
class HeadLosses:
    """Differentiable scalars, float32 (float64 in double precision); absent unless asked for.

    Args:
        guidance_loss (`torch.FloatTensor`, *optional*): See [`HeadwiseConfigMixin`] for its reduction.
        gate_penalty (`torch.FloatTensor`, *optional*): Expected number of open gates.
        task_losses (`dict[str, torch.FloatTensor]`, *optional*): The terms of `loss` by name, before their weights,
            of models with several, where `num_items_in_batch` is given.
        task_loss (`torch.FloatTensor`, *optional*): `loss` before weighted head losses were added, where any were;
            detached.
    """

    guidance_loss: torch.FloatTensor | None = None
    gate_penalty: torch.FloatTensor | None = None
    task_losses: dict[str, torch.FloatTensor] | None = None
    task_loss: torch.FloatTensor | None = None


@dataclass
class HeadwiseModelOutput(HeadLosses, BaseModelOutputWithPoolingAndCrossAttentions):
    pass


@dataclass
class HeadwiseModelOutputWithoutPooling(HeadLosses, BaseModelOutputWithPastAndCrossAttentions):
    pass


@dataclass
class HeadwiseSeq2SeqModelOutput(HeadLosses, Seq2SeqModelOutput):
    pass


@dataclass
class HeadwiseMaskedLMOutput(HeadLosses, MaskedLMOutput):
    pass


@dataclass
class HeadwiseSequenceClassifierOutput(HeadLosses, SequenceClassifierOutput):
    pass


@dataclass
class HeadwiseTokenClassifierOutput(HeadLosses, TokenClassifierOutput):
    pass


@dataclass
class HeadwiseQuestionAnsweringOutput(HeadLosses, QuestionAnsweringModelOutput):
    pass


@dataclass
class HeadwisePreTrainingOutput(HeadLosses, BertForPreTrainingOutput):
    pass


@dataclass
class HeadwiseElectraPreTrainingOutput(HeadLosses, ElectraForPreTrainingOutput):
    pass


@dataclass
class HeadwiseSeq2SeqLMOutput(HeadLosses, Seq2SeqLMOutput):
    pass


HEADWISE_OUTPUTS: dict[type[ModelOutput], type[ModelOutput]] = {
    cls.__bases__[1]: cls
    for cls in (
        HeadwiseModelOutput,
        HeadwiseModelOutputWithoutPooling,
        HeadwiseSeq2SeqModelOutput,
        HeadwiseMaskedLMOutput,
        HeadwiseSequenceClassifierOutput,
        HeadwiseTokenClassifierOutput,
        HeadwiseQuestionAnsweringOutput,
        HeadwisePreTrainingOutput,
        HeadwiseElectraPreTrainingOutput,
        HeadwiseSeq2SeqLMOutput,
    )
}


@cache
def headwise_output(output_class: type[ModelOutput]) -> type[ModelOutput]:
    """The class of outputs that has the fields of another and those of [`HeadLosses`]; one that has them stays."""
    if issubclass(output_class, HeadLosses):
        return output_class
    if output_class in HEADWISE_OUTPUTS:
        return HEADWISE_OUTPUTS[output_class]
    return dataclass(type(f"Headwise{output_class.__name__}", (HeadLosses, output_class), {}))


def with_head_losses(outputs: ModelOutput, losses: dict[str, Any]) -> ModelOutput:
    """The same output with fields of [`HeadLosses`]."""
    return headwise_output(type(outputs))(**outputs, **losses)


def with_loss(outputs: ModelOutput, loss: torch.Tensor) -> ModelOutput:
    """The same output with this loss, in its place at the front."""
    return type(outputs)(**{**outputs, "loss": loss})
