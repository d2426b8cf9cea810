# Licensed under the Apache License, Version 2.0.
"""Marian's encoder and decoder, whose attention heads can be guided, gated and removed."""

from transformers import MarianModel, MarianMTModel
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from .configuration_headwise_marian import HeadwiseMarianConfig
from .modeling_headwise import HeadwiseMixin, LossTerm


class HeadwiseMarianMixin(HeadwiseMixin):
    """What all headwise Marian classes share."""

    config_class = HeadwiseMarianConfig

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Loads a checkpoint; the sinusoids of its positions stay what they are.

        The stock class leaves them trainable when it loads, and never saves them: what training makes of them would
        be lost.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, MarianSinusoidalPositionalEmbedding):
                module.weight.requires_grad_(False)
        return loaded


class HeadwiseMarianModel(HeadwiseMarianMixin, MarianModel):
    """Marian's encoder and decoder without a head on top."""


class HeadwiseMarianMTModel(HeadwiseMarianMixin, MarianMTModel):
    """Marian for translation.

    Example:
        >>> import torch
        >>> from hf_attn_dynamics import HeadwiseMarianConfig, HeadwiseMarianMTModel
        >>> config = HeadwiseMarianConfig(
        ...     vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        ...     decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=49,
        ...     decoder_start_token_id=49, gates={"encoder": {}, "cross": {}},
        ... )
        >>> model = HeadwiseMarianMTModel(config)
        >>> [str(site) for site in model.head_gates()]
        ['encoder layer 0', 'cross layer 0', 'cross layer 1']
    """

    loss_terms = (LossTerm("translation", "labels", "logits"),)


AUTO_CLASSES = {
    "AutoConfig": HeadwiseMarianConfig,
    "AutoModel": HeadwiseMarianModel,
    "AutoModelForSeq2SeqLM": HeadwiseMarianMTModel,
}
# Named so, classes are saved together with the files that define them.
for _auto_class, _cls in AUTO_CLASSES.items():
    _cls.register_for_auto_class(_auto_class)

__all__ = [cls.__name__ for cls in AUTO_CLASSES.values()]
