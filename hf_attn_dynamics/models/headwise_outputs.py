# Licensed under the Apache License, Version 2.0.
"""Outputs of headwise models: the stock outputs with guidance loss and gate penalty."""

from dataclasses import dataclass, fields
from threading import Lock
from typing import Any

import torch
from transformers import modeling_outputs
from transformers.utils import ModelOutput


@dataclass
class HeadLosses:
    """Losses of headwise models: scalars, float32 (float64 in double precision); absent unless requested.

    Args:
        guidance_loss (`torch.FloatTensor`, *optional*): See [`HeadwiseConfigMixin`] for its reduction.
        guidance_losses (`dict[str, torch.FloatTensor]`, *optional*): The summands of `guidance_loss`, by pattern or
            target, without the weights.
        gate_penalty (`torch.FloatTensor`, *optional*): Expected number of open gates.
        task_losses (`dict[str, torch.FloatTensor]`, *optional*): The unweighted terms of the task loss by name,
            detached, if there are several and `num_items_in_batch` is given.
        task_loss (`torch.FloatTensor`, *optional*): `loss` before weighted head losses were added, detached.
        guided_hits (`dict[str, torch.LongTensor]`, *optional*): By name of a target, for each sentence: the number of
            pairs of a guided head and a row whose strongest key is a target key, and of all pairs that count, of shape
            `(batch, 2)`.
    """

    guidance_loss: torch.FloatTensor | None = None
    gate_penalty: torch.FloatTensor | None = None
    task_losses: dict[str, torch.FloatTensor] | None = None
    task_loss: torch.FloatTensor | None = None
    guided_hits: dict[str, torch.LongTensor] | None = None
    guidance_losses: dict[str, torch.FloatTensor] | None = None


# Headwise output classes created so far, by stock class.
_MADE: dict[type[ModelOutput], type[ModelOutput]] = {}
_MAKING = Lock()

# Names that do not follow the stock name.
_OTHER_NAMES = {
    "HeadwiseModelOutput": "BaseModelOutputWithPoolingAndCrossAttentions",
    "HeadwiseModelOutputWithoutPooling": "BaseModelOutputWithPastAndCrossAttentions",
    "HeadwiseQuestionAnsweringOutput": "QuestionAnsweringModelOutput",
    "HeadwisePreTrainingOutput": "BertForPreTrainingOutput",
    "HeadwiseElectraPreTrainingOutput": "ElectraForPreTrainingOutput",
}


@torch.compiler.assume_constant_result
def headwise_output(stock: type[ModelOutput]) -> type[ModelOutput]:
    """Returns the output class with the fields of [`HeadLosses`] before those of a stock class, created once.

    Args:
        stock (`type[ModelOutput]`): The stock class; a class that already has these fields is returned unchanged.

    Example:
        >>> from transformers.modeling_outputs import CausalLMOutputWithPast
        >>> output = headwise_output(CausalLMOutputWithPast)(guidance_loss=torch.tensor(1.0))
        >>> type(output).__name__, list(output)
        ('HeadwiseCausalLMOutputWithPast', ['guidance_loss'])
    """
    if issubclass(stock, HeadLosses):
        return stock
    with _MAKING:
        # A class name can be registered only once as a pytree node.
        if stock not in _MADE:
            names = {"__module__": __name__, "__doc__": stock.__doc__, "__reduce__": _reduce, "stock_output": stock}
            _MADE[stock] = dataclass(type(f"Headwise{stock.__name__}", (HeadLosses, stock), names))
        return _MADE[stock]


def _reduce(outputs: ModelOutput) -> tuple:
    # By the stock class, whose module may not be imported where outputs are unpickled.
    return _output, (type(outputs).stock_output, *(getattr(outputs, field.name) for field in fields(outputs)))


def _output(stock: type[ModelOutput], *values: Any) -> ModelOutput:
    return headwise_output(stock)(*values)


def with_head_losses(outputs: ModelOutput, losses: dict[str, Any]) -> ModelOutput:
    """Adds fields of [`HeadLosses`] to an output."""
    return headwise_output(type(outputs))(**outputs, **losses)


def with_loss(outputs: ModelOutput, loss: torch.Tensor) -> ModelOutput:
    """Replaces the loss of an output."""
    return type(outputs)(**{**outputs, "loss": loss})


def __getattr__(name: str) -> type[ModelOutput]:
    made = next((cls for cls in _MADE.values() if cls.__name__ == name), None)
    if made is not None:
        return made
    stock_name = _OTHER_NAMES.get(name, name.removeprefix("Headwise"))
    stock = getattr(modeling_outputs, stock_name, None) if stock_name != name else None
    if stock_name == "BertForPreTrainingOutput":
        from transformers.models.bert.modeling_bert import BertForPreTrainingOutput as stock
    elif stock_name == "ElectraForPreTrainingOutput":
        from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput as stock
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return headwise_output(stock)
