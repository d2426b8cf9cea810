# Licensed under the Apache License, Version 2.0.
"""Outputs of headwise models: those of the stock models, and what heads add to the loss."""

from dataclasses import dataclass, fields
from threading import Lock
from typing import Any

import torch
from transformers import modeling_outputs
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


# Headwise output classes by the stock ones, as they are made.
_MADE: dict[type[ModelOutput], type[ModelOutput]] = {}
_MAKING = Lock()

# Names that are not the stock one with `Headwise` in front.
_OTHER_NAMES = {
    "HeadwiseModelOutput": "BaseModelOutputWithPoolingAndCrossAttentions",
    "HeadwiseModelOutputWithoutPooling": "BaseModelOutputWithPastAndCrossAttentions",
    "HeadwiseQuestionAnsweringOutput": "QuestionAnsweringModelOutput",
    "HeadwisePreTrainingOutput": "BertForPreTrainingOutput",
    "HeadwiseElectraPreTrainingOutput": "ElectraForPreTrainingOutput",
}


@torch.compiler.assume_constant_result
def headwise_output(stock: type[ModelOutput]) -> type[ModelOutput]:
    """The output class with the fields of [`HeadLosses`] before those of a stock one: the same object each time.

    Args:
        stock (`type[ModelOutput]`): The stock class; one that has these fields is returned as it is.

    Example:
        >>> from transformers.modeling_outputs import CausalLMOutputWithPast
        >>> output = headwise_output(CausalLMOutputWithPast)(guidance_loss=torch.tensor(1.0))
        >>> type(output).__name__, list(output)
        ('HeadwiseCausalLMOutputWithPast', ['guidance_loss'])
    """
    if issubclass(stock, HeadLosses):
        return stock
    with _MAKING:
        # Each is registered as a node of trees by its name, which is possible once.
        if stock not in _MADE:
            names = {"__module__": __name__, "__doc__": stock.__doc__, "__reduce__": _reduce, "stock_output": stock}
            _MADE[stock] = dataclass(type(f"Headwise{stock.__name__}", (HeadLosses, stock), names))
        return _MADE[stock]


def _reduce(outputs: ModelOutput) -> tuple:
    # By the stock class, which may lie in the file of a model that is not imported where outputs are read.
    return _output, (type(outputs).stock_output, *(getattr(outputs, field.name) for field in fields(outputs)))


def _output(stock: type[ModelOutput], *values: Any) -> ModelOutput:
    return headwise_output(stock)(*values)


def with_head_losses(outputs: ModelOutput, losses: dict[str, Any]) -> ModelOutput:
    """The same output with fields of [`HeadLosses`]."""
    return headwise_output(type(outputs))(**outputs, **losses)


def with_loss(outputs: ModelOutput, loss: torch.Tensor) -> ModelOutput:
    """The same output with this loss, in its place at the front."""
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
