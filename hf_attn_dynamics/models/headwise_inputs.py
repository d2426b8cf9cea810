# Licensed under the Apache License, Version 2.0.
"""Checks of the inputs of headwise models, with messages that name the argument.

Shapes are checked before each pass. Values are checked only after a pass has failed on a CPU, to explain the error, so
that a successful pass takes only microseconds longer.
"""

from collections.abc import Callable
from typing import Any

import torch

from .head_losses import LossTerm, problem_type
from .input_checks import can_check, check_integers, check_labels, check_text
from .loss_terms import SHIFTED_LABELS
from .pruned_attention import given_cache
from .token_mask import check_mask, labels_of_tokens, non_padding_ids


_PLAIN_ARGUMENTS = frozenset(("input_ids", "attention_mask", "token_type_ids"))


def is_plain_text(batch: dict[str, Any]) -> bool:
    """Whether a batch consists of token ids on a CPU, and at most a mask and token types of the same shape.

    A fast path for most batches without labels: further checks of shapes are not needed.
    """
    ids = batch.get("input_ids")
    if ids is None or not batch.keys() <= _PLAIN_ARGUMENTS or not ids.is_cpu:
        return False
    shape = ids.shape
    if len(shape) != 2 or not shape[0] or not shape[1]:
        return False
    mask, kinds = batch.get("attention_mask"), batch.get("token_type_ids")
    return (mask is None or (mask.shape == shape and mask.is_cpu)) and (kinds is None or kinds.shape == shape)


class CheckedInputsMixin:
    """A model whose forward pass checks its inputs."""

    def run_stock(self, stock_forward: Callable, is_checked: bool, inputs: dict[str, Any]) -> Any:
        """Runs a stock forward pass; errors caused by invalid inputs name the argument.

        Args:
            stock_forward (callable): The method of the stock class.
            is_checked (`bool`): Whether to check the inputs after an error.
            inputs (`dict`): Its arguments.

        Raises:
            ValueError: for tokens, token types and positions without an embedding.
        """
        if not is_checked:
            return stock_forward(self, **inputs)
        try:
            return stock_forward(self, **inputs)
        except (IndexError, RuntimeError):
            refusal = self._refusal(**inputs)
            if refusal is None:
                raise
            raise refusal from None  # one message, not three

    def _refusal(self, **batch: Any) -> ValueError | None:
        """The error for the first invalid value of a batch; `None` if all are valid."""
        try:
            self._check_values(**batch)
            self._check_positions(**batch)
        except ValueError as error:
            return error
        return None

    def _check_inputs(self, **batch: Any) -> None:
        """Raises ValueError for shapes that do not fit, and on CPUs for values without an embedding."""
        self._check_shapes(**batch)
        self._check_values(**batch)

    def _check_values(self, **batch: Any) -> None:
        for name in ("input_ids", "token_type_ids", "position_ids", "decoder_input_ids"):
            if batch.get(name) is not None and (limit := self._integer_limit(name)) is not None:
                check_integers(name, batch[name], *limit)

    def _check_shapes(self, **batch: Any) -> None:
        """Raises ValueError for shapes that do not fit, on every device, and for invalid labels on CPUs.

        Lengths are checked here on accelerators only, where an index error in a kernel is fatal.
        """
        if not can_check():
            return
        two_stacks, cached = getattr(self.config, "is_encoder_decoder", False), given_cache(batch) is not None
        # With a cache, the mask also covers the cached tokens.
        shape = self._check_text("", batch, masked=two_stacks or not cached)
        if two_stacks:
            encoded = batch.get("encoder_outputs")
            if encoded is not None:
                shape = encoded[0].shape[:2]
                check_mask("attention_mask", batch.get("attention_mask"), shape)
            labels = batch.get("labels") if self.labels_are_target else None
            self._check_target(shape, self._check_text("decoder_", batch, masked=not cached), labels)
        elif batch.get("encoder_hidden_states") is not None:
            shape = batch["encoder_hidden_states"].shape[:2]
            check_mask("encoder_attention_mask", batch.get("encoder_attention_mask"), shape)
        for term in self.loss_terms:
            if not term.made and batch.get(term.labels) is not None:
                self._check_labels(term, batch)
            if term.kind == "next" and batch.get(SHIFTED_LABELS) is not None:
                self._check_labels(term._replace(labels=SHIFTED_LABELS), batch)
        if any(torch.is_tensor(value) and value.device.type != "cpu" for value in batch.values()):
            self._check_positions(**batch)

    def _check_text(self, prefix: str, batch: dict[str, Any], masked: bool) -> torch.Size | None:
        """Checks the shapes of one text, and of its mask if `masked`; returns `(batch, length)`, if it is given."""
        names = (f"{prefix}input_ids", f"{prefix}inputs_embeds")
        name = next((name for name in names if batch.get(name) is not None), None)
        if name is None:
            return None
        text = batch[name]
        check_text(name, text)
        if name.endswith("embeds"):
            size = getattr(self.get_input_embeddings(), "embedding_dim", text.shape[-1])
            if text.shape[-1] != size:
                raise ValueError(f"{name} must have shape (batch, length, {size}), got {tuple(text.shape)}.")
        if masked:
            check_mask(f"{prefix}attention_mask", batch.get(f"{prefix}attention_mask"), text.shape[:2])
        kinds = None if prefix else batch.get("token_type_ids")
        if kinds is not None and kinds.shape[-1:] != text.shape[1:2]:
            raise ValueError(
                f"token_type_ids must have shape {tuple(text.shape[:2])}, one type for each token, got "
                f"{tuple(kinds.shape)}."
            )
        return text.shape[:2]

    def _check_has_target(self, batch: dict[str, Any]) -> None:
        """Raises ValueError without a target, unless the model is a classifier or makes the target from the source."""
        if not getattr(self.config, "is_encoder_decoder", False) or not self.labels_are_target:
            return
        if self.config.architecture.shifts_source:
            return
        if all(batch.get(name) is None for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")):
            raise ValueError(
                f"{type(self).__name__} needs a target: pass decoder_input_ids, decoder_inputs_embeds or, with a "
                "language-modelling head, labels."
            )

    def _check_target(self, source: torch.Size | None, target: torch.Size | None, labels: torch.Tensor | None) -> None:
        """Raises ValueError if the shapes of source, target and labels do not match."""
        if labels is not None:
            check_text("labels", labels)
            if target is not None and labels.shape != target:
                raise ValueError(
                    f"labels have shape {tuple(labels.shape)}, but the decoder input has {tuple(target)}; pass one "
                    "label for each token."
                )
            target = labels.shape
        if source is not None and target is not None and source[0] != target[0]:
            raise ValueError(
                f"the target has {target[0]} sentences, but the source has {source[0]}; pass one target for each "
                "source."
            )

    def _integer_limit(self, name: str) -> tuple[int, str] | None:
        """Size of the embedding table of an argument, and its name in the configuration."""
        config = self.config
        if name == "input_ids":
            # The table may have been replaced by one of another size.
            return getattr(self.get_input_embeddings(), "num_embeddings", config.vocab_size), "vocab_size"
        if name == "decoder_input_ids":
            size = "decoder_vocab_size" if hasattr(config, "decoder_vocab_size") else "vocab_size"
            return getattr(config, size), size
        if name == "token_type_ids":
            count = getattr(config, "type_vocab_size", None)
            return None if count is None else (count, "type_vocab_size")
        if getattr(config, "is_encoder_decoder", False) or config.max_positions() is None:
            return None
        return config.max_position_embeddings, "max_position_embeddings"

    def _check_labels(self, term: LossTerm, batch: dict[str, Any]) -> None:
        """Raises ValueError for classes out of range, and for labels that do not match the batch."""
        labels = batch[term.labels]
        if term.kind == "problem" and problem_type(self.config, labels) != "single_label_classification":
            return
        text = next((batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
        if text is not None and not getattr(self.config, "is_encoder_decoder", False):
            sentences, tokens = len(text), text.shape[0] * text.shape[1]
            if labels.numel() not in (sentences, tokens):
                raise ValueError(
                    f"{term.labels} have shape {tuple(labels.shape)}, but the batch has {tuple(text.shape[:2])}; pass "
                    "one label for each sentence or token."
                )
        if term.kind == "binary":
            mask = batch.get("attention_mask")
            if mask is not None and (mask.shape, mask.device) == (labels.shape, labels.device):
                labels = labels_of_tokens(labels, mask)
            check_labels(labels.long(), 2, "the number of classes", term.labels)
        elif term.classes is not None:
            count = term.classes if isinstance(term.classes, int) else getattr(self.config, term.classes)
            limit = "the number of classes" if isinstance(term.classes, int) else term.classes
            check_labels(labels, count, limit, term.labels)

    def _check_positions(
        self, input_ids=None, inputs_embeds=None, position_ids=None, decoder_input_ids=None, labels=None, **kwargs: Any
    ) -> None:
        """Raises ValueError for sentences longer than the position embeddings."""
        inputs = input_ids if input_ids is not None else inputs_embeds
        longest = self.config.max_positions()
        if longest is None:
            return
        cache = given_cache(kwargs)
        past = 0 if cache is None else cache.get_seq_length()
        if isinstance(past, torch.Tensor):
            past = 0  # a static cache has its length on the device: reading it would synchronise
        if getattr(self.config, "is_encoder_decoder", False):
            written = labels if self.labels_are_target else None
            targets = (decoder_input_ids, kwargs.get("decoder_inputs_embeds"), written)
            target = next((given for given in targets if given is not None), None)
            if target is not None and target.shape[1] + past > longest:
                raise ValueError(
                    f"the target has {target.shape[1] + past} tokens, but {type(self).__name__} has positions for "
                    f"{longest}; cut the target or split it, or generate fewer tokens."
                )
            # Neither applies to the source.
            past, position_ids = 0, None
        if position_ids is not None or inputs is None or inputs.shape[1] + past <= longest:
            return
        # Some models give no positions to padding; counting tokens needs the ids, which synchronises.
        length = inputs.shape[1] + past
        if longest != self.config.max_position_embeddings and input_ids is not None:
            length = int(non_padding_ids(input_ids, self.config.pad_token_id).sum(1).max()) + past
        if length > longest:
            raise ValueError(
                f"the input has {length} tokens, but {type(self).__name__} has positions for {longest} (its "
                f"max_position_embeddings is {self.config.max_position_embeddings}); cut the input or split it."
            )
