# Licensed under the Apache License, Version 2.0.
"""Which tokens guided heads read, of models that are one stack of layers and of encoder–decoders."""

from typing import Any

import torch
from transformers import PreTrainedModel

from .head_guidance import Tokens
from .token_mask import is_labelled


def own_tokens(
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
                "the guidance loss of the cross site is asked for: pass the encoder_hidden_states that it attends to."
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


def translated_tokens(
    model: PreTrainedModel,
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
        decoder_input_ids = model.prepare_decoder_input_ids_from_labels(labels)
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
