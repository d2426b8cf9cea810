# Licensed under the Apache License, Version 2.0.
"""Inputs of the guidance loss: the query and key tokens of a batch at each kind of site."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from .guidance_settings import GuidanceSettings, target_columns
from .guidance_targets import GuidanceTargets, Tokens
from .head_losses import decoder_inputs_of
from .head_settings import HeadSettings
from .headwise_arguments import PACKING_ARGUMENTS
from .ignored_labels import IGNORED, is_labelled
from .packing import BOUNDARIES, KERNEL_BOUNDARIES, Packing, packing_of
from .pruned_attention import given_cache


Layers = dict[int, dict[str, list[int]]]


def guidance_targets(
    model: PreTrainedModel,
    settings: HeadSettings,
    batch: Mapping[str, Any],
    packing: Packing | None = None,
    counts: Mapping[str, Any] | None = None,
) -> dict[str, GuidanceTargets]:
    """Targets of the guided heads for a batch, by kind of site.

    Args:
        model (`PreTrainedModel`): A headwise model.
        settings ([`HeadSettings`]): Its settings.
        batch (`dict`): Arguments of the forward pass, `guidance_rows`, and the columns of targets.
        packing ([`Packing`], *optional*): Where the sentences of a packed batch are, from [`packing_of`].
        counts (`dict`, *optional*): See [`GuidanceTargets`].

    Raises:
        ValueError: if no head is guided, or targets cannot be formed: with a cache in a decoder, with packed
            sentences in models of two stacks, in cross-attention or with a teacher, without input ids where patterns
            read them, or without the columns of targets.
    """
    return _targets_of(model, settings, settings.guided_indices, batch, packing, counts)


def guided_row_counts(
    model: PreTrainedModel, settings: HeadSettings, batch: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Number of rows of a batch that count for each target, by column; empty if batches bring no targets.

    Args:
        model (`PreTrainedModel`): A headwise model.
        settings ([`HeadSettings`]): Its settings.
        batch (`dict`): Arguments of the forward pass, and the columns of targets.

    Raises:
        ValueError: as [`guidance_targets`], except for batches without a row that counts.
    """
    guided = _guided_to_targets(settings)
    found = {}
    for kind, targets in _measured(model, settings, guided, batch, packing_of(model, batch)).items():
        if not isinstance(targets, GuidanceTargets):
            targets = targets(*_stand_ins(settings, kind, guided[kind], batch))
        found |= targets.row_counts()
    return found


def measured_targets(
    model: PreTrainedModel, settings: HeadSettings, batch: Mapping[str, Any], packing: Packing | None = None
) -> dict[str, Any]:
    """As [`guidance_targets`], those whose columns are in the batch, in which no row needs to count."""
    return _measured(model, settings, _guided_to_targets(settings, batch), batch, packing)


def _guided_to_targets(settings: HeadSettings, batch: Mapping[str, Any] | None = None) -> dict[str, Layers]:
    """Heads that are guided to targets, by kind of site; of the targets in a batch, if one is given."""
    guided: dict[str, Layers] = {}
    for kind, layers in settings.guided_indices.items():
        forms = settings.guidance[kind].targets or {}
        named = [
            name
            for name, form in forms.items()
            if batch is None or batch.get(target_columns(name, form)[0]) is not None
        ]
        of_targets = {
            layer: {name: heads for name, heads in layout.items() if name in named} for layer, layout in layers.items()
        }
        if any(of_targets.values()):
            guided[kind] = of_targets
    return guided


def _measured(
    model: PreTrainedModel,
    settings: HeadSettings,
    guided: dict[str, Layers],
    batch: Mapping[str, Any],
    packing: Packing | None,
) -> dict[str, Any]:
    """[`_targets_of`] a batch that may have no row that counts."""
    if not guided:
        return {}
    counts: dict[str, Any] = {**dict.fromkeys(settings.target_columns, 1), "fraction": 1.0}
    return _targets_of(model, settings, guided, batch, packing, counts)


def _stand_ins(
    settings: HeadSettings, kind: str, guided: Layers, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Query and key of the shapes that the columns of targets imply, for images and audio."""
    lengths, forms = [], settings.guidance[kind].targets
    for name in {name for layout in guided.values() for name in layout}:
        column = batch.get(target_columns(name, forms[name])[0])
        if column is not None:
            by_rows = kind == "cross" and forms[name] != "weights"
            lengths.append(int(column.max()) + 1 if by_rows else column.shape[1])
            size, device = len(column), column.device
    if not lengths:
        return (torch.empty(1, 1, 1, 0),) * 2
    return (torch.empty(size, 1, max(*lengths, 1), 0, device=device),) * 2


def _targets_of(
    model: PreTrainedModel,
    settings: HeadSettings,
    guided: Mapping[str, Layers],
    batch: Mapping[str, Any],
    packing: Packing | None,
    counts: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """[`guidance_targets`] of the given heads; functions of query and key instead, for images and audio."""
    if not settings.guidance:
        raise ValueError(
            "the guidance loss is requested, but config.guidance is None: load or build the model with "
            'guidance={"fraction": 0.5}, for instance.'
        )
    if settings.guidance.keys() != {"encoder"} and given_cache(batch) is not None:
        raise ValueError(
            "the guidance loss of a decoder needs the whole target, but with a cache it reads only a part of it: "
            "pass the whole target and no cache."
        )
    _check_packing(settings, guided, batch, packing)
    if model.main_input_name not in ("input_ids", "inputs_embeds"):
        rows = {}
        if settings.guidance.keys() & {"decoder", "cross"}:
            rows = dict(zip(("target", "counted"), target_tokens(model, **batch)))
        given = {"columns": batch, "counts": counts, **rows}
        return {kind: partial(_unmasked_targets, settings, kind, layers, **given) for kind, layers in guided.items()}
    if getattr(model.config, "is_encoder_decoder", False):
        sides = translated_tokens(model, guided, **batch)
    else:
        sides = own_tokens(guided, packing, **batch)
    return {
        kind: GuidanceTargets(
            settings.guidance[kind],
            layers,
            causal=settings.guidance[kind].causal,
            columns=batch if packing is None else columns_of_sentences(settings.guidance[kind], batch, packing),
            counts=counts,
            packing=packing,
            **sides[kind],
        )
        for kind, layers in guided.items()
    }


def _check_packing(
    settings: HeadSettings, guided: Mapping[str, Layers], batch: Mapping[str, Any], packing: Packing | None
) -> None:
    """Raises ValueError if the loss cannot be computed on sentences that share a row."""
    read = KERNEL_BOUNDARIES if batch.get(BOUNDARIES) is not None and packing is not None else ()
    for name in PACKING_ARGUMENTS:
        if name not in read and batch.get(name) is not None:
            raise ValueError(
                f"the guidance loss does not support {name} here: pass padded instead of packed sentences, with an "
                "attention mask."
            )
    other = batch.get("cu_seq_lens_k")
    if read and other is not None and not (other is batch[BOUNDARIES] or other.equal(batch[BOUNDARIES])):
        raise ValueError(
            f"cu_seq_lens_k {other.tolist()} differ from {BOUNDARIES} {batch[BOUNDARIES].tolist()}, but sentences "
            "attend to themselves; pass the same boundaries."
        )
    if packing is not None and ("cross" in guided or settings.is_taught):
        what = "of the cross site" if "cross" in guided else "from a teacher"
        raise ValueError(
            f"the guidance loss {what} does not support packed sentences: pass padded ones, with an attention mask."
        )


def columns_of_sentences(
    guidance: GuidanceSettings, batch: Mapping[str, Any], packing: Packing
) -> dict[str, torch.Tensor]:
    """Columns of the targets of a packed batch, with a row for each sentence; keys are counted within sentences."""
    columns = {}
    for name, form in (guidance.targets or {}).items():
        first, *weights = target_columns(name, form)
        fills = {first: 0 if form == "weights" else IGNORED, **dict.fromkeys(weights, 0)}
        for column, fill in fills.items():
            if (given := batch.get(column)) is not None:
                if given.shape[:2] != packing.rows:
                    raise ValueError(
                        f"{column} must have shape {packing.rows}{' and a third size' * (form == 'sparse')}, that of "
                        f"the packed batch, got {tuple(given.shape)}."
                    )
                columns[column] = packing.split(given, fill)
    return columns


def _unmasked_targets(
    settings: HeadSettings,
    kind: str,
    guided: Layers,
    query: torch.Tensor,
    key: torch.Tensor,
    target: Tokens | None = None,
    counted: torch.Tensor | None = None,
    **given: Any,
) -> GuidanceTargets:
    """Targets for images and audio, whose inputs are not padded: every key is a patch or frame."""
    sides: dict[str, Any] = {"keys": Tokens(None, None, (key.shape[0], key.shape[2]), key.device)}
    if kind == "decoder":
        sides = {"keys": target, "counted": counted}
    elif kind == "cross":
        sides |= {"queries": target, "counted": counted}
    guidance = settings.guidance[kind]
    return GuidanceTargets(guidance, guided, causal=guidance.causal, **sides, **given)


def own_tokens(
    kinds: Collection[str],
    packing: Packing | None = None,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> dict[str, dict[str, Any]]:
    """Arguments of [`GuidanceTargets`] by kind of site, for an encoder or a decoder."""
    inputs = input_ids if input_ids is not None else inputs_embeds
    if inputs is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    if packing is None:
        own = Tokens(input_ids, attention_mask, inputs.shape[:2], inputs.device)
    else:
        ids = None if input_ids is None else packing.split(input_ids)
        own = Tokens(ids, packing.mask, packing.shape, inputs.device)
    sides = {"encoder": {"keys": own}, "decoder": {"keys": own}}
    if "cross" in kinds:
        if encoder_hidden_states is None:
            raise ValueError(
                "the guidance loss of the cross site is requested: pass the encoder_hidden_states that it attends to."
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
    kinds: Collection[str],
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    encoder_outputs: Any = None,
    **target: Any,
) -> dict[str, dict[str, Any]]:
    """Arguments of [`GuidanceTargets`] by kind of site, for an encoder–decoder."""
    if encoder_outputs is not None and "encoder" in kinds:
        raise ValueError(
            "the guidance loss of the encoder is requested, but with encoder_outputs the encoder does not run: pass "
            "input_ids instead."
        )
    encoded = None if encoder_outputs is None else encoder_outputs[0]
    inputs = next((given for given in (input_ids, inputs_embeds, encoded) if given is not None), None)
    if inputs is None:
        raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
    source = Tokens(input_ids, attention_mask, inputs.shape[:2], inputs.device)
    sides = {"encoder": {"keys": source}}
    if set(kinds) == {"encoder"}:
        return sides
    tokens, counted = target_tokens(model, **target)
    rows = {"counted": counted, "sentences": source.real().any(1)}
    sides["decoder"] = {"keys": tokens, **rows}
    sides["cross"] = {"keys": source, "queries": tokens, **rows}
    return sides


def target_tokens(
    model: PreTrainedModel,
    decoder_input_ids: torch.Tensor | None = None,
    decoder_attention_mask: torch.Tensor | None = None,
    decoder_inputs_embeds: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    guidance_rows: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tokens, torch.Tensor | None]:
    """Input tokens of the decoder of an encoder–decoder, and the mask of its rows in the loss (`None` for all)."""
    if not model.labels_are_target:
        labels = None
    if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
        decoder_input_ids = decoder_inputs_of(model, labels)
    inputs = decoder_input_ids if decoder_input_ids is not None else decoder_inputs_embeds
    if inputs is None:
        raise ValueError("the guidance loss of a decoder is requested: pass decoder_input_ids or labels.")
    tokens = Tokens(
        decoder_input_ids, decoder_attention_mask, inputs.shape[:2], inputs.device, "decoder_attention_mask"
    )
    if guidance_rows is not None and labels is not None:
        raise ValueError("guidance_rows are given beside labels, which tell which rows count: leave one out.")
    if guidance_rows is not None and (guidance_rows.dtype != torch.bool or guidance_rows.shape != inputs.shape[:2]):
        raise ValueError(
            f"guidance_rows must be a boolean tensor of shape {tuple(inputs.shape[:2])}, the rows of the decoder, got "
            f"{guidance_rows.dtype} of shape {tuple(guidance_rows.shape)}."
        )
    # The decoder's start token may be the padding token, so labels tell the rows that count.
    predicting = guidance_rows if labels is None else is_labelled(labels)
    if decoder_attention_mask is not None:
        predicting = None
    return tokens, None if predicting is None else predicting.to(inputs.device)
