# Licensed under the Apache License, Version 2.0.
"""Classes of attention modules that cannot run their stock forward pass after pruning.

Most modules run unchanged with smaller projections. Exceptions are modules without heads, since views of width zero
are ambiguous; modules that share relative position biases with other layers; and modules with a cache, which may have
been allocated for all heads.

Such a module gets a class derived from its own class at runtime. It stays an instance of the stock class, by which
Transformers finds the modules whose attention weights it records, and keeps its parameter names.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from .compat import attention_kernel, kernel_name
from .in_place import take_class


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or module, if any.

    Its name depends on the version of Transformers for which the model was written; GPT-NeoX has a third name.
    """
    names = ("cache", "past_key_values", "layer_past")
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def attends_to(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """The hidden states that a cross-attention module attends to, among its arguments, if any."""
    names = ("key_value_states", "encoder_hidden_states")
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


class PrunedAttention(nn.Module):
    """Base of the mixins for stock attention classes.

    Attributes:
        stock_attention (`type[nn.Module]`): The stock class.
        kept_heads (`list[int]`): Remaining heads, in the original numbering.
    """

    prefix = "Pruned"

    @property
    def cached_heads(self) -> int:
        """Number of key/value heads in a cache."""
        return len(self.kept_heads) // getattr(self, "num_key_value_groups", 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.fit_cache(kwargs)
        return super().forward(*args, **kwargs)

    def fit_cache(self, arguments: Mapping[str, Any]) -> None:
        """Resets this layer of a cache that was allocated for all heads; its next update allocates the right shape.

        Transformers allocates all layers for the number of heads in the configuration when it prefills in chunks,
        exports a model, or calls `early_initialization`.

        Raises:
            ValueError: if the layer contains keys and values of other heads; if the model is being exported; or if the
                cache is paged, with the same number of heads in all layers.
        """
        cache, number = given_cache(arguments), getattr(self, "layer_idx", None)
        if cache is None or number is None:
            return
        if type(cache).__name__ == "PagedAttentionCache":
            raise ValueError(
                f"heads were removed from layer {number}, but the paged cache of generate_batch() has the same number "
                "of heads in every layer; use generate()."
            )
        if hasattr(cache, "is_updated"):
            is_cross = attends_to(arguments) is not None
            cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        layer = cache.layers[number] if number < len(cache.layers) else None
        if not getattr(layer, "is_initialized", False) or layer.keys.shape[1] == self.cached_heads:
            return
        if torch.compiler.is_exporting():
            raise ValueError(
                f"the cache is allocated for {layer.keys.shape[1]} heads in layer {number}, which has "
                f"{self.cached_heads}: run the model once with this cache and reset it before exporting."
            )
        if layer.get_seq_length():
            raise ValueError(
                f"the cache has keys and values of {layer.keys.shape[1]} heads in layer {number}, which has "
                f"{self.cached_heads}; pass an empty cache, or one that this model has filled."
            )
        layer.is_initialized = False

    def __reduce_ex__(self, protocol: int) -> tuple:
        # Classes created at runtime cannot be pickled by name.
        return _new_module, type(self).__bases__, self.__dict__.copy()


@cache
def _pruned_class(mixin: type[PrunedAttention], stock: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": mixin.__module__, "stock_attention": stock}
    return type(f"{mixin.prefix}{stock.__name__}", (mixin, stock), names)


def _new_module(mixin: type[PrunedAttention], stock: type[nn.Module]) -> nn.Module:
    cls = _pruned_class(mixin, stock)
    return cls.__new__(cls)


def specialise(module: nn.Module, mixin: type[PrunedAttention]) -> None:
    """Changes the class of an attention module to `mixin` over its stock class."""
    take_class(module, _pruned_class(mixin, getattr(module, "stock_attention", type(module))))


class HeadlessAttention(PrunedAttention):
    """Attention without heads: returns the bias of the output projection, and updates the cache.

    Attributes:
        empty_output (`str`, *optional*): Name of the output projection, or `None` if the parent module applies it.
        after_output (`tuple[str, str]`): Names of the dropout and the layer norm after the residual connection that
            the module applies; empty strings for none.
    """

    prefix = "Headless"
    cached_dim: int

    @property
    def cached_heads(self) -> int:
        return 1  # a head of zeros, which counts tokens

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        cache = given_cache(kwargs)
        self.fit_cache(kwargs)
        source = attends_to(kwargs)
        keys = self._advance(cache, hidden_states, source)
        # A slice of width zero keeps the graph connected: preceding layers get zero gradients, not None.
        output = hidden_states[..., :0]
        if self.empty_output is not None:
            output = getattr(self, self.empty_output)(output)
        dropout, norm = self.after_output
        if dropout:
            drop = getattr(self, dropout)
            output = drop(output) if callable(drop) else nn.functional.dropout(output, drop, self.training)
        if norm:
            output = getattr(self, norm)(hidden_states + output)
        weights = None
        if self._returns_weights(kwargs.get("output_attentions")):
            weights = hidden_states.new_zeros(hidden_states.shape[0], 0, hidden_states.shape[1], keys)
        return output, weights

    def _advance(self, cache: Any, hidden_states: torch.Tensor, source: torch.Tensor | None) -> int:
        """Updates the cache with zeros, since its length may be read from this layer; returns the number of keys."""
        states = hidden_states if source is None else source
        if cache is None:
            return states.shape[1]
        layers = cache
        if hasattr(cache, "is_updated"):
            layers = cache.self_attention_cache if source is None else cache.cross_attention_cache
        if source is not None:
            # The source is the same at every step.
            if not hasattr(cache, "is_updated") or cache.is_updated.get(self.layer_idx):
                return states.shape[1]
            cache.is_updated[self.layer_idx] = True
        zeros = states.new_zeros(states.shape[0], 1, states.shape[1], self.cached_dim)
        return layers.update(zeros, zeros, self.layer_idx)[0].shape[-2]

    def _returns_weights(self, output_attentions: bool | None) -> bool:
        config = getattr(self, "config", None)
        if config is None:
            # Modules without a configuration always return weights.
            return True
        # Attention modules of headwise models have a view of the configuration.
        view, config = config, getattr(config, "_config", config)
        name = kernel_name(config)
        # The stock function for `sdpa` returns no weights; the headwise one does.
        replaced = view is not config or name != attention_kernel(config)
        return name == "eager" or (replaced and name == "sdpa" and bool(output_attentions))


def _whole_bias(module: nn.Module, hidden_states: torch.Tensor, position_bias: torch.Tensor | None, cache: Any):
    """Position biases of all original heads of T5, from the argument or computed by the layer with the table."""
    if position_bias is not None or not module.has_relative_attention_bias:
        return position_bias
    queries, past, keys = hidden_states.shape[1], 0, hidden_states.shape[1]
    if cache is not None:
        cache = cache.self_attention_cache if hasattr(cache, "is_updated") else cache
        past = cache.get_seq_length(module.layer_idx)
        # A static cache updates its length in place.
        past = past.clone() if isinstance(past, torch.Tensor) else past
        keys = cache.get_mask_sizes(queries, module.layer_idx)[0]
    return module.compute_bias(queries, keys, device=hidden_states.device, past_seen_tokens=past)


class SharedBiasT5Attention(PrunedAttention):
    """T5's attention with removed heads: selects the biases of the remaining heads, and returns those of all heads."""

    def forward(self, hidden_states: torch.Tensor, mask=None, key_value_states=None, position_bias=None, **kwargs):
        whole = _whole_bias(self, hidden_states, position_bias, given_cache(kwargs))
        own = None if whole is None else whole[:, self.kept_heads]
        output, _, weights = super().forward(
            hidden_states, mask=mask, key_value_states=key_value_states, position_bias=own, **kwargs
        )
        return output, whole, weights


class HeadlessT5Attention(HeadlessAttention):
    """T5's attention without heads: returns the position biases, which other layers share."""

    def forward(self, hidden_states: torch.Tensor, position_bias=None, **kwargs):
        whole = _whole_bias(self, hidden_states, position_bias, given_cache(kwargs))
        output, weights = super().forward(hidden_states, **kwargs)
        return output, whole, weights


class SharedBiasMPNetAttention(PrunedAttention):
    """MPNet's attention with removed heads: selects the biases of the remaining heads."""

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, position_bias=None, **kwargs):
        own = None if position_bias is None else position_bias[:, self.kept_heads]
        return super().forward(hidden_states, attention_mask, own, **kwargs)
