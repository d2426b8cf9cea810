# Licensed under the Apache License, Version 2.0.
"""What turns a stock Transformers model into a headwise one: a mixin that goes before its class."""

import re
from collections.abc import Callable
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import initialization
from transformers.utils import ModelOutput

from .compat import attention_kernel, ignore_left_over, keep_in_single_precision
from .guidance_targets import GuidanceTargets, own_tokens, translated_tokens
from .hard_coded_attention import GaussianAttention, Unprojected
from .head_gates import HardConcreteGate, gate_penalty
from .head_losses import TaskLossMixin, add_head_losses, head_loss_parts, task_parts
from .head_pruning import apply_pruned_heads, separate_configuration
from .head_roles import locate_heads, roles_of
from .head_sites import HeadSite
from .headwise_arguments import OWN_ARGUMENTS, PACKING_ARGUMENTS, headwise_forward
from .headwise_attention import HeadwiseCall, install_headwise_attention, kernel_name
from .headwise_inputs import CheckedInputsMixin
from .headwise_outputs import with_head_losses, with_loss
from .input_checks import can_check
from .pruned_attention import given_cache
from .pruned_checkpoints import check_heads_fit
from .resizing import check_new_sizes, new_size
from .saved_code import is_of_this_package
from .size_limits import LimitedModelMixin, check_folder


class HeadwiseMixin(CheckedInputsMixin, TaskLossMixin, LimitedModelMixin):
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
            over the whole; without it, the mean over this batch. A dictionary may also have `sentences`, the number
            of sentences of the accumulated batch, and `forward_passes`, the number of forward passes that it is
            accumulated over: `guidance_loss` and `gate_penalty` are then parts to be summed, too. Without them the
            guidance loss is the mean over the sentences of this batch.

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

    def save_pretrained(self, *args, **kwargs):
        """Saves the model as the stock class does; its configuration, which saves the code, is left as it was."""
        before = getattr(self.config, "auto_map", None)
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            if before is not None:
                self.config.auto_map = before
            elif hasattr(self.config, "auto_map"):
                del self.config.auto_map

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Registers what others derive from these classes; the configuration of these saves their code."""
        if not is_of_this_package(cls):
            super().register_for_auto_class(auto_class)

    def _forward(self, stock_forward: Callable, **kwargs) -> ModelOutput | tuple:
        asked = {name: kwargs.pop(name) for name in OWN_ARGUMENTS if name in kwargs}
        if kwargs.get("output_attentions") and kernel_name(self.config) not in ("eager", "sdpa"):
            raise ValueError(
                f"output_attentions=True needs attention weights, which {attention_kernel(self.config)!r} does not "
                "return; call model.set_attn_implementation('sdpa')."
            )
        if can_check():
            self._check_shapes(**kwargs)
        two_stacks = getattr(self.config, "is_encoder_decoder", False)
        if not asked and not two_stacks:
            return self.run_checked(stock_forward, **kwargs)

        own = {**dict.fromkeys(OWN_ARGUMENTS), **asked}
        guidance_weight, penalty_weight, num_items = (
            own[name] for name in ("guidance_weight", "gate_penalty_weight", "num_items_in_batch")
        )
        missing = [name for name in self.label_columns if kwargs.get(name) is None]
        for name in ("guidance_weight", "gate_penalty_weight"):
            if own[name] is not None and (missing or not self.loss_terms):
                needed = f"pass {missing[0]}" if missing else f"{type(self).__name__} has none"
                output = "output_guidance_loss" if name == "guidance_weight" else "output_gate_penalty"
                raise ValueError(f"{name} adds to a task loss: {needed}, or ask for {output}=True.")
        guided = bool(own["output_guidance_loss"]) or guidance_weight is not None
        targets = [kwargs.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")]
        # Guidance says so itself.
        if two_stacks and not guided and all(given is None for given in targets):
            raise ValueError(
                f"{type(self).__name__} has no target to read: give decoder_input_ids, decoder_inputs_embeds or, to a "
                "model with a head, labels."
            )
        if own["guidance_rows"] is not None and not (guided and two_stacks):
            raise ValueError(
                f"guidance_rows are given to {type(self).__name__}, but only the guidance loss of an "
                "encoder–decoder reads them: ask for output_guidance_loss=True, or leave them out."
            )
        penalised = bool(own["output_gate_penalty"]) or penalty_weight is not None
        accumulated = num_items is not None and bool(self.loss_terms) and not missing
        if not (guided or penalised or accumulated or own["gate_noise"] is not None):
            return self.run_checked(stock_forward, **kwargs)

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
        outputs = self.run_checked(stock_forward, headwise=call, return_dict=True, **kwargs)
        anchor = next(value for value in outputs.values() if torch.is_tensor(value) and value.is_floating_point())
        losses: dict[str, Any] = {}
        if guided:
            losses["guidance_loss"] = call.guidance_loss(anchor)
        if penalised:
            losses["gate_penalty"] = gate_penalty(list(gates.values())).to(anchor.device)
        losses = head_loss_parts(losses, batch, num_items)
        loss = outputs.get("loss")
        if accumulated:
            parts = task_parts(self.sentence_losses(outputs, batch), num_items)
            loss = sum(term.weight * part for term, part in parts.items())
            if len(parts) > 1:
                losses["task_losses"] = {term.name: part.detach() for term, part in parts.items()}
        if guidance_weight is not None or penalty_weight is not None:
            losses["task_loss"] = loss.detach()
            loss = add_head_losses(loss, losses, guidance_weight, penalty_weight)
        if loss is not None:
            outputs = with_loss(outputs, loss)
        if losses:
            outputs = with_head_losses(outputs, losses)
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
        sides = translated_tokens(self, settings, **batch) if two_stacks else own_tokens(settings, **batch)
        kept = self.config.kept_heads()
        targets = {}
        for kind in settings:
            positions = {
                layer: {name: [kept[HeadSite(kind, layer)].index(h) for h in heads] for name, heads in layout.items()}
                for layer, layout in self.config.guided_heads_left(settings[kind], kind, kept).items()
            }
            targets[kind] = GuidanceTargets(settings[kind], positions, **sides[kind])
        return targets


def _score_projections(module: nn.Module) -> tuple[str, ...]:
    """Names of an attention module's projections to queries and keys."""
    roles = roles_of(module)
    return (*roles.queries, *roles.keys[:1])
