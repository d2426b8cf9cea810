# Licensed under the Apache License, Version 2.0.
"""What headwise ELECTRA has beside any headwise model: its discriminator, alone and trained with its generator."""

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
from .headwise_classes import __getattr__ as __getattr__  # the former place of the classes of headwise ELECTRA
from .headwise_outputs import HeadLosses
from .ignored_labels import is_labelled
from .modeling_headwise import HeadwiseMixin
from .precision import at_least_single
from .token_mask import labels_of_tokens, non_padding


@dataclass
class HeadwiseElectraJointPreTrainingOutput(HeadLosses, ElectraForPreTrainingOutput):
    """Output of [`HeadwiseElectraForJointPreTraining`]; without labels there are logits alone.

    Args:
        loss (`torch.FloatTensor`): `generator_loss + λ · discriminator_loss`, and what heads add to it.
        logits (`torch.FloatTensor` of shape `(batch, length)`): The discriminator's, of "replaced".
        generator_loss (`torch.FloatTensor`): Mean over the tokens that have a label.
        discriminator_loss (`torch.FloatTensor`): Mean over the tokens that are no padding.
        generator_losses (`torch.FloatTensor` of shape `(batch, length)`): Of each token, 0 where there is no label.
        replaced (`torch.LongTensor` of shape `(batch, length)`): 1 replaced, 0 original, -100 padding.
    """

    generator_loss: torch.FloatTensor | None = None
    discriminator_loss: torch.FloatTensor | None = None
    generator_losses: torch.FloatTensor | None = None
    replaced: torch.LongTensor | None = None


class ElectraDiscriminator(ElectraForPreTraining):
    """The stock discriminator, whose loss takes the label -100 as ignored: to the stock class it is a number."""

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
    """ELECTRA's discriminator: tells for each token whether it was replaced.

    Labels are 1 for a replaced token, 0 for an original one, and -100 for one that is ignored, as everywhere. The loss
    is the mean over the tokens whose label is not ignored and whose attention mask is not 0; without an attention
    mask, over all tokens whose label is not ignored, padding among them. The stock Trainer counts labels without
    reading masks: give padding the label -100.

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
    """ELECTRA's discriminator and generator, as they are pretrained together; nothing here knows of heads."""

    config_class = HeadwiseElectraConfig
    _tied_weights_keys = {
        **{
            f"generator.electra.embeddings.{kind}_embeddings.weight": f"electra.embeddings.{kind}_embeddings.weight"
            for kind in ("word", "position", "token_type")
        },
        "generator.generator_lm_head.weight": "electra.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: HeadwiseElectraConfig):
        # Not the parent's, at whose end weights are tied: the generator must be there by then.
        super(ElectraForPreTraining, self).__init__(config)
        self.electra = ElectraModel(config)
        self.discriminator_predictions = ElectraDiscriminatorPredictions(config)
        self.generator = ElectraForMaskedLM(generator_config(config))
        self.post_init()

    def replace_tokens(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Has the generator predict the masked tokens, and draws replacements from its predictions.

        A draw is decided by a number that is a pure function of the masked sentence and the place in it, in training
        as in evaluation. So neither padding nor the other sentences of a batch change it, and no random state is
        touched; a sentence that is masked anew gets new draws.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, length)`): Masked tokens.
            labels (`torch.LongTensor` of shape `(batch, length)`): Original tokens, -100 where none was chosen.
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 at padding.
            inputs: What else the generator takes.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: the sentences with a draw at each label, and the generator's losses,
            in nats, 0 where there is no label; both of shape `(batch, length)`. No gradient passes a draw.
        """
        hidden = self.generator.electra(input_ids, attention_mask=attention_mask, **inputs)[0]
        chosen = is_labelled(labels).nonzero(as_tuple=True)
        # Only where it is needed: the vocabulary is large.
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

    Takes masked tokens, and as labels the original ones, -100 where none was chosen, as
    [`MaskedLanguageModelCollator`] makes them. The generator predicts the masked tokens; draws from its predictions
    take their place, and the discriminator tells which tokens differ from the original ones. The loss is that of the
    generator plus λ times that of the discriminator; see [`HeadwiseElectraConfig`] for λ and the generator's sizes.
    Without labels the discriminator alone judges the tokens as they are.

    The generator shares its embeddings (words, positions, types, output) with the discriminator, unless
    `tie_word_embeddings` is false. Guidance, gates and pruning are for the heads of the discriminator alone. Patterns
    of single tokens (`period`) look for them in the original sentence.

    The discriminator has the parameter names of [`HeadwiseElectraForPreTraining`], which opens checkpoints of this
    class without the generator, as all Auto classes do; so does `get_discriminator` without a checkpoint.

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
        """Changes the number of tokens of discriminator and generator, whether or not they share their tables."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        generator, count = self.generator, embeddings.num_embeddings
        if not self.config.tie_word_embeddings:
            generator.resize_token_embeddings(count, mean_resizing=mean_resizing)
        # Weights that are shared have followed, but not what says how many there are.
        generator.get_input_embeddings().num_embeddings = generator.get_output_embeddings().out_features = count
        generator.config.vocab_size = count
        return embeddings

    def get_discriminator(self) -> ElectraDiscriminator:
        """The discriminator as a model of its own, with the same weights and configuration, not copies of them."""
        with torch.device("meta"):
            discriminator = twin_class("ElectraForPreTraining")(self.config)
        discriminator.electra = self.electra
        discriminator.discriminator_predictions = self.discriminator_predictions
        return discriminator.train(self.training)

    def without_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch itself: here labels are input, without which nothing can be replaced."""
        return dict(batch)

    def count_labels(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As for any model, and the number of tokens that are no padding, which the discriminator judges."""
        counts = super().count_labels(batch)
        if counts and batch.get("input_ids") is not None:
            ids = batch["input_ids"]
            counts["replaced"] = non_padding(batch.get("attention_mask"), ids.shape, ids.device).sum()
        return counts

    def guidance_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The sentences before any token was masked."""
        if batch.get("input_ids") is None or batch.get("labels") is None:
            return batch
        return {**batch, "input_ids": _original(batch["input_ids"], batch["labels"])}


_BITS = 30  # of the numbers that decide draws, and of the probabilities they are held against


def _original(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Tokens before any was masked."""
    return torch.where(is_labelled(labels), labels, input_ids)


def _draw(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draws from softmax(scores), of shape (draws, vocabulary), by the numbers: inverts the distribution.

    Integers have exact sums, whatever the order: floating-point ones would depend on it, on a GPU from run to run.
    """
    cumulative = (scores.softmax(-1) * 2**_BITS).round().int().cumsum(-1, dtype=torch.int32)
    targets = (numbers[:, None] * cumulative[:, -1:] >> _BITS).int()
    # Past the end there is only what was not a number.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def _uniform_numbers(input_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """Evenly spread integers of `_BITS` bits, for each token (batch, length).

    They depend on nothing but the real tokens of the sentence, and on the place of the token among them.
    """
    places = is_real.cumsum(1)
    sentences = (_hash(_hash(places) + input_ids) * is_real).sum(1, keepdim=True)
    return _hash(_hash(sentences) + places) >> (32 - _BITS)


def _hash(integers: torch.Tensor) -> torch.Tensor:
    """Mixes 32-bit integers, each result coming from one of them (C. Wellons' `lowbias32`)."""
    x = integers & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


BASES = {
    "ElectraForPreTraining": (HeadwiseDiscriminatorMixin, ElectraDiscriminator),
    "ElectraForJointPreTraining": (HeadwiseJointPreTrainingMixin, ElectraForJointPreTraining),
}
