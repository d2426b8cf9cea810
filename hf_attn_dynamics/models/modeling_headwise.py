# Licensed under the Apache License, Version 2.0.
"""What turns a stock Transformers model into a headwise one: a mixin, its outputs, and exact loss normalisation."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils import ModelOutput, TransformersKwargs

from .head_guidance import GuidanceTargets
from .headwise_attention import HeadSite, HeadwiseCall, install_headwise_attention


# ---------------------------------------------------------------------------------------------------------------------
# Outputs: the stock ones and the guidance loss (`torch.FloatTensor`, a scalar; absent unless asked for)
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class HeadwiseModelOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    guidance_loss: torch.FloatTensor | None = None


@dataclass
class HeadwiseMaskedLMOutput(MaskedLMOutput):
    guidance_loss: torch.FloatTensor | None = None


@dataclass
class HeadwiseSequenceClassifierOutput(SequenceClassifierOutput):
    guidance_loss: torch.FloatTensor | None = None


@dataclass
class HeadwiseTokenClassifierOutput(TokenClassifierOutput):
    guidance_loss: torch.FloatTensor | None = None


@dataclass
class HeadwiseQuestionAnsweringOutput(QuestionAnsweringModelOutput):
    guidance_loss: torch.FloatTensor | None = None


@dataclass
class HeadwisePreTrainingOutput(BertForPreTrainingOutput):
    guidance_loss: torch.FloatTensor | None = None


_HEADWISE_OUTPUTS: dict[type[ModelOutput], type[ModelOutput]] = {
    cls.__mro__[1]: cls
    for cls in (
        HeadwiseModelOutput,
        HeadwiseMaskedLMOutput,
        HeadwiseSequenceClassifierOutput,
        HeadwiseTokenClassifierOutput,
        HeadwiseQuestionAnsweringOutput,
        HeadwisePreTrainingOutput,
    )
}


# ---------------------------------------------------------------------------------------------------------------------
# Task losses
# ---------------------------------------------------------------------------------------------------------------------


class LossTerm(NamedTuple):
    """One term of a head's task loss.

    Args:
        name (`str`): Name in logs.
        labels (`str`): Column of its labels.
        logits (`str`): Output they are compared with.
        kind (`str`): What the labels are: `class`, -100 where there is none; `position` in the sentence, past its end
            for answers that were cut off; or `problem`, as the configuration's `problem_type` says.
        weight (`float`): Factor in the loss.
    """

    name: str
    labels: str
    logits: str
    kind: str = "class"
    weight: float = 1.0


def _with_loss(outputs: ModelOutput, loss: torch.Tensor) -> ModelOutput:
    """The same output with this loss, in its place at the front."""
    return type(outputs)(**{**outputs, "loss": loss})


# ---------------------------------------------------------------------------------------------------------------------
# The mixin
# ---------------------------------------------------------------------------------------------------------------------


def _keyword(name: str) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)


_OWN_ARGUMENTS = ("output_guidance_loss", "guidance_weight", "num_items_in_batch")
_ALWAYS_ALLOWED = {"return_dict", "past_key_values", *TransformersKwargs.__annotations__}


def _headwise_forward(stock_forward: Callable) -> Callable:
    """A model's forward with the headwise arguments in front of it, and with unknown keywords refused."""
    signature = inspect.signature(stock_forward)
    stock = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    named = [p for p in stock if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [p for p in stock if p.kind is inspect.Parameter.VAR_KEYWORD]
    names = [p.name for p in named]
    allowed = {*names, *_ALWAYS_ALLOWED, *_OWN_ARGUMENTS}

    @wraps(stock_forward)
    def forward(self, *args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__}.forward takes {len(names)} positional arguments, got {len(args)}.")
        kwargs.update(zip(names, args))
        for name in kwargs:
            if name not in allowed:
                raise TypeError(
                    f"{type(self).__name__}.forward has no argument {name!r}; it would be ignored. "
                    f"Its arguments are {', '.join([*names, *_OWN_ARGUMENTS])}."
                )
        return self._forward(stock_forward, **kwargs)

    own = [_keyword(name) for name in _OWN_ARGUMENTS if name not in names]
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[this, *named, *own, *rest])
    forward.is_headwise = True
    return forward


class HeadwiseMixin:
    """Makes a stock Transformers model headwise: `class HeadwiseX(HeadwiseMixin, X)`.

    Parameter names stay those of the stock class, so that checkpoints load in both directions. The forward pass takes
    what the stock one takes, refuses keywords that the stock one would ignore, and has these arguments of its own:

    Args:
        output_guidance_loss (`bool`, *optional*): Return `guidance_loss`, a differentiable float32 scalar, reduced as
            `config.guidance["reduction"]` says. Padding does not change it.
        guidance_weight (`float` or `torch.Tensor`, *optional*): α; adds `α · guidance_loss` to `loss`, and returns
            `guidance_loss` too.
        num_items_in_batch (`int`, `torch.Tensor` or `dict`, *optional*): Number of labels that are not ignored in the
            whole accumulated batch, over all processes; a dictionary gives it for each label column. The task loss is
            then the sum over this batch divided by that number, so that summing over micro-batches gives the mean
            over the whole; without it, the mean over this batch. The guidance loss is always the mean over the
            sentences of this batch.

    Raises:
        TypeError: for keywords that the stock forward pass would ignore.
        ValueError: if the guidance loss is asked for and the model has no guidance, a weight comes without labels, or
            the input is longer than the position embeddings.
    """

    # The model divides its loss by the count that a trainer hands in.
    accepts_loss_kwargs = True
    # Attention class -> kind of the site; set by each architecture.
    attention_kinds: ClassVar[dict[type[nn.Module], str]] = {}
    loss_terms: ClassVar[tuple[LossTerm, ...]] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        stock_forward = getattr(cls, "forward", None)
        if "forward" not in vars(cls) and stock_forward and not getattr(stock_forward, "is_headwise", False):
            cls.forward = _headwise_forward(stock_forward)

    def post_init(self):
        """Checks the configuration once more, since values may have been assigned to it, and takes over attention."""
        if not hasattr(self.config, "check_guidance"):
            raise TypeError(
                f"{type(self).__name__} needs a {self.config_class.__name__}, got {type(self.config).__name__}; "
                f"{self.config_class.__name__}.from_pretrained() turns one into the other."
            )
        self.config.check_guidance()
        install_headwise_attention(
            (module, HeadSite("decoder" if kind == "encoder" and self.config.is_decoder else kind, module.layer_idx))
            for module in self.modules()
            for cls, kind in self.attention_kinds.items()
            if isinstance(module, cls)
        )
        super().post_init()

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Saves the model, with the code that brings it back where this package is not installed."""
        before = getattr(self.config, "auto_map", None)
        heads = next(
            sys.modules[cls.__module__].AUTO_CLASSES
            for cls in type(self).__mro__
            if hasattr(sys.modules[cls.__module__], "AUTO_CLASSES")
        )
        self.config.auto_map = {
            auto: f"{head.__module__.rpartition('.')[2]}.{head.__name__}" for auto, head in heads.items()
        }
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            if before is None:
                del self.config.auto_map
            else:
                self.config.auto_map = before

    def _forward(self, stock_forward: Callable, **kwargs) -> ModelOutput | tuple:
        output_guidance_loss, guidance_weight, num_items = (kwargs.pop(name, None) for name in _OWN_ARGUMENTS)
        if kwargs.get("output_attentions") and self.config._attn_implementation not in ("eager", "sdpa", None):
            raise ValueError(
                f"output_attentions=True needs attention weights, which {self.config._attn_implementation!r} does not "
                "return; call model.set_attn_implementation('sdpa')."
            )
        missing = [term.labels for term in self.loss_terms if kwargs.get(term.labels) is None]
        if guidance_weight is not None and (missing or not self.loss_terms):
            needed = f"pass {missing[0]}" if missing else f"{type(self).__name__} has none"
            raise ValueError(f"guidance_weight adds to a task loss: {needed}, or ask for output_guidance_loss=True.")
        if not torch.compiler.is_compiling():
            self._check_positions(**kwargs)
        guided = bool(output_guidance_loss) or guidance_weight is not None
        accumulated = num_items is not None and bool(self.loss_terms) and not missing
        if not guided and not accumulated:
            return stock_forward(self, **kwargs)

        return_dict = kwargs.pop("return_dict", None)
        # Divided by counts of the whole accumulated batch, the loss is formed here and not by the stock head.
        labels = {term.labels: kwargs.pop(term.labels) for term in self.loss_terms} if accumulated else {}
        call = HeadwiseCall(self._guidance_targets(**kwargs) if guided else None)
        outputs = stock_forward(self, headwise=call, return_dict=True, **kwargs)
        if accumulated:
            outputs = _with_loss(outputs, self._accumulated_loss(outputs, labels, num_items))
        if guided:
            anchor = next(value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point())
            guidance_loss = call.guidance_loss(anchor)
            outputs = _HEADWISE_OUTPUTS[type(outputs)](**outputs, guidance_loss=guidance_loss)
            if guidance_weight is not None:
                outputs = _with_loss(outputs, outputs.loss + guidance_weight * guidance_loss)
        if return_dict is None:
            return_dict = self.config.return_dict
        return outputs if return_dict else outputs.to_tuple()

    def _check_positions(self, input_ids=None, inputs_embeds=None, position_ids=None, **kwargs: Any) -> None:
        """Refuses sentences longer than the position embeddings, which would fail deep inside, or in a GPU kernel."""
        inputs = input_ids if input_ids is not None else inputs_embeds
        longest = self.config.max_positions()
        if position_ids is not None or inputs is None or inputs.shape[1] <= longest:
            return
        # Some models give no positions to padding; only here is it worth waiting for the ids.
        length = inputs.shape[1]
        if longest != self.config.max_position_embeddings and input_ids is not None:
            length = int(input_ids.ne(self.config.pad_token_id).sum(1).max())
        if length > longest:
            raise ValueError(
                f"the input has {length} tokens, but {type(self).__name__} has positions for {longest} (its "
                f"max_position_embeddings is {self.config.max_position_embeddings}); cut the input or split it."
            )

    def _guidance_targets(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> GuidanceTargets:
        if self.config.guidance is None:
            raise ValueError(
                "the guidance loss is asked for, but config.guidance is None: load or build the model with "
                'guidance={"fraction": 0.5}, for instance.'
            )
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        return GuidanceTargets(
            self.config.guidance,
            self.config.guided_heads(),
            input_ids,
            attention_mask,
            shape=inputs.shape[:2],
            device=inputs.device,
        )

    def sentence_losses(
        self, outputs: ModelOutput, labels: dict[str, torch.Tensor]
    ) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
        """Task loss of each sentence, term by term.

        Args:
            outputs (`ModelOutput`): Output of a forward pass, with logits.
            labels (`dict[str, torch.Tensor]`): Label columns, by name.

        Returns:
            `dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]`: for each term whose labels are given, the sum over
            the labels of each sentence and their number, both of shape `(batch,)`; ignored labels count nowhere. The
            stock loss is `Σ_terms weight · Σ sums / Σ counts`.
        """
        losses = {}
        for term in self.loss_terms:
            if labels.get(term.labels) is None:
                continue
            logits = outputs[term.logits].float()
            target, ignored = self._target(term, labels[term.labels].to(logits.device), outputs)
            batch = len(logits)
            if ignored is not None:
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, -2), target.flatten(), ignore_index=ignored, reduction="none"
                )
                counts = target.ne(ignored)
            else:
                mean_squares = self._problem_type(target) == "regression"
                elementwise = nn.functional.mse_loss if mean_squares else _binary_cross_entropy
                loss = elementwise(logits, target.view_as(logits).float(), reduction="none")
                counts = torch.ones_like(loss)
            losses[term] = loss.view(batch, -1).sum(1), counts.view(batch, -1).sum(1)
        return losses

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number of labels of a batch that are not ignored, for each label column it has.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs and labels of a forward pass.

        Returns:
            `dict[str, torch.Tensor]`: scalars, to be summed over micro-batches and processes, and handed to the
            forward pass as `num_items_in_batch`.
        """
        counts = {}
        for term in self.loss_terms:
            if batch.get(term.labels) is not None:
                target, ignored = self._target(term, batch[term.labels], batch)
                counts[term.labels] = (torch.ones_like(target) if ignored is None else target.ne(ignored)).sum()
        return counts

    def _target(self, term: LossTerm, labels: torch.Tensor, batch_or_outputs: dict) -> tuple[torch.Tensor, int | None]:
        """Labels of a term as the stock loss takes them, and the one that is ignored (`None`: they are no classes)."""
        if term.kind == "position":
            inputs = next(
                batch_or_outputs[name]
                for name in (term.logits, "input_ids", "inputs_embeds")
                if batch_or_outputs.get(name) is not None
            )
            return labels.view(-1).clamp(0, inputs.shape[1]), inputs.shape[1]
        if term.kind == "problem" and self._problem_type(labels) != "single_label_classification":
            return labels, None
        return labels, -100

    def _problem_type(self, labels: torch.Tensor) -> str:
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"

    def _accumulated_loss(self, outputs: ModelOutput, labels: dict, num_items: Any) -> torch.Tensor:
        total = 0.0
        losses = self.sentence_losses(outputs, labels)
        counted = num_items if isinstance(num_items, dict) else {self.loss_terms[0].labels: num_items}
        for term, (sums, counts) in losses.items():
            if term.labels in counted:
                whole = torch.as_tensor(counted[term.labels], device=sums.device)
            else:
                # Only the labels of the first term were counted: this one has the same share of the whole.
                first = self.loss_terms[0]
                whole = counts.sum() * counted[first.labels] / losses[first][1].sum().clamp(min=1)
            # A batch may be without any label.
            total = total + term.weight * sums.sum() / whole.clamp(min=1)
        return total


def _binary_cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, target, reduction=reduction)
