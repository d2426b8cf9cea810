# Licensed under the Apache License, Version 2.0.
"""ELECTRA whose attention heads can be guided, gated and removed."""

from transformers import (
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForQuestionAnswering,
    ElectraForSequenceClassification,
    ElectraForTokenClassification,
    ElectraModel,
)

from .configuration_headwise_electra import HeadwiseElectraConfig
from .modeling_headwise import HeadwiseMixin, LossTerm


class HeadwiseElectraMixin(HeadwiseMixin):
    """What all headwise ELECTRA classes share."""

    config_class = HeadwiseElectraConfig


class HeadwiseElectraModel(HeadwiseElectraMixin, ElectraModel):
    """ELECTRA without a head on top."""


class HeadwiseElectraForPreTraining(HeadwiseElectraMixin, ElectraForPreTraining):
    """ELECTRA's discriminator: tells for each token whether it was replaced.

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

    loss_terms = (LossTerm("replaced", "labels", "logits", kind="binary"),)


class HeadwiseElectraForMaskedLM(HeadwiseElectraMixin, ElectraForMaskedLM):
    """ELECTRA with a masked-language-modelling head: its generator."""

    loss_terms = (LossTerm("mlm", "labels", "logits"),)


class HeadwiseElectraForSequenceClassification(HeadwiseElectraMixin, ElectraForSequenceClassification):
    """ELECTRA with a sentence classification or regression head."""

    loss_terms = (LossTerm("classification", "labels", "logits", kind="problem"),)


class HeadwiseElectraForTokenClassification(HeadwiseElectraMixin, ElectraForTokenClassification):
    """ELECTRA with a token classification head."""

    loss_terms = (LossTerm("classification", "labels", "logits"),)


class HeadwiseElectraForQuestionAnswering(HeadwiseElectraMixin, ElectraForQuestionAnswering):
    """ELECTRA with a span extraction head."""

    loss_terms = (
        LossTerm("start", "start_positions", "start_logits", kind="position", weight=0.5),
        LossTerm("end", "end_positions", "end_logits", kind="position", weight=0.5),
    )


AUTO_CLASSES = {
    "AutoConfig": HeadwiseElectraConfig,
    "AutoModel": HeadwiseElectraModel,
    "AutoModelForPreTraining": HeadwiseElectraForPreTraining,
    "AutoModelForMaskedLM": HeadwiseElectraForMaskedLM,
    "AutoModelForSequenceClassification": HeadwiseElectraForSequenceClassification,
    "AutoModelForTokenClassification": HeadwiseElectraForTokenClassification,
    "AutoModelForQuestionAnswering": HeadwiseElectraForQuestionAnswering,
}
# Named so, classes are saved together with the files that define them.
for _auto_class, _cls in AUTO_CLASSES.items():
    _cls.register_for_auto_class(_auto_class)

__all__ = [cls.__name__ for cls in AUTO_CLASSES.values()]
