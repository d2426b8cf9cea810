# Licensed under the Apache License, Version 2.0.
"""Headwise ELECTRA: the discriminator, alone and trained jointly with its generator."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import ElectraForMaskedLM, ElectraForPreTraining, ElectraModel
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput

from .compat import ElectraDiscriminatorPredictions
from .configuration_headwise_electra import generator_config
from .head_losses import LossTerm
from .headwise_classes import HeadwiseElectraConfig, twin_class
from .headwise_classes import __getattr__ as __getattr__  # earlier module of the headwise ELECTRA classes
from .headwise_outputs import HeadLosses
from .ignored_labels import is_labelled
from .modeling_headwise import HeadwiseMixin
from .precision import at_least_single
from .token_mask import labels_of_tokens, non_padding


@dataclass
class HeadwiseElectraJointPreTrainingOutput(HeadLosses, ElectraForPreTrainingOutput):
    """Output of [`HeadwiseElectraForJointPreTraining`]; without labels it only has logits.

    Args:
        loss (`torch.FloatTensor`): `generator_loss + λ · discriminator_loss`, plus weighted head losses.
        logits (`torch.FloatTensor` of shape `(batch, length)`): Logits of the discriminator for "replaced".
        generator_loss (`torch.FloatTensor`): Mean over the labelled tokens.
        discriminator_loss (`torch.FloatTensor`): Mean over the non-padding tokens.
        generator_losses (`torch.FloatTensor` of shape `(batch, length)`): Loss of each token, 0 without a label.
        replaced (`torch.LongTensor` of shape `(batch, length)`): 1 replaced, 0 original, -100 padding.
    """

    generator_loss: torch.FloatTensor | None = None
    discriminator_loss: torch.FloatTensor | None = None
    generator_losses: torch.FloatTensor | None = None
    replaced: torch.LongTensor | None = None


class ElectraDiscriminator(ElectraForPreTraining):
    """The stock discriminator with a loss that ignores the label -100."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> ElectraForPreTrainingOutput | tuple[torch.Tensor, ...]:
        outputs = super().forward(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, return_dict=True, **kwargs
        )
        if labels is not None:
            counted = is_labelled(labels)
            if attention_mask is not None:
                counted = counted & non_padding(attention_mask, labels.shape)
            dtype = torch.promote_types(outputs.logits.dtype, torch.float32)
            outputs["loss"] = nn.functional.binary_cross_entropy_with_logits(
                outputs.logits[counted], labels[counted].to(dtype)
            )
            outputs = ElectraForPreTrainingOutput(**outputs)
        if return_dict is None:
            return_dict = self.config.return_dict
        return outputs if return_dict else outputs.to_tuple()


class HeadwiseDiscriminatorMixin(HeadwiseMixin):
    """ELECTRA's discriminator: predicts for each token whether it was replaced.

    Labels are 1 for replaced, 0 for original and -100 for ignored tokens. The loss is the mean over the tokens with
    labels whose attention mask is not 0; without an attention mask, padding is included. The stock Trainer counts
    labels without reading masks: label padding with -100.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadwiseElectraConfig, HeadwiseElectraForPreTraining
        >>> config = HeadwiseElectraConfig(
        ...     vocab_size=50, embedding_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        ...     intermediate_size=32, gates={},
        ... )
        >>> model = HeadwiseElectraForPreTraining(config)
        >>> outputs = model(torch.tensor([[5, 7, 8, 9, 6]]), output_gate_penalty=True)
        >>> outputs.logits.shape, round(outputs.gate_penalty.item(), 1)
        (torch.Size([1, 5]), 7.7)
    """


class ElectraForJointPreTraining(ElectraDiscriminator):
    """ELECTRA's discriminator and generator for joint pretraining, without headwise additions."""

    config_class = HeadwiseElectraConfig
    _tied_weights_keys = {
        **{
            f"generator.electra.embeddings.{kind}_embeddings.weight": f"electra.embeddings.{kind}_embeddings.weight"
            for kind in ("word", "position", "token_type")
        },
        "generator.generator_lm_head.weight": "electra.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: HeadwiseElectraConfig):
        # Skip the parent's, which ties weights at its end, when the generator must exist.
        super(ElectraForPreTraining, self).__init__(config)
        self.electra = ElectraModel(config)
        self.discriminator_predictions = ElectraDiscriminatorPredictions(config)
        self.generator = ElectraForMaskedLM(generator_config(config))
        self.post_init()

    def replace_tokens(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicts the masked tokens with the generator, and samples replacements from its predictions.

        The random number of each token is a hash of the masked sentence and the index of the token, in training and in
        evaluation. Samples therefore do not depend on padding, the rest of the batch or random states; another masking
        of the same sentence gives other samples.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Masked tokens.
            labels (`torch.LongTensor` of shape `(batch, length)`): Original tokens where masked, -100 elsewhere.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 at padding.
            inputs: Further inputs of the generator.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: the sentences with a sample at each label, and the generator's losses
            in nats, 0 without a label; both of shape `(batch, length)`. Samples are not differentiable.
        """
        hidden = self.generator.electra(input_ids, attention_mask=attention_mask, **inputs)[0]
        chosen = is_labelled(labels).nonzero(as_tuple=True)
        # Only at labels: the vocabulary is large.
        scores = self.generator.generator_lm_head(self.generator.generator_predictions(hidden[chosen]))
        scores = at_least_single(scores)
        losses = nn.functional.cross_entropy(scores, labels[chosen], reduction="none")
        with torch.no_grad():
            numbers = _uniform_numbers(input_ids, non_padding(attention_mask, input_ids.shape, input_ids.device))
            replaced_ids = input_ids.index_put(chosen, _draw(scores, numbers[chosen]))
        return replaced_ids, losses.new_zeros(labels.shape).index_put(chosen, losses)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> HeadwiseElectraJointPreTrainingOutput | tuple[torch.Tensor, ...]:
        more = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        own: dict[str, torch.Tensor] = {}
        if labels is not None:
            if input_ids is None:
                raise ValueError("labels are given without input_ids: tokens cannot be replaced in inputs_embeds.")
            replaced_ids, losses = self.replace_tokens(input_ids, labels, **more)
            is_other = (replaced_ids != _original(input_ids, labels)).long()
            replaced = labels_of_tokens(is_other, attention_mask)
            own = {"generator_losses": losses, "replaced": replaced}
            input_ids = replaced_ids
        outputs = super().forward(
            input_ids, **more, inputs_embeds=inputs_embeds, labels=own.get("replaced"), return_dict=True, **kwargs
        )
        if labels is not None:
            own["generator_loss"] = losses.sum() / is_labelled(labels).sum().clamp(min=1)
            own["discriminator_loss"] = outputs.loss
            own["loss"] = own["generator_loss"] + self.config.discriminator_weight * outputs.loss
        outputs = HeadwiseElectraJointPreTrainingOutput(**{**outputs, **own})
        if return_dict is None:
            return_dict = self.config.return_dict
        return outputs if return_dict else outputs.to_tuple()


class HeadwiseJointPreTrainingMixin(HeadwiseMixin):
    """ELECTRA's discriminator, trained together with the small generator that replaces tokens (Clark et al. 2020).

    Inputs are masked tokens, and labels are the original ones, -100 elsewhere, as from
    [`MaskedLanguageModelCollator`]. The generator predicts the masked tokens, samples from its predictions replace
    them, and the discriminator predicts which tokens were replaced. The loss is the generator's plus λ times the
    discriminator's; see [`HeadwiseElectraConfig`] for λ and the generator's sizes. Without labels, only the
    discriminator runs, on the input tokens.

    The generator shares its embeddings (words, positions, types, output) with the discriminator, unless
    `tie_word_embeddings` is false. Guidance, gates and pruning apply to the discriminator only. Patterns that attend
    to tokens (`period`) look for them in the original sentence.

    [`HeadwiseElectraForPreTraining`] and all Auto classes load checkpoints of this class without the generator;
    `get_discriminator` returns the discriminator without a checkpoint.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadwiseElectraConfig, HeadwiseElectraForJointPreTraining
        >>> config = HeadwiseElectraConfig(
        ...     vocab_size=50, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
        ...     intermediate_size=64, generator_settings={"num_hidden_layers": 1},
        ... )
        >>> model = HeadwiseElectraForJointPreTraining(config)
        >>> model.generator.config.hidden_size, model.generator.config.num_attention_heads
        (8, 2)
        >>> outputs = model(torch.tensor([[5, 4, 8, 9, 4]]), labels=torch.tensor([[-100, 7, -100, -100, 6]]))
        >>> bool(outputs.loss == outputs.generator_loss + 50 * outputs.discriminator_loss)
        True
    """

    untouched_parts = ("generator",)

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        return (
            LossTerm("mlm", "labels", "generator_losses", kind="token", classes="vocab_size"),
            LossTerm("replaced", "replaced", "logits", "binary", self.config.discriminator_weight, made=True),
        )

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resizes the embeddings of discriminator and generator, tied or not."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        generator, count = self.generator, embeddings.num_embeddings
        if not self.config.tie_word_embeddings:
            generator.resize_token_embeddings(count, mean_resizing=mean_resizing)
        # Tied weights have already been resized, but not the attributes with their sizes.
        generator.get_input_embeddings().num_embeddings = generator.get_output_embeddings().out_features = count
        generator.config.vocab_size = count
        return embeddings

    def get_discriminator(self) -> ElectraDiscriminator:
        """Returns the discriminator as a separate model that shares its weights and configuration with this one."""
        with torch.device("meta"):
            discriminator = twin_class("ElectraForPreTraining")(self.config)
        discriminator.electra = self.electra
        discriminator.discriminator_predictions = self.discriminator_predictions
        return discriminator.train(self.training)

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the batch unchanged: labels are inputs of the generator."""
        return dict(batch)

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Number of labels, and of non-padding tokens, which are the labels of the discriminator."""
        counts = super().count_labels(batch)
        if counts and batch.get("input_ids") is not None:
            ids = batch["input_ids"]
            counts["replaced"] = non_padding(batch.get("attention_mask"), ids.shape, ids.device).sum()
        return counts

    def guidance_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the original tokens, before masking."""
        if batch.get("input_ids") is None or batch.get("labels") is None:
            return batch
        return {**batch, "input_ids": _original(batch["input_ids"], batch["labels"])}


_BITS = 30  # of the random integers, and of the integer probabilities that they are compared with


def _original(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Original tokens, before masking."""
    return torch.where(is_labelled(labels), labels, input_ids)


def _draw(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Samples from softmax(scores), of shape `(draws, vocabulary)`, by inverting the distribution at the numbers.

    Sums of integers are exact, while floating-point sums on a GPU differ between runs.
    """
    cumulative = (scores.softmax(-1) * 2**_BITS).round().int().cumsum(-1, dtype=torch.int32)
    targets = (numbers[:, None] * cumulative[:, -1:] >> _BITS).int()
    # Only NaN leads past the end.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def _uniform_numbers(input_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Pseudo-random integers of `_BITS` bits for each token, of shape `(batch, length)`.

    They only depend on the non-padding tokens of the sentence and the index of the token among them.
    """
    positions = is_real.cumsum(1)
    sentences = (_hash(_hash(positions) + input_ids) * is_real).sum(1, keepdim=True)
    return _hash(_hash(sentences) + positions) >> (32 - _BITS)


def _hash(integers: torch.Tensor) -> torch.Tensor:
    """Hashes 32-bit integers bijectively (C. Wellons' `lowbias32`)."""
    x = integers & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


BASES = {
    "ElectraForPreTraining": (HeadwiseDiscriminatorMixin, ElectraDiscriminator),
    "ElectraForJointPreTraining": (HeadwiseJointPreTrainingMixin, ElectraForJointPreTraining),
}
