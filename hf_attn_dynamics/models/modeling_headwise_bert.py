# Licensed under the Apache License, Version 2.0.
"""BERT whose attention heads can be guided, gated and removed."""

from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

from .configuration_headwise_bert import HeadwiseBertConfig
from .modeling_headwise import HeadwiseMixin


class HeadwiseBertMixin(HeadwiseMixin):
    """What all headwise BERT classes share."""

    config_class = HeadwiseBertConfig


class HeadwiseBertModel(HeadwiseBertMixin, BertModel):
    """BERT without a head on top."""


class HeadwiseBertForPreTraining(HeadwiseBertMixin, BertForPreTraining):
    """BERT with masked-language-modelling and next-sentence-prediction heads, as it was pretrained."""


class HeadwiseBertForMaskedLM(HeadwiseBertMixin, BertForMaskedLM):
    """BERT with a masked-language-modelling head.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadwiseBertConfig, HeadwiseBertForMaskedLM
        >>> config = HeadwiseBertConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        ...     guidance={"fraction": 0.5},
        ... )
        >>> model = HeadwiseBertForMaskedLM(config)
        >>> ids = torch.tensor([[5, 7, 8, 9, 6]])
        >>> outputs = model(ids, labels=ids, guidance_weight=1.0)
        >>> bool(outputs.loss > outputs.guidance_loss > 0)
        True
    """


class HeadwiseBertForSequenceClassification(HeadwiseBertMixin, BertForSequenceClassification):
    """BERT with a sentence classification or regression head."""


class HeadwiseBertForTokenClassification(HeadwiseBertMixin, BertForTokenClassification):
    """BERT with a token classification head."""


class HeadwiseBertForQuestionAnswering(HeadwiseBertMixin, BertForQuestionAnswering):
    """BERT with a span extraction head."""


AUTO_CLASSES = {
    "AutoConfig": HeadwiseBertConfig,
    "AutoModel": HeadwiseBertModel,
    "AutoModelForPreTraining": HeadwiseBertForPreTraining,
    "AutoModelForMaskedLM": HeadwiseBertForMaskedLM,
    "AutoModelForSequenceClassification": HeadwiseBertForSequenceClassification,
    "AutoModelForTokenClassification": HeadwiseBertForTokenClassification,
    "AutoModelForQuestionAnswering": HeadwiseBertForQuestionAnswering,
}
# Named so, classes are saved together with the files that define them.
for _auto_class, _cls in AUTO_CLASSES.items():
    _cls.register_for_auto_class(_auto_class)

__all__ = [cls.__name__ for cls in AUTO_CLASSES.values()]
