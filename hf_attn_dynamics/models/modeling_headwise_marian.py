# Licensed under the Apache License, Version 2.0.
"""Headwise Marian: frozen positions, separate source and target embeddings, checked generation."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import MarianModel, MarianMTModel

from .compat import MarianSinusoidalPositionalEmbedding
from .headwise_classes import __getattr__ as __getattr__  # earlier module of the headwise Marian classes
from .modeling_headwise import HeadwiseMixin
from .resizing import check_new_sizes, new_size, resize_table


class HeadwiseMarianMixin(HeadwiseMixin):
    """See [`HeadwiseMixin`]; base of all headwise Marian classes."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Loads a checkpoint and freezes its sinusoidal positions.

        The stock class makes them trainable on loading, but never saves them: trained positions would be lost.
        """
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, MarianSinusoidalPositionalEmbedding):
                module.weight.requires_grad_(False)
        return loaded

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resizes the token embeddings; only those of the source if the target has separate ones.

        See `resize_decoder_token_embeddings` for the target.
        """
        body, shared = self.base_model, self.config.share_encoder_decoder_embeddings
        # Of the same size, but not tied: the stock class would replace these tables by that of the source.
        own = {}
        if shared and not self.config.tie_word_embeddings:
            own = {"shared": body.shared, "decoder.embed_tokens": body.decoder.embed_tokens}
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if shared:
            self.config.decoder_vocab_size = self.config.vocab_size
        for name, table in own.items():
            if table is not embeddings:
                body.set_submodule(name, table)
                owner = body.get_submodule(name.rpartition(".")[0])
                resize_table(self, owner, name.rpartition(".")[2], self.config.vocab_size, mean_resizing)
        return embeddings

    def resize_decoder_token_embeddings(self, new_num_tokens: int) -> nn.Embedding:
        """Resizes separate target embeddings.

        Raises:
            ValueError: if source and target share embeddings, or a special token would be removed.
        """
        count = new_size(self.config.decoder_vocab_size, new_num_tokens, None)
        check_new_sizes(self.config, "check_heads", decoder_vocab_size=count)
        embeddings, output = super().resize_decoder_token_embeddings(count), self.get_output_embeddings()
        if output is not None:
            output.out_features = count  # a tied weight has already been resized
        return embeddings


class HeadwiseTranslatorMixin(HeadwiseMarianMixin):
    """See [`HeadwiseMixin`].

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

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generates as the stock class does, after checking its inputs, which it does not change.

        Raises:
            ValueError: for invalid tokens, shapes and masks, as in `forward`, which is not called for the encoder.
        """
        self._check_inputs(
            input_ids=kwargs.get("input_ids") if inputs is None else inputs,
            **{name: kwargs.get(name) for name in ("inputs_embeds", "attention_mask", "decoder_input_ids")},
        )
        if kwargs.get("encoder_outputs") is not None:
            # A copy, since beam search expands it in place.
            kwargs["encoder_outputs"] = copy.copy(kwargs["encoder_outputs"])
        return super().generate(inputs, *args, **kwargs)


BASES = {
    "MarianModel": (HeadwiseMarianMixin, MarianModel),
    "MarianMTModel": (HeadwiseTranslatorMixin, MarianMTModel),
}
