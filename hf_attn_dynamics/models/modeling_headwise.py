# Licensed under the Apache License, Version 2.0.
"""What turns a stock Transformers model into a headwise one: a mixin, its outputs, and exact loss normalisation."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import initialization
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

from .compat import attention_kernel, ignore_left_over, keep_in_single_precision
from .hard_coded_attention import GaussianAttention, Unprojected
from .head_gates import HardConcreteGate, gate_penalty
from .head_guidance import GuidanceTargets, Tokens
from .head_pruning import apply_pruned_heads, separate_configuration
from .head_roles import locate_heads, roles_of
from .head_sites import HeadSite
from .headwise_arguments import OWN_ARGUMENTS, PACKING_ARGUMENTS, headwise_forward
from .headwise_attention import HeadwiseCall, install_headwise_attention, kernel_name
from .input_checks import can_check, check_integers, check_labels, check_text
from .precision import at_least_single
from .pruned_attention import given_cache
from .pruned_checkpoints import check_heads_fit
from .resizing import check_new_sizes, new_size
from .size_limits import LimitedModelMixin, check_folder
from .token_mask import IGNORED, check_mask, is_labelled, labels_of_tokens, non_padding_ids


# ---------------------------------------------------------------------------------------------------------------------
# Outputs: the stock ones and what heads add to the loss
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class HeadLosses:
    """Differentiable scalars, float32 (float64 in double precision); absent unless asked for.

    Args:
        guidance_loss (`torch.FloatTensor`, *optional*): See [`HeadwiseConfigMixin`] for its reduction.
        gate_penalty (`torch.FloatTensor`, *optional*): Expected number of open gates.
        task_losses (`dict[str, torch.FloatTensor]`, *optional*): The terms of `loss` by name, before their weights,
            of models with several, where `num_items_in_batch` is given.
    """

    guidance_loss: torch.FloatTensor | None = None
    gate_penalty: torch.FloatTensor | None = None
    task_losses: dict[str, torch.FloatTensor] | None = None


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


_HEADWISE_OUTPUTS: dict[type[ModelOutput], type[ModelOutput]] = {
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


# ---------------------------------------------------------------------------------------------------------------------
# Task losses
# ---------------------------------------------------------------------------------------------------------------------


class LossTerm(NamedTuple):
    """One term of a head's task loss.

    Args:
        name (`str`): Name in logs.
        labels (`str`): Column of its labels.
        logits (`str`): Output they are compared with.
        kind (`str`): What the labels are: `class`, -100 where there is none; `binary`, 0 or 1 for each real token,
            -100 where there is none; `position` in the sentence, past its end for answers that were cut off; or
            `problem`, as the configuration's `problem_type` says. `token`: as `class`, and the output is each token's
            loss already.
        weight (`float`): Factor in the loss.
        made (`bool`): Whether the model makes the labels itself: they are a column of its output, not of the batch.
        classes (`str` or `int`, *optional*): Number of classes, or the value of the configuration that is it; labels
            that are none of them are refused.
    """

    name: str
    labels: str
    logits: str
    kind: str = "class"
    weight: float = 1.0
    made: bool = False
    classes: str | int | None = None


def _with_loss(outputs: ModelOutput, loss: torch.Tensor) -> ModelOutput:
    """The same output with this loss, in its place at the front."""
    return type(outputs)(**{**outputs, "loss": loss})


# ---------------------------------------------------------------------------------------------------------------------
# The mixin
# ---------------------------------------------------------------------------------------------------------------------


class HeadwiseMixin(LimitedModelMixin):
    """Makes a stock Transformers model headwise: `class HeadwiseX(HeadwiseMixin, X)`.

    Parameter names stay those of the stock class, so that checkpoints load in both directions. The forward pass takes
    what the stock one takes, refuses keywords that the stock one, or the kernel, would ignore, and has these arguments
    of its own:

    Args:
        output_guidance_loss (`bool`, *optional*): Return `guidance_loss`, a differentiable float32 scalar, reduced as
            `config.guidance["reduction"]` says. Padding does not change it.
        guidance_weight (`float` or `torch.Tensor`, *optional*): α; adds `α · guidance_loss` to `loss`, and returns
            `guidance_loss` too.
        guidance_rows (`torch.BoolTensor` of shape `(batch, target length)`, *optional*): Where neither `labels` nor
            `decoder_attention_mask` is given to an encoder–decoder: rows of the decoder, and of its cross-attention,
            that the guidance loss is the mean over, all of them by default.
        output_gate_penalty (`bool`, *optional*): Return `gate_penalty`, the expected number of open gates.
        gate_penalty_weight (`float` or `torch.Tensor`, *optional*): λ; adds `λ · gate_penalty` to `loss`, and returns
            `gate_penalty` too.
        gate_noise (`torch.Tensor` of shape `(gates,)`, *optional*): Uniform numbers for all gates in the order of
            `head_gates()`, in training mode; drawn from the global generator if not given.
        num_items_in_batch (`int`, `torch.Tensor` or `dict`, *optional*): Number of labels that are not ignored in the
            whole accumulated batch, over all processes; a dictionary gives it for each label column. The task loss is
            then the sum over this batch divided by that number, so that summing over micro-batches gives the mean
            over the whole; without it, the mean over this batch. The guidance loss is always the mean over the
            sentences of this batch.

    `output_attentions=True` returns the weights that multiply the values, as in stock models: in training mode those
    after dropout, some of which are 0 and the others scaled up. Call `model.eval()` for the softmax itself, or
    `attention_maps` of the package, which does so by itself.

    Raises:
        TypeError: for keywords that the stock forward pass or the kernel would ignore.
        ValueError: if the guidance loss or the gate penalty is asked for and the model has no guidance or no gates, a
            weight comes without labels, `guidance_rows` come without guidance of an encoder–decoder, or the input is
            longer than the position embeddings. Also for batches without a sentence or a token, masks of another
            shape, and tokens, token types, positions and labels that the model has none of; such values are looked at
            on CPUs only, see [`check_integers`].
    """

    # The model divides its loss by the count that a trainer hands in.
    accepts_loss_kwargs = True
    loss_terms: ClassVar[tuple[LossTerm, ...]] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        stock_forward = getattr(cls, "forward", None)
        if "forward" not in vars(cls) and stock_forward and not getattr(stock_forward, "is_headwise", False):
            cls.forward = headwise_forward(stock_forward)

    def post_init(self):
        """Checks the configuration once more, since values may have been assigned to it; then takes over attention,
        fixes it where it is hard-coded, adds gates and cuts out the heads that are gone, before any weight is set or
        loaded."""
        if not hasattr(self.config, "check_heads"):
            raise TypeError(
                f"{type(self).__name__} needs a {self.config_class.__name__}, got {type(self.config).__name__}; "
                f"{self.config_class.__name__}.from_pretrained() turns one into the other."
            )
        self.config.check_heads()
        install_headwise_attention((layer.module, layer.site) for layer in locate_heads(self))
        self._install_hard_coded_attention()
        apply_pruned_heads(self)
        self._install_gates()
        super().post_init()

    def _install_hard_coded_attention(self) -> None:
        """Takes queries and keys away where the configuration fixes attention; checkpoints may still have them."""
        settings, dropped = self.config.hard_coded_settings(), set()
        for layer in locate_heads(self):
            if layer.site.kind in settings:
                layer.module.hard_coded = GaussianAttention(**settings[layer.site.kind], num_heads=layer.num_heads)
                for name in _score_projections(layer.module):
                    setattr(layer.module, name, Unprojected(layer.num_heads * layer.head_dim))
                    dropped.add(re.escape(f"{layer.name}.{name}."))
        if dropped:
            ignore_left_over(self, dropped)

    def _install_gates(self) -> None:
        """Gives a gate to every attention module that the configuration has one for."""
        settings = self.config.gate_settings()
        for layer in locate_heads(self):
            if layer.site.kind in settings and getattr(layer.module, "gate", None) is None:
                gate = HardConcreteGate(layer.num_heads, settings[layer.site.kind])
                if len(layer.heads) < layer.num_heads:
                    gate.keep(layer.heads)
                beside = next(layer.module.parameters(), next(self.parameters()))
                layer.module.gate = gate.train(layer.module.training).to(beside.device)
        if settings:
            # Never in half precision, so that FSDP2 needs them in another group than weights that are.
            keep_in_single_precision(self, ["log_alpha"])

    def add_gates(self, gates: dict) -> "HeadwiseMixin":
        """Gives heads their gates now, as `gates` in the configuration would have from the start.

        Args:
            gates (`dict`): See [`HeadwiseConfigMixin`]; `{}` for the gates of the paper.

        Returns:
            the same model.

        Raises:
            ValueError: if the model has gates, or `gates` is not possible; nothing has been changed then.

        Example:
            >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertModel
            >>> model = HeadwiseBertModel(HeadwiseBertConfig(num_hidden_layers=2))
            >>> len(model.add_gates({}).head_gates())
            2
        """
        if gates is None:
            raise ValueError("gates must be a dictionary, {} for those of the paper, got None.")
        if self.config.gates is not None:
            raise ValueError(f"{type(self).__name__} has gates; prune_closed_gates() takes them away.")
        separate_configuration(self)
        try:
            self.config.gates = gates
            self.config.check_heads()
        except ValueError:
            self.config.gates = None
            raise
        self._install_gates()
        return self

    def initialize_weights(self):
        """Sets what was not loaded; the stock bodies inside know nothing of gates."""
        super().initialize_weights()
        for gate in self.head_gates().values():
            gate.reset_parameters(initialization)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Changes the number of tokens as the stock class does; all that depends on it follows.

        Raises:
            ValueError: before anything is changed, if an argument is no number of tokens, or padding or a token that
                guidance names would be gone.
        """
        embeddings = self.get_input_embeddings()
        if new_num_tokens is None and pad_to_multiple_of is None:
            return embeddings
        current = getattr(embeddings, "num_embeddings", self.config.vocab_size)
        # Padded here, since some stock classes resize a part of themselves to the number that was asked for.
        count = new_size(current, new_num_tokens, pad_to_multiple_of)
        sizes = {"vocab_size": count}
        if getattr(self.config, "share_encoder_decoder_embeddings", False):
            sizes["decoder_vocab_size"] = count
        check_new_sizes(self.config, "check_heads", **sizes)
        embeddings = super().resize_token_embeddings(count, mean_resizing=mean_resizing)
        output = self.get_output_embeddings()
        if output is not None and getattr(output, "bias", None) is not None and not self.config.tie_word_embeddings:
            for head in self.modules():
                # Heads such as BERT's hold the bias of their output layer twice. Where nothing is tied, those are two:
                # saved as one, it would be lost to the layer that reads it.
                if getattr(head, "decoder", None) is output:
                    head.bias = nn.Parameter(output.bias.detach().clone(), output.bias.requires_grad)
        return embeddings

    def head_gates(self) -> dict[HeadSite, HardConcreteGate]:
        """Gates of each site that has any, in the order of encoder, decoder and cross-attention, layer by layer."""
        found = {
            module.head_site: module.gate for module in self.modules() if getattr(module, "gate", None) is not None
        }
        return {site: found[site] for site in self.config.attention_sites() if site in found}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Loads a checkpoint as the stock class does, but never with random numbers in place of heads.

        Raises:
            FileNotFoundError: if there is no such folder.
            ValueError: if the weights of attention do not fit `config.pruned_heads` or `config.hard_coded`, or are
                damaged.
            RuntimeError: if other weights do not fit, and `ignore_mismatched_sizes` is not set.
        """
        path = pretrained_model_name_or_path
        check_folder(path)
        with_info = kwargs.pop("output_loading_info", False)
        ignored = kwargs.pop("ignore_mismatched_sizes", False)
        try:
            model, info = super().from_pretrained(
                path, *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"the weights in {path} are damaged, copy or download them again: {error}.") from error
        if path is not None:
            model._check_loaded_heads(path, info)
        for name, saved, built in sorted(info["mismatched_keys"]):
            if not ignored:
                raise RuntimeError(
                    f"{name} has shape {tuple(saved)} in {path}, but {tuple(built)} in {cls.__name__} with this "
                    "configuration; ignore_mismatched_sizes=True starts it from random numbers."
                )
        return (model, info) if with_info else model

    def _check_loaded_heads(self, path: Any, info: dict[str, Any]) -> None:
        """Refuses weights of attention that were cut otherwise than this model, or lack queries and keys."""
        missing = set(info["missing_keys"])
        for layer in locate_heads(self):
            scores = [f"{layer.name}.{name}.weight" for name in _score_projections(layer.module)]
            others = {f"{layer.name}.{name}.weight" for name in roles_of(layer.module).keys[1:]}
            if missing.issuperset(scores) and not others & missing:
                raise ValueError(
                    f"the weights in {path} are of hard-coded attention, without {scores[0]}: load them with the "
                    "hard_coded that they were saved with."
                )
        check_heads_fit(
            path,
            self,
            info["mismatched_keys"],
            missing if self.config.pruned_heads else (),
            record=f"pruned_heads {self.config.pruned_heads}",
            way_out=" To remove heads from a model, load it as it is and call prune_heads().",
        )

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Saves the model, with the code that brings it back where this package is not installed."""
        before = getattr(self.config, "auto_map", None)
        self.config.auto_map = self.config.code_map()
        # FSDP2 puts a class of PyTorch's before the model's own, whose code is to be saved.
        sharded = type(self)
        self.__class__ = next(cls for cls in sharded.__mro__ if not cls.__module__.startswith("torch."))
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.__class__ = sharded
            if before is None:
                del self.config.auto_map
            else:
                self.config.auto_map = before

    def _forward(self, stock_forward: Callable, **kwargs) -> ModelOutput | tuple:
        own = {name: kwargs.pop(name, None) for name in OWN_ARGUMENTS}
        guidance_weight, penalty_weight, num_items = (
            own[name] for name in ("guidance_weight", "gate_penalty_weight", "num_items_in_batch")
        )
        if kwargs.get("output_attentions") and kernel_name(self.config) not in ("eager", "sdpa"):
            raise ValueError(
                f"output_attentions=True needs attention weights, which {attention_kernel(self.config)!r} does not "
                "return; call model.set_attn_implementation('sdpa')."
            )
        missing = [name for name in self.label_columns if kwargs.get(name) is None]
        for name in ("guidance_weight", "gate_penalty_weight"):
            if own[name] is not None and (missing or not self.loss_terms):
                needed = f"pass {missing[0]}" if missing else f"{type(self).__name__} has none"
                output = "output_guidance_loss" if name == "guidance_weight" else "output_gate_penalty"
                raise ValueError(f"{name} adds to a task loss: {needed}, or ask for {output}=True.")
        if can_check():
            self._check_inputs(**kwargs)
            self._check_positions(**kwargs)
        guided = bool(own["output_guidance_loss"]) or guidance_weight is not None
        targets = [kwargs.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")]
        two_stacks = getattr(self.config, "is_encoder_decoder", False)
        # Guidance says so itself.
        if two_stacks and not guided and all(given is None for given in targets):
            raise ValueError(
                f"{type(self).__name__} has no target to read: give decoder_input_ids, decoder_inputs_embeds or, to a "
                "model with a head, labels."
            )
        if own["guidance_rows"] is not None and not (guided and self.config.is_encoder_decoder):
            raise ValueError(
                f"guidance_rows are given to {type(self).__name__}, but only the guidance loss of an "
                "encoder–decoder reads them: ask for output_guidance_loss=True, or leave them out."
            )
        penalised = bool(own["output_gate_penalty"]) or penalty_weight is not None
        accumulated = num_items is not None and bool(self.loss_terms) and not missing
        if not (guided or penalised or accumulated or own["gate_noise"] is not None):
            return stock_forward(self, **kwargs)

        gates = self._gates_for(penalised, own["gate_noise"])
        return_dict = kwargs.pop("return_dict", None)
        batch = kwargs
        if accumulated:
            # Divided by counts of the whole accumulated batch, the loss is formed here and not by the stock head.
            kwargs = self.without_labels(batch)
        call = HeadwiseCall(
            self._guidance_targets(guidance_rows=own["guidance_rows"], **batch) if guided else None,
            None if own["gate_noise"] is None else self._noise_by_site(gates, own["gate_noise"]),
        )
        outputs = stock_forward(self, headwise=call, return_dict=True, **kwargs)
        losses: dict[str, Any] = {}
        if accumulated:
            terms = self._accumulated_losses(outputs, batch, num_items)
            outputs = _with_loss(outputs, sum(term.weight * value for term, value in terms.items()))
            if len(terms) > 1:
                losses["task_losses"] = {term.name: value.detach() for term, value in terms.items()}
        if guided or penalised:
            anchor = next(value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point())
            if guided:
                losses["guidance_loss"] = call.guidance_loss(anchor)
            if penalised:
                losses["gate_penalty"] = gate_penalty(list(gates.values())).to(anchor.device)
        if losses:
            outputs = _HEADWISE_OUTPUTS.get(type(outputs), type(outputs))(**outputs, **losses)
        for weight, name in ((guidance_weight, "guidance_loss"), (penalty_weight, "gate_penalty")):
            if weight is not None:
                outputs = _with_loss(outputs, outputs.loss + weight * losses[name])
        if return_dict is None:
            return_dict = self.config.return_dict
        return outputs if return_dict else outputs.to_tuple()

    def _gates_for(self, penalised: bool, noise: torch.Tensor | None) -> dict[HeadSite, HardConcreteGate]:
        """All gates, if these arguments need them."""
        if not penalised and noise is None:
            return {}
        gates = self.head_gates()
        if not gates:
            wanted = "the gate penalty is asked for" if penalised else "gate_noise is given"
            raise ValueError(
                f"{wanted}, but {type(self).__name__} has no gates: load or build the model with gates={{}}, for "
                "instance."
            )
        return gates

    def _noise_by_site(
        self, gates: dict[HeadSite, HardConcreteGate], noise: torch.Tensor
    ) -> dict[HeadSite, torch.Tensor]:
        sizes = [len(gate.log_alpha) for gate in gates.values()]
        if noise.shape != (sum(sizes),):
            raise ValueError(
                f"gate_noise must have shape ({sum(sizes)},), one for each gate, got {tuple(noise.shape)}."
            )
        if not self.training:
            raise ValueError("gate_noise is given, but gates are only sampled in training; call model.train().")
        return dict(zip(gates, noise.split(sizes)))

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch that gives the same logits and no loss: label columns out, the decoder's input made from them."""
        labels = {term.labels: batch.get(term.labels) for term in self.loss_terms}
        inputs = {name: value for name, value in batch.items() if name not in labels}
        if getattr(self.config, "is_encoder_decoder", False) and labels.get("labels") is not None:
            if all(inputs.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds")):
                inputs["decoder_input_ids"] = self.prepare_decoder_input_ids_from_labels(labels["labels"])
            # As the stock classes do where they are given labels.
            inputs["use_cache"] = False
        return inputs

    def _check_inputs(self, **batch: Any) -> None:
        """Refuses what would fail deep inside, or in a GPU kernel: shapes on every device, values on CPUs."""
        two_stacks, cached = getattr(self.config, "is_encoder_decoder", False), given_cache(batch) is not None
        # The mask of a text that is cached in part is one of all of it.
        shape = self._check_text("", batch, masked=two_stacks or not cached)
        if two_stacks:
            encoded = batch.get("encoder_outputs")
            if encoded is not None:
                shape = encoded[0].shape[:2]
                check_mask("attention_mask", batch.get("attention_mask"), shape)
            self._check_target(shape, self._check_text("decoder_", batch, masked=not cached), batch.get("labels"))
        elif batch.get("encoder_hidden_states") is not None:
            shape = batch["encoder_hidden_states"].shape[:2]
            check_mask("encoder_attention_mask", batch.get("encoder_attention_mask"), shape)
        for name, (count, limit) in self._integer_limits().items():
            if batch.get(name) is not None:
                check_integers(name, batch[name], count, limit)
        for term in self.loss_terms:
            if not term.made and batch.get(term.labels) is not None:
                self._check_labels(term, batch)

    def _check_text(self, prefix: str, batch: dict[str, Any], masked: bool) -> torch.Size | None:
        """Checks the shapes of one text, and of its mask if it is `masked`; gives that of the text, if it is there."""
        names = (f"{prefix}input_ids", f"{prefix}inputs_embeds")
        name = next((name for name in names if batch.get(name) is not None), None)
        if name is None:
            return None
        text = batch[name]
        check_text(name, text)
        size = getattr(self.get_input_embeddings(), "embedding_dim", text.shape[-1])
        if name.endswith("embeds") and text.shape[-1] != size:
            raise ValueError(f"{name} must have shape (batch, length, {size}), got {tuple(text.shape)}.")
        if masked:
            check_mask(f"{prefix}attention_mask", batch.get(f"{prefix}attention_mask"), text.shape[:2])
        kinds = None if prefix else batch.get("token_type_ids")
        if kinds is not None and kinds.shape[-1:] != text.shape[1:2]:
            raise ValueError(
                f"token_type_ids must have shape {tuple(text.shape[:2])}, a number for each token, got "
                f"{tuple(kinds.shape)}."
            )
        return text.shape[:2]

    def _check_target(self, source: torch.Size | None, target: torch.Size | None, labels: torch.Tensor | None) -> None:
        """Refuses targets of other sentences than the source, and labels of another target."""
        if labels is not None:
            check_text("labels", labels)
            if target is not None and labels.shape != target:
                raise ValueError(
                    f"labels have shape {tuple(labels.shape)}, but the decoder reads {tuple(target)}; give one for "
                    "each token."
                )
            target = labels.shape
        if source is not None and target is not None and source[0] != target[0]:
            raise ValueError(
                f"the target has {target[0]} sentences, but the source has {source[0]}; each target is that of a "
                "source."
            )

    def _integer_limits(self) -> dict[str, tuple[int, str]]:
        """For each argument that picks rows of a table, their number and what the configuration calls it."""
        config = self.config
        # Not every model has token types; the table itself, which may have been exchanged, knows its words best.
        words = getattr(self.get_input_embeddings(), "num_embeddings", config.vocab_size)
        limits = {"input_ids": (words, "vocab_size")}
        if getattr(config, "type_vocab_size", None) is not None:
            limits["token_type_ids"] = (config.type_vocab_size, "type_vocab_size")
        if getattr(config, "is_encoder_decoder", False):
            limits["decoder_input_ids"] = (config.decoder_vocab_size, "decoder_vocab_size")
        else:
            limits["position_ids"] = (config.max_position_embeddings, "max_position_embeddings")
        return limits

    def _check_labels(self, term: LossTerm, batch: dict[str, Any]) -> None:
        """Refuses classes that a term of the loss does not have, and labels of another batch."""
        labels = batch[term.labels]
        if term.kind == "problem" and self._problem_type(labels) != "single_label_classification":
            return
        text = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
        if text is not None and not getattr(self.config, "is_encoder_decoder", False):
            sentences, tokens = len(text), text.shape[0] * text.shape[1]
            if labels.numel() not in (sentences, tokens):
                raise ValueError(
                    f"{term.labels} have shape {tuple(labels.shape)}, but the batch is {tuple(text.shape[:2])}; give "
                    "one for each of its sentences or tokens."
                )
        if term.kind == "binary":
            mask = batch.get("attention_mask")
            if mask is not None and (mask.shape, mask.device) == (labels.shape, labels.device):
                labels = labels_of_tokens(labels, mask)
            check_labels(labels.long(), 2, "the number of classes", term.labels)
        elif term.classes is not None:
            count = term.classes if isinstance(term.classes, int) else getattr(self.config, term.classes)
            limit = "the number of classes" if isinstance(term.classes, int) else term.classes
            check_labels(labels, count, limit, term.labels)

    def _check_positions(
        self, input_ids=None, inputs_embeds=None, position_ids=None, decoder_input_ids=None, labels=None, **kwargs: Any
    ) -> None:
        """Refuses sentences longer than the position embeddings, which would fail deep inside, or in a GPU kernel."""
        inputs = input_ids if input_ids is not None else inputs_embeds
        longest = self.config.max_positions()
        cache = given_cache(kwargs)
        past = 0 if cache is None else cache.get_seq_length()
        if isinstance(past, torch.Tensor):
            past = 0  # that of a static cache is on the device: asking would wait for it, which compiled code can not
        if getattr(self.config, "is_encoder_decoder", False):
            targets = (decoder_input_ids, kwargs.get("decoder_inputs_embeds"), labels)
            target = next((given for given in targets if given is not None), None)
            if target is not None and target.shape[1] + past > longest:
                raise ValueError(
                    f"the target has {target.shape[1] + past} tokens, but {type(self).__name__} has positions for "
                    f"{longest}; cut the target or split it, or generate fewer tokens."
                )
            # Both are not of the source.
            past, position_ids = 0, None
        if position_ids is not None or inputs is None or inputs.shape[1] + past <= longest:
            return
        # Some models give no positions to padding; only here is it worth waiting for the ids.
        length = inputs.shape[1] + past
        if longest != self.config.max_position_embeddings and input_ids is not None:
            length = int(non_padding_ids(input_ids, self.config.pad_token_id).sum(1).max()) + past
        if length > longest:
            raise ValueError(
                f"the input has {length} tokens, but {type(self).__name__} has positions for {longest} (its "
                f"max_position_embeddings is {self.config.max_position_embeddings}); cut the input or split it."
            )

    def _guidance_targets(self, **batch: Any) -> dict[str, GuidanceTargets]:
        """What guided heads are compared with in this batch, for each kind of site that has any."""
        settings = self.config.guidance_settings()
        if not settings:
            raise ValueError(
                "the guidance loss is asked for, but config.guidance is None: load or build the model with "
                'guidance={"fraction": 0.5}, for instance.'
            )
        if set(settings) != {"encoder"} and given_cache(batch) is not None:
            raise ValueError(
                "the guidance loss of a decoder is asked for, but with a cache it runs over a part of the target "
                "only: pass the whole target and no cache."
            )
        for name in PACKING_ARGUMENTS:
            if batch.get(name) is not None:
                raise ValueError(
                    f"the guidance loss is asked for with {name}, but it reads attention masks only: pass sentences "
                    "that are padded, not packed, and leave it out."
                )
        two_stacks = getattr(self.config, "is_encoder_decoder", False)
        sides = self._translated_tokens(settings, **batch) if two_stacks else self._own_tokens(settings, **batch)
        kept = self.config.kept_heads()
        targets = {}
        for kind in settings:
            positions = {
                layer: {name: [kept[HeadSite(kind, layer)].index(h) for h in heads] for name, heads in layout.items()}
                for layer, layout in self.config.guided_heads_left(settings[kind], kind, kept).items()
            }
            targets[kind] = GuidanceTargets(settings[kind], positions, **sides[kind])
        return targets

    def _own_tokens(
        self,
        settings: dict[str, dict],
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, Any]]:
        """Arguments of [`GuidanceTargets`] for each kind of site of a model that is one stack of layers."""
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        own = Tokens(input_ids, attention_mask, inputs.shape[:2], inputs.device)
        sides = {"encoder": {"keys": own}, "decoder": {"keys": own, "causal": True}}
        if "cross" in settings:
            if encoder_hidden_states is None:
                raise ValueError(
                    "the guidance loss of the cross site is asked for: pass the encoder_hidden_states that it attends "
                    "to."
                )
            source = Tokens(
                None,
                encoder_attention_mask,
                encoder_hidden_states.shape[:2],
                inputs.device,
                mask_name="encoder_attention_mask",
            )
            sides["cross"] = {"keys": source, "queries": own, "sentences": own.real().any(1)}
        return sides

    def _translated_tokens(
        self,
        settings: dict[str, dict],
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        guidance_rows: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, dict[str, Any]]:
        """Arguments of [`GuidanceTargets`] for each kind of site of an encoder–decoder."""
        if encoder_outputs is not None and "encoder" in settings:
            raise ValueError(
                "the guidance loss is asked for, but with encoder_outputs the encoder does not run: pass input_ids "
                "in their place."
            )
        encoded = None if encoder_outputs is None else encoder_outputs[0]
        inputs = next((given for given in (input_ids, inputs_embeds, encoded) if given is not None), None)
        if inputs is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        source = Tokens(input_ids, attention_mask, inputs.shape[:2], inputs.device)
        sides = {"encoder": {"keys": source}}
        if set(settings) == {"encoder"}:
            return sides
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        inputs = decoder_input_ids if decoder_input_ids is not None else decoder_inputs_embeds
        if inputs is None:
            raise ValueError("the guidance loss of a decoder is asked for: pass decoder_input_ids or labels.")
        target = Tokens(
            decoder_input_ids, decoder_attention_mask, inputs.shape[:2], inputs.device, "decoder_attention_mask"
        )
        # The first token of the decoder may be the one that pads.
        predicting = guidance_rows if labels is None else is_labelled(labels)
        if decoder_attention_mask is not None:
            predicting = None
        counted = None if predicting is None else predicting.to(inputs.device)
        rows = {"counted": counted, "sentences": source.real().any(1)}
        sides["decoder"] = {"keys": target, "causal": True, **rows}
        sides["cross"] = {"keys": source, "queries": target, **rows}
        return sides

    @property
    def label_columns(self) -> list[str]:
        """Columns of labels that a batch has to bring; empty without a head that learns."""
        return [term.labels for term in self.loss_terms if not term.made]

    def sentence_losses(
        self, outputs: ModelOutput, batch: dict[str, torch.Tensor]
    ) -> dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]:
        """Task loss of each sentence, term by term.

        Args:
            outputs (`ModelOutput`): Output of a forward pass, with logits.
            batch (`dict[str, torch.Tensor]`): Label columns, and the attention mask of the inputs.

        Returns:
            `dict[LossTerm, tuple[torch.Tensor, torch.Tensor]]`: for each term whose labels are given, the sum over
            the labels of each sentence and their number, both of shape `(batch,)`; ignored labels count nowhere. The
            stock loss is `Σ_terms weight · Σ sums / Σ counts`.
        """
        losses = {}
        given = {**batch, **outputs}
        for term in self.loss_terms:
            if given.get(term.labels) is None:
                continue
            logits = at_least_single(outputs[term.logits])
            target, ignored = self._target(term, given[term.labels], given)
            target = target.to(logits.device)
            size = len(logits)
            if term.kind == "token":
                loss, counts = logits, target.ne(ignored)
            elif term.kind == "binary":
                counts = target.ne(ignored)
                loss = _binary_cross_entropy(logits, target.clamp(min=0).to(logits), "none") * counts
            elif ignored is not None:
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, -2), target.flatten(), ignore_index=ignored, reduction="none"
                )
                counts = target.ne(ignored)
            else:
                mean_squares = self._problem_type(target) == "regression"
                elementwise = nn.functional.mse_loss if mean_squares else _binary_cross_entropy
                loss = elementwise(logits, target.view_as(logits).to(logits), reduction="none")
                counts = torch.ones_like(loss)
            losses[term] = loss.view(size, -1).sum(1), counts.view(size, -1).sum(1)
        return losses

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number of labels of a batch that are not ignored, for each label column it has.

        Args:
            batch (`dict[str, torch.Tensor]`): Inputs and labels of a forward pass.

        Returns:
            `dict[str, torch.Tensor]`: scalars, to be summed over micro-batches and processes, and handed to the
            forward pass as `num_items_in_batch`. Positions in sentences count only where the sentences are in the
            batch, too.
        """
        counts = {}
        has_inputs = any(batch.get(name) is not None for name in ("input_ids", "inputs_embeds"))
        for term in self.loss_terms:
            if batch.get(term.labels) is not None and (has_inputs or term.kind != "position"):
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
        if term.kind == "binary":
            labels = labels_of_tokens(labels, batch_or_outputs.get("attention_mask"))
        if term.kind == "problem" and self._problem_type(labels) != "single_label_classification":
            return labels, None
        return labels, IGNORED

    def _problem_type(self, labels: torch.Tensor) -> str:
        if self.config.problem_type is not None:
            return self.config.problem_type
        if self.config.num_labels == 1:
            return "regression"
        # As the stock loss tells them apart.
        is_single = labels.dtype in (torch.long, torch.int)
        return "single_label_classification" if is_single else "multi_label_classification"

    def _accumulated_losses(self, outputs: ModelOutput, batch: dict, num_items: Any) -> dict[LossTerm, torch.Tensor]:
        """This batch's part of each term of the loss, before its weight."""
        losses = self.sentence_losses(outputs, batch)
        counted = num_items if isinstance(num_items, dict) else {self.loss_terms[0].labels: num_items}
        if (first := self.loss_terms[0].labels) not in counted:
            raise ValueError(
                f"num_items_in_batch has no number of {first}, but {', '.join(map(str, counted)) or 'no key'}; "
                "count_labels() of the model gives what it needs."
            )
        parts = {}
        for term, (sums, counts) in losses.items():
            if term.labels in counted:
                whole = torch.as_tensor(counted[term.labels], device=sums.device)
            else:
                # Only the labels of the first term were counted: this one has the same share of the whole.
                first = self.loss_terms[0]
                whole = counts.sum() * counted[first.labels] / losses[first][1].sum().clamp(min=1)
            # A batch may be without any label.
            parts[term] = sums.sum() / whole.clamp(min=1)
        return parts


def _score_projections(module: nn.Module) -> tuple[str, ...]:
    """Names of an attention module's projections to queries and keys."""
    roles = roles_of(module)
    return (*roles.queries, *roles.keys[:1])


def _binary_cross_entropy(logits: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, target, reduction=reduction)
