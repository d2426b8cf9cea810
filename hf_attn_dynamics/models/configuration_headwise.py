# Licensed under the Apache License, Version 2.0.
"""What every headwise configuration adds to its stock parent, and how it is checked."""

import copy
import difflib
from dataclasses import dataclass, fields

from .head_guidance import EDGE_ROWS, REDUCTIONS, TOKEN_SET_PATTERNS, pattern_names


GUIDANCE_DEFAULTS = {
    "fraction": 0.5,
    "patterns": ["next", "prev", "first"],
    "heads": None,
    "reduction": "row_mean",
    "edge_rows": "uniform",
    "delimiter_token_ids": None,
    "period_token_ids": None,
}


@dataclass(kw_only=True)
class HeadwiseConfigMixin:
    """Adds attention guidance to a stock configuration.

    Args:
        guidance (`dict`, *optional*): Which heads are guided towards which pattern; `None` for no guidance. Keys:

            - `fraction` (`float`, defaults to 0.5): Share λ of the heads of every layer that is guided, rounded.
            - `patterns` (`list[str]`, defaults to `["next", "prev", "first"]`): Pattern of head 0, head 1, …; the
              last one also serves the guided heads that are left. Of `next`, `prev`, `first`, `delim`, `period`,
              `self` and those registered with `register_pattern`.
            - `heads` (`dict`, *optional*): Explicit assignment in place of the two keys above: `{pattern: [heads]}`
              for every layer, or `{layer: {pattern: [heads]}}` with the guided layers only.
            - `reduction` (`str`, defaults to `"row_mean"`): How squared errors are reduced, summed over layers.
              `row_mean`: mean over a pattern's heads, rows and sentences, summed over patterns; `paper`: summed over
              heads and rows, mean over sentences; `code`: like `row_mean`, but also divided by the number of keys.
            - `edge_rows` (`str`, defaults to `"uniform"`): Target of the last row of `next` and the first of `prev`:
              `uniform` over the sentence (the paper), or `zero` (its published code).
            - `delimiter_token_ids`, `period_token_ids` (`list[int]`): Tokens that `delim` and `period` attend to;
              delimiters default to the configuration's `bos_token_id` and `eos_token_id`.

    Raises:
        ValueError: if a value above is not possible; the message names it and the way out.
    """

    guidance: dict | None = None

    def __post_init__(self, **kwargs):
        own = [field.name for field in fields(HeadwiseConfigMixin)]
        for name in kwargs:
            if meant := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
                raise ValueError(f"{type(self).__name__} has no {name!r}; did you mean {meant[0]!r}?")
        super().__post_init__(**kwargs)
        self.check_guidance()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Reads a configuration file; one of the stock parent becomes one of this class."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        stock = {parent.model_type for parent in cls.__mro__ if getattr(parent, "model_type", "")} - {cls.model_type}
        if config_dict.get("model_type") in stock:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Builds a configuration; a `guidance` among the keywords replaces that of `config_dict` before it is read."""
        if "guidance" in kwargs:
            config_dict = {**config_dict, "guidance": kwargs["guidance"]}
        return super().from_dict(config_dict, **kwargs)

    def max_positions(self) -> int:
        """Largest number of tokens that the position embeddings serve."""
        return self.max_position_embeddings

    def _completed_guidance(self, guidance: dict) -> dict:
        """`guidance` with defaults filled in, values in the types JSON gives back, and no key unknown."""
        if not isinstance(guidance, dict):
            raise ValueError(f"guidance must be a dictionary or None, got {guidance!r}.")
        if unknown := sorted(set(guidance) - set(GUIDANCE_DEFAULTS)):
            raise ValueError(f"guidance has no key {unknown[0]!r}; its keys are {', '.join(GUIDANCE_DEFAULTS)}.")
        guidance = {key: value for key, value in guidance.items() if value is not None}
        completed = {**GUIDANCE_DEFAULTS, **guidance}
        if completed["heads"] is not None:
            if given := [key for key in ("fraction", "patterns") if key in guidance]:
                raise ValueError(f"guidance takes either 'heads' or {given[0]!r}, not both: 'heads' already says all.")
            completed["fraction"] = completed["patterns"] = None
            if isinstance(completed["heads"], dict):
                # JSON knows no integer keys.
                completed["heads"] = {str(key): value for key, value in completed["heads"].items()}
        elif "patterns" not in guidance:
            completed["patterns"] = GUIDANCE_DEFAULTS["patterns"][: max(1, self._num_guided(completed["fraction"]))]
        if completed["delimiter_token_ids"] is None:
            ids = [getattr(self, name, None) for name in ("bos_token_id", "eos_token_id")]
            completed["delimiter_token_ids"] = [token for token in ids if isinstance(token, int)] or None
        return completed

    def _num_guided(self, fraction: float) -> int:
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise ValueError(f"guidance fraction must be greater than 0 and at most 1, got {fraction!r}.")
        return round(fraction * self.num_attention_heads)

    def guided_heads(self) -> dict[int, dict[str, list[int]]]:
        """Heads of each pattern in each guided layer, as `{layer: {pattern: [heads]}}`; empty without guidance.

        Raises:
            ValueError: if the assignment does not fit the model; the message names the layer, head or pattern.

        Example:
            >>> from hf_attn_dynamics import HeadwiseRobertaConfig
            >>> config = HeadwiseRobertaConfig(num_hidden_layers=1, guidance={"fraction": 0.5})
            >>> config.guided_heads()
            {0: {'next': [0], 'prev': [1], 'first': [2, 3, 4, 5]}}
        """
        if self.guidance is None:
            return {}
        guidance = self._completed_guidance(self.guidance)
        if guidance["heads"] is None:
            layout = self._default_heads(guidance)
            return dict.fromkeys(range(self.num_hidden_layers), layout)
        heads = guidance["heads"]
        if not isinstance(heads, dict) or not heads:
            raise ValueError(f"guidance heads must be {{pattern: [heads]}} or {{layer: {{…}}}}, got {heads!r}.")
        by_layer = all(key.lstrip("-").isdigit() for key in heads)
        layers = (
            {int(key): value for key, value in heads.items()}
            if by_layer
            else dict.fromkeys(range(self.num_hidden_layers), heads)
        )
        return {layer: self._checked_heads(layer, layers[layer]) for layer in sorted(layers)}

    def _default_heads(self, guidance: dict) -> dict[str, list[int]]:
        patterns, guided = guidance["patterns"], self._num_guided(guidance["fraction"])
        if not isinstance(patterns, list) or not patterns:
            raise ValueError(f"guidance patterns must be a list of names, got {patterns!r}.")
        if not guided > 0 or len(patterns) > guided:
            raise ValueError(
                f"guidance fraction {guidance['fraction']} of {self.num_attention_heads} heads guides {guided} of "
                f"them, fewer than the patterns {patterns}; raise the fraction or name fewer patterns."
            )
        layout: dict[str, list[int]] = {}
        for head in range(guided):
            layout.setdefault(patterns[min(head, len(patterns) - 1)], []).append(head)
        return self._checked_heads(0, layout)

    def _checked_heads(self, layer: int, layout: dict) -> dict[str, list[int]]:
        if not 0 <= layer < self.num_hidden_layers:
            raise ValueError(f"guidance names layer {layer}, but the model has {self.num_hidden_layers} layers.")
        if not isinstance(layout, dict):
            raise ValueError(f"guidance heads of layer {layer} must be {{pattern: [heads]}}, got {layout!r}.")
        seen: set[int] = set()
        for pattern, heads in layout.items():
            where = f"(layer {layer}, {f'head {heads[0]}' if isinstance(heads, list) and heads else 'no head'})"
            if pattern not in pattern_names():
                raise ValueError(
                    f"guidance pattern {pattern!r} {where} is not one of {', '.join(pattern_names())}; "
                    "register your own with register_pattern(), or load the model with guidance=None."
                )
            if not isinstance(heads, list) or not heads or not all(type(head) is int for head in heads):
                raise ValueError(
                    f"guidance pattern {pattern!r} of layer {layer} needs a list of heads, got {heads!r}."
                )
            for head in heads:
                if not 0 <= head < self.num_attention_heads:
                    raise ValueError(
                        f"guidance names head {head} (layer {layer}, pattern {pattern!r}), "
                        f"but a layer has {self.num_attention_heads} heads."
                    )
                if head in seen:
                    raise ValueError(
                        f"guidance names head {head} of layer {layer} twice; each head takes one pattern."
                    )
                seen.add(head)
        return {pattern: sorted(heads) for pattern, heads in layout.items()}

    def check_guidance(self):
        """Completes and checks the `guidance` entry; runs at construction, and again when a model is built.

        The second time is for values assigned in between, as `from_pretrained(…, guidance=…)` does.

        Raises:
            ValueError: names the offending value and the way out.
        """
        if self.guidance is None:
            return
        if getattr(self, "is_decoder", False):
            raise ValueError("guidance needs bidirectional self-attention; set is_decoder=False or guidance=None.")
        guidance = self.guidance = copy.deepcopy(self._completed_guidance(self.guidance))
        layers = self.guided_heads()
        for key, choices in (("reduction", REDUCTIONS), ("edge_rows", EDGE_ROWS)):
            if guidance[key] not in choices:
                raise ValueError(f"guidance {key} must be one of {', '.join(choices)}, got {guidance[key]!r}.")
        for pattern, key in TOKEN_SET_PATTERNS.items():
            ids = guidance[key]
            if any(pattern in layout for layout in layers.values()) and ids is None:
                raise ValueError(f"guidance pattern {pattern!r} needs the ids of its tokens: set guidance[{key!r}].")
            if ids is not None and not (
                isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < self.vocab_size for i in ids)
            ):
                raise ValueError(
                    f"guidance {key} must be a list of token ids below vocab_size {self.vocab_size}, got {ids!r}."
                )
