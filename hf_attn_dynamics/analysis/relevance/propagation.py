# Licensed under the Apache License, Version 2.0.
"""Propagation of relevance through a model: the rule of each operation, and the predictions.

`heads.py` has the public functions, and `rules.py` the rules.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm
from torch.overrides import TorchFunctionMode
from tqdm.auto import tqdm
from transformers import ElectraForPreTraining, PreTrainedModel
from transformers.utils import ModelOutput, find_labels

from ...models.compat import ACT2CLS
from ...models.head_roles import HeadLayer, locate_heads
from ...models.ignored_labels import is_labelled
from ...models.precision import at_least_single
from ..model_parts import block_of
from ..model_views import ModelView, evaluation_view
from ..running import batches_of, is_seq2seq, real_tokens
from .rules import CENTRING, MATRIX, TOTAL, Linear, LinearMap, MatrixProduct, PassThrough, Product, Rule, Softmax


def _is_neuron(value: Any) -> bool:
    """Whether a value depends on the input; all other values are constants."""
    return torch.is_tensor(value) and value.requires_grad


def _pass_through(propagation: "Propagation", operation: Callable, inputs, *args, **kwargs):
    return PassThrough.apply(inputs, operation(inputs.detach(), *args, **kwargs))


def _softmax(propagation: "Propagation", operation: Callable, inputs, *args, dtype=None, **kwargs):
    # Many models request single precision, which would round double-precision relevance.
    dtype = None if dtype is None else torch.promote_types(dtype, inputs.dtype)
    if not propagation.rule.halves:
        return _pass_through(propagation, operation, inputs, *args, dtype=dtype, **kwargs)
    output = operation(inputs.detach(), *args, dtype=dtype, **kwargs)
    return Softmax.apply(inputs, output, kwargs.get("dim", args[0] if args else -1))


def _weighted(propagation: "Propagation", operation: Callable, inputs, weight, bias=None):
    return propagation.linear(inputs, weight.mT, bias)


def _bias_and_weighted(propagation: "Propagation", operation: Callable, bias, inputs, matrix):
    return propagation.linear(inputs, matrix, bias)


def _layer_normalized(
    propagation: "Propagation", operation: Callable, inputs, shape, weight=None, bias=None, eps=1e-5
):
    # weight · (inputs − mean) / σ + bias, with σ as a constant.
    if len(shape) > 1:
        raise propagation.no_rule(f"layer_norm over {len(shape)} dimensions")
    size, values = inputs.shape[-1], inputs.detach()
    scale = (values.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    weight = inputs.new_ones(size) if weight is None else weight
    coefficients = torch.stack([weight * (1 - 1 / size), -weight / size])
    output = layer_norm(values, shape, weight, bias, eps)
    scaled = PassThrough.apply(inputs, values * scale)
    return propagation.sums(scaled, bias, output, coefficients, CENTRING)


def _added(propagation: "Propagation", operation: Callable, first, second):
    neurons = [value for value in (first, second) if _is_neuron(value)]
    output = operation(*(value.detach() if _is_neuron(value) else value for value in (first, second)))
    constant = None
    if len(neurons) == 1:
        constant = torch.as_tensor(second if neurons[0] is first else first, dtype=output.dtype, device=output.device)
    summands = torch.stack([neuron.expand_as(output) for neuron in neurons])
    ones = summands.new_ones(len(summands), *[1] * output.dim())
    return propagation.sums(summands, constant, output, ones, TOTAL)


def _multiplied(propagation: "Propagation", operation: Callable, first, second):
    if _is_neuron(first) and _is_neuron(second):
        return Product.apply(*torch.broadcast_tensors(first, second), propagation.rule)
    neuron = first if _is_neuron(first) else second
    output = operation(*(value.detach() if _is_neuron(value) else value for value in (first, second)))
    return PassThrough.apply(neuron.expand_as(output), output)


def _divided(propagation: "Propagation", operation: Callable, first, second):
    if _is_neuron(second):
        raise propagation.no_rule("division by a neuron")
    return _multiplied(propagation, operation, first, second)


def _matrix_multiplied(propagation: "Propagation", operation: Callable, left, right):
    if not _is_neuron(right):
        return propagation.linear(left, right, None)
    if not _is_neuron(left):
        return propagation.linear(right.mT, left.mT, None).mT
    leading = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return MatrixProduct.apply(
        left.expand(*leading, *left.shape[-2:]), right.expand(*leading, *right.shape[-2:]), propagation.rule
    )


# Each takes the propagation, the operation and its arguments, at least one of which is a neuron.
OPERATION_RULES: dict[str, Callable] = {
    "add": _added,
    "addmm": _bias_and_weighted,
    "bmm": _matrix_multiplied,
    "div": _divided,
    "layer_norm": _layer_normalized,
    "linear": _weighted,
    "matmul": _matrix_multiplied,
    "mul": _multiplied,
    "softmax": _softmax,
    **dict.fromkeys(("gelu", "neg", "relu", "silu", "sigmoid", "tanh"), _pass_through),
}
# Operations that rearrange, select or convert neurons: their gradients pass relevance unchanged. Dropout is the
# identity in evaluation mode.
REARRANGEMENTS = {
    "cat", "chunk", "clone", "contiguous", "dropout", "expand", "flatten", "float", "getitem", "index_select",
    "permute", "reshape", "select", "split", "squeeze", "stack", "to", "transpose", "type", "unbind", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip
ACTIVATIONS = tuple({entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()})


def _is_elementwise(module: nn.Module) -> bool:
    """Whether a module propagates relevance like an activation: activations, and RMS norms with a constant scale."""
    return isinstance(module, ACTIVATIONS) or type(module).__name__.endswith(("RMSNorm", "T5LayerNorm"))


class Propagation(TorchFunctionMode):
    """Function mode that replaces operations on neurons by operations whose backward pass propagates relevance.

    Args:
        model (`PreTrainedModel`): The model.
        rule (`Rule`): The rule for sums and products.
        layers (iterable of `HeadLayer`): Layers whose inputs of the output projection are recorded.
        keep_constants (`bool`): Whether to record added constants.
        keep_entries (`bool`): Whether to record the inputs of the first layers.

    Attributes:
        contexts (`list[tuple[HeadLayer, torch.Tensor]]`): Inputs of the output projections, in order.
        inputs, constants (`list[torch.Tensor]`): Where relevance ends: embeddings, and added constants.
        entries (`dict[str, torch.Tensor]`): Inputs of the first layer of each stack, by kind of site.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rule: Rule,
        layers: Iterable[HeadLayer] = (),
        keep_constants: bool = False,
        keep_entries: bool = False,
    ):
        super().__init__()
        self.model, self.rule, self.keep_constants = model, rule, keep_constants
        self.contexts: list[tuple[HeadLayer, torch.Tensor]] = []
        self.inputs: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.entries: dict[str, torch.Tensor] = {}
        self._running: list[nn.Module] = []
        self._elementwise = 0  # nesting depth of activation modules
        present = [layer for layer in layers if layer.heads]
        self._expected = {layer.site for layer in present}
        self._view = self._prepared_view(present, keep_entries)

    def __torch_function__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._elementwise:
            return operation(*args, **kwargs)
        name = operation.__name__.removeprefix("__").removesuffix("__")
        if name == "embedding":
            return self._input(operation(*args, **kwargs))
        rule = OPERATION_RULES.get(name)
        if rule and any(map(_is_neuron, (*args, *kwargs.values()))):
            return rule(self, operation, *args, **kwargs)
        if name.endswith("_") and _is_neuron(args[0]):
            # In-place operations.
            raise self.no_rule(name)
        output = operation(*args, **kwargs)
        if name not in REARRANGEMENTS and any(map(_is_neuron, output if isinstance(output, tuple) else [output])):
            raise self.no_rule(name)
        return output

    def no_rule(self, operation: str) -> ValueError:
        """The error for an operation without a rule."""
        names = {module: name for name, module in self.model.named_modules()}
        module = self._running[-1] if self._running else self.model
        return ValueError(
            f"there is no rule for the operation {operation!r} in {type(module).__name__} (at "
            f"{names.get(module) or 'the top'}), but for {', '.join(OPERATION_RULES)}; use head_importance() instead."
        )

    def _input(self, embedded: torch.Tensor) -> torch.Tensor:
        self.inputs.append(embedded.detach().requires_grad_())
        return self.inputs[-1]

    def sums(self, inputs, bias, output, coefficients, linear_map: LinearMap) -> torch.Tensor:
        """`output = linear_map(inputs, coefficients) + bias` as an operation that propagates relevance."""
        bias = output.new_zeros(()) if bias is None else bias
        bias = bias.detach().to(output.dtype).expand_as(output)
        if self.keep_constants:
            self.constants.append(bias.requires_grad_())
        return Linear.apply(inputs, bias, output, coefficients, linear_map, self.rule)

    def linear(self, inputs, matrix, bias) -> torch.Tensor:
        output = inputs.detach() @ matrix
        return self.sums(inputs, bias, output if bias is None else output + bias, matrix, MATRIX)

    def _prepared_view(self, layers: list[HeadLayer], keep_entries: bool) -> ModelView:
        """A view of the model in evaluation mode, with constant weights and hooks."""
        view = evaluation_view(self.model)
        view.name_attention(self.model, lambda part, before: "eager")
        view.detach_parameters()
        for module in self.model.modules():
            view.before(module, self._enter)
            view.after(module, self._leave)
        for layer in layers:
            view.before(layer.output, partial(self._keep, layer))
        for layer in locate_heads(self.model) if keep_entries else ():
            if layer.site.layer == 0 and layer.site.kind != "cross":
                view.before(block_of(self.model, layer), partial(self._keep_entry, layer.site.kind))
        return view

    def _keep(self, layer: HeadLayer, projection: nn.Module, inputs: tuple, keywords: dict) -> None:
        self.contexts.append((layer, inputs[0]))

    def _keep_entry(self, kind: str, block: nn.Module, inputs: tuple, keywords: dict) -> None:
        # One module may serve several layers.
        self.entries.setdefault(kind, inputs[0] if inputs else keywords["hidden_states"])

    def _enter(self, module: nn.Module, inputs: tuple, keywords: dict) -> None:
        self._running.append(module)
        self._elementwise += _is_elementwise(module)

    def _leave(self, module: nn.Module, inputs: tuple, output: Any) -> Any:
        self._running.pop()
        if _is_elementwise(module):
            self._elementwise -= 1
            if not self._elementwise and _is_neuron(inputs[0]):
                return PassThrough.apply(inputs[0], output.detach())
        return output

    def passes(
        self, batch: Mapping[str, Any] | Iterable[Mapping[str, Any]], chunk_size: int, progress: bool
    ) -> Iterator[tuple[torch.Tensor, Callable]]:
        """Backward passes, each for one prediction of each sentence or copy of a sentence.

        Returns:
            Iterator of `(select, backward)`: a boolean tensor of shape `(sentences, positions)` that selects at most
            one prediction per row, and a function that computes the relevance of given tensors.
        """
        found = False
        # Counts backward passes, since a batch can take minutes.
        with tqdm(desc="relevance", total=0, unit="pass", disable=not progress) as bar:
            for number, one in batches_of(batch, self.model, "relevance", argument="batch"):
                logits, counted = self._read(one, number)
                positions = counted.any(0).nonzero()[:, 0]
                if not len(positions):
                    continue
                copies = min(chunk_size, len(positions))
                if copies > 1:
                    logits, _ = self._read(_repeated(one, copies, len(counted)), number)
                groups = positions.split(chunk_size)
                bar.total += len(groups)
                for group in groups:
                    select = torch.zeros(copies, *counted.shape, dtype=torch.bool, device=counted.device)
                    select[range(len(group)), :, group] = counted[:, group].mT
                    select = select.flatten(0, 1)
                    found = True
                    yield select, partial(self._backward, logits, select, number)
                    bar.update()
        if not found:
            raise ValueError("batch has no prediction: no position is both a token and has a label other than -100.")

    def _read(self, batch: dict[str, Any], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-1 logits, (sentences, positions), and which of them are predictions."""
        for found in (self.contexts, self.inputs, self.constants, self.entries):
            found.clear()
        inputs = _with_positions(self.model, _without_labels(self.model, batch))
        inputs |= {k: self._input(v) for k, v in inputs.items() if k.endswith("inputs_embeds") and v is not None}
        with torch.enable_grad():
            with self:
                outputs = self._view.root(**inputs, return_dict=True)
            logits = _logits(self.model, outputs)
            counted = _counted(self.model, batch, logits)
            top = logits.gather(-1, logits.argmax(-1, keepdim=True)).view(counted.shape)
        if not logits.isfinite().all():
            raise ValueError(
                f"logits of batch {number} are not finite; check the weights, or use single precision, model.float()."
            )
        if silent := self._expected - {layer.site for layer, _ in self.contexts}:
            raise ValueError(
                f"batch {number} does not run the {min(silent, key=str)}; pass input_ids, and no encoder_outputs."
            )
        for layer, context in self.contexts:
            if len(context) != len(counted):
                raise ValueError(
                    f"{type(self.model).__name__} has logits for {len(counted)} sentences, but the {layer.site} reads "
                    f"{len(context)}; relevance does not support multiple choice."
                )
        if not logits.requires_grad:
            raise ValueError(
                f"logits of {type(self.model).__name__} do not depend on embeddings; relevance is for models that "
                "read tokens."
            )
        return top, counted

    def _backward(
        self, logits: torch.Tensor, select: torch.Tensor, number: int, wanted: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Relevance of tensors, given relevance 1 of all selected logits."""
        found = torch.autograd.grad(logits, wanted, select.to(logits), retain_graph=True, allow_unused=True)
        found = [
            at_least_single(torch.zeros_like(tensor) if relevance is None else relevance)
            for relevance, tensor in zip(found, wanted)
        ]
        if not all(relevance.isfinite().all() for relevance in found):
            raise ValueError(
                f"relevance of batch {number} is not finite; use a larger epsilon, rule='alpha_beta', or double "
                "precision, model.double()."
            )
        return found


def _with_positions(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Adds positions from the first token on, if a model with rotary embeddings reads padding on the left.

    Its logits depend on the distances of tokens only, but the shares of features in a score, which rules distribute,
    depend on positions.
    """
    mask = inputs.get("attention_mask")
    has_rotary = getattr(model.config.get_text_config(), "rope_parameters", None) is not None
    if not has_rotary or inputs.get("position_ids") is not None or not torch.is_tensor(mask) or mask.dim() != 2:
        return inputs
    if "position_ids" not in inspect.signature(model.forward).parameters or bool(mask[:, 0].all()):
        return inputs
    return {**inputs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def _without_labels(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a batch that are needed for logits, without the loss."""
    names = find_labels(type(model))
    inputs = {name: value for name, value in batch.items() if name not in names}
    if is_seq2seq(model):
        inputs["use_cache"] = False
        given = any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if not given and batch.get("labels") is not None and hasattr(model, "prepare_decoder_input_ids_from_labels"):
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    return inputs


def _logits(model: PreTrainedModel, outputs: ModelOutput) -> torch.Tensor:
    """Logits of shape (sentences, classes) or (sentences, positions, classes)."""
    logits = outputs.get("logits", outputs.get("prediction_logits"))
    if logits is None:
        if others := [name for name in outputs if name.endswith("_logits")]:
            raise ValueError(
                f"{type(model).__name__} returns {' and '.join(others)}, but relevance needs a single output, "
                "`logits`; question answering, for instance, is not supported."
            )
        raise ValueError(
            f"{type(model).__name__} returns no logits; load it with a task head, for instance by "
            "AutoModelForMaskedLM, AutoModelForSequenceClassification or AutoModelForSeq2SeqLM."
        )
    # ELECTRA's discriminator has one logit per token, not one per class.
    return logits[..., None] if isinstance(model, ElectraForPreTraining) else logits


def _counted(model: PreTrainedModel, batch: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """Which positions are predictions, (sentences, positions); sequence classifiers have one position."""
    if logits.dim() == 2:
        return torch.ones(len(logits), 1, dtype=torch.bool, device=logits.device)
    kind = "decoder" if is_seq2seq(model) else "encoder"
    counted = real_tokens(model, kind, batch, logits.shape[:2], logits.device)
    labels = batch.get("labels")
    if labels is not None and labels.shape == counted.shape:
        counted = counted & is_labelled(labels)
    return counted


def _repeated(batch: dict[str, Any], copies: int, size: int) -> dict[str, Any]:
    """A batch that repeats all sentences."""
    return {
        name: torch.cat([value] * copies) if torch.is_tensor(value) and value.dim() and len(value) == size else value
        for name, value in batch.items()
    }
