# Licensed under the Apache License, Version 2.0.
"""RoBERTa whose attention heads can be guided, gated and removed."""

from transformers import (
    RobertaForMaskedLM,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
)

from .configuration_headwise_roberta import HeadwiseRobertaConfig
from .modeling_headwise import HeadwiseMixin


class HeadwiseRobertaMixin(HeadwiseMixin):
    """What all headwise RoBERTa classes share."""

    config_class = HeadwiseRobertaConfig


class HeadwiseRobertaModel(HeadwiseRobertaMixin, RobertaModel):
    """RoBERTa without a head on top."""


class HeadwiseRobertaForMaskedLM(HeadwiseRobertaMixin, RobertaForMaskedLM):
    """RoBERTa with a masked-language-modelling head.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadwiseRobertaConfig, HeadwiseRobertaForMaskedLM
        >>> config = HeadwiseRobertaConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        ...     guidance={"fraction": 0.5},
        ... )
        >>> model = HeadwiseRobertaForMaskedLM(config)
        >>> ids = torch.tensor([[0, 7, 8, 9, 2]])
        >>> outputs = model(ids, labels=ids, guidance_weight=1.0)
        >>> bool(outputs.loss > outputs.guidance_loss > 0)
        True
    """


class HeadwiseRobertaForSequenceClassification(HeadwiseRobertaMixin, RobertaForSequenceClassification):
    """RoBERTa with a sentence classification or regression head."""


class HeadwiseRobertaForTokenClassification(HeadwiseRobertaMixin, RobertaForTokenClassification):
    """RoBERTa with a token classification head."""


class HeadwiseRobertaForQuestionAnswering(HeadwiseRobertaMixin, RobertaForQuestionAnswering):
    """RoBERTa with a span extraction head."""


AUTO_CLASSES = {
    "AutoConfig": HeadwiseRobertaConfig,
    "AutoModel": HeadwiseRobertaModel,
    "AutoModelForPreTraining": HeadwiseRobertaForMaskedLM,
    "AutoModelForMaskedLM": HeadwiseRobertaForMaskedLM,
    "AutoModelForSequenceClassification": HeadwiseRobertaForSequenceClassification,
    "AutoModelForTokenClassification": HeadwiseRobertaForTokenClassification,
    "AutoModelForQuestionAnswering": HeadwiseRobertaForQuestionAnswering,
}
# Named so, classes are saved together with the files that define them.
for _auto_class, _cls in AUTO_CLASSES.items():
    _cls.register_for_auto_class(_auto_class)

__all__ = [cls.__name__ for cls in AUTO_CLASSES.values()]
