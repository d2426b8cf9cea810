# Licensed under the Apache License, Version 2.0.
"""What every headwise configuration adds to its stock parent, and how it is checked."""

import copy
import difflib
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .hard_coded_attention import completed_hard_coded
from .head_gates import completed_gates
from .head_sites import HeadSite, by_kind, config_value, heads_by_site, kinds_of
from .number_checks import is_finite
from .patterns import EDGE_ROWS, REDUCTIONS, TOKEN_SET_PATTERNS, pattern_names
from .saved_code import SavedCodeMixin
from .size_limits import LimitedConfigMixin


GUIDANCE_DEFAULTS = {
    "fraction": 0.5,
    "patterns": None,
    "heads": None,
    "reduction": "row_mean",
    "edge_rows": "uniform",
    "delimiter_token_ids": None,
    "period_token_ids": None,
}
DEFAULT_PATTERNS = {
    "encoder": ["next", "prev", "first"],
    "decoder": ["prev", "first"],
    "cross": ["self", "prev", "next", "first"],
}


@dataclass(kw_only=True, repr=False, eq=False)  # those of the stock class, which know all of its values
class HeadwiseConfigMixin(SavedCodeMixin, LimitedConfigMixin):
    """Adds guided, gated, removed and hard-coded heads to a stock configuration.

    Models with heads at several sites (an encoder–decoder, or a decoder with cross-attention) name the site in each of
    the values below: `{"encoder": …, "decoder": …, "cross": …}`, of which some may be left out.

    Args:
        guidance (`dict`, *optional*): Which heads are guided towards which pattern; `None` for no guidance. Keys:

            - `fraction` (`float`, defaults to 0.5): Share λ of the heads of every layer that is guided, rounded.
            - `patterns` (`list[str]`): Pattern of head 0, head 1, …; the last one also serves the guided heads that
              are left. Of `next`, `prev`, `first`, `delim`, `period`, `self` and those registered with
              `register_pattern`. By default `next`, `prev`, `first` in an encoder, `prev`, `first` in a decoder, and
              `self`, `prev`, `next`, `first` in cross-attention, cut down to the number of guided heads.
            - `heads` (`dict`, *optional*): Explicit assignment in place of the two keys above: `{pattern: [heads]}`
              for every layer, or `{layer: {pattern: [heads]}}` with the guided layers only.
            - `reduction` (`str`, defaults to `"row_mean"`): How squared errors are reduced, summed over layers.
              `row_mean`: mean over a pattern's heads, rows and sentences, summed over patterns; `paper`: summed over
              heads and rows, mean over sentences; `code`: like `row_mean`, but also divided by the number of keys
              that some row sees.
            - `edge_rows` (`str`, defaults to `"uniform"`): Target of rows without the key that `next`, `prev` or
              `self` wants, such as the last row of `next`: `uniform` over the keys that the row sees (the paper), or
              `zero` (its published code).
            - `delimiter_token_ids`, `period_token_ids` (`list[int]`): Tokens that `delim` and `period` attend to;
              delimiters default to the configuration's `bos_token_id` and `eos_token_id`.

            A row of a decoder sees the tokens up to its own, so there is no `next`, and targets are cut down to what
            the row sees: `period` is uniform over the periods so far, and a row before the first adds nothing to the
            loss. In cross-attention, rows are tokens of the target and keys those of the source: `first`, `delim`
            and `period` are the source's, and row p attends to its token p (`self`), p + 1 (`next`) or p − 1
            (`prev`). The rows that count at these sites are the tokens of `decoder_attention_mask` or, without one,
            those whose label is not -100; without labels, all. At every site, the mean over sentences is over those
            with a real token in the model's `attention_mask`.

        gates (`dict`, *optional*): Gives each head a Hard Concrete gate; `{}` for those of the paper, `None` for no
            gates. Keys:

            - `variant` (`str`, defaults to `"paper"`): Defaults of the next three keys; `paper_code` for those of
              its published code.
            - `initial_log_alpha` (`float` or `[low, high]`, defaults to 2.5): φ at the start, or where it is drawn.
            - `evaluation` (`str`, defaults to `"binary"`): Gates outside training: 0 or 1 (`binary`) or in between
              (`fractional`).
            - `penalty` (`str`, defaults to `"sum"`): Whether the penalty sums the expected open gates over gated
              modules, or takes the mean (`module_mean`).
            - `temperature` (`float`, defaults to 0.33), `limits` (`[γ, ζ]`, defaults to [-0.1, 1.1]): Of the Hard
              Concrete distribution.

        pruned_heads (`dict`, *optional*): Heads that are gone, `{layer: [heads]}`, in the numbering of a model that
            has all its heads. `num_attention_heads` stays what it was.
        hard_coded (`dict`, *optional*): Fixes attention to normal densities beside each token (You et al. 2020), in
            an encoder or the self-attention of a decoder; `{}` for those of the paper, `None` for learned attention.
            Positions count real tokens only, a density is normalised over the keys that a row sees, and there are no
            projections to queries and keys. Needs the kernels `sdpa` or `eager`, for their masks. Keys:

            - `offsets` (`list[int]`, defaults to `[-1, 1]`, in a decoder to `[-1, 0]`): Where the densities are
              centred, relative to the row's own position; shared out among the heads in equal blocks.
            - `std` (`float`, defaults to 1.0): Their standard deviation, in tokens.

    Raises:
        ValueError: if a value above is not possible; the message names it and the way out.
    """

    # What a trainer is not to collect over an evaluation: all but what the head on top gives.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "cache",
        "encoder_last_hidden_state",
        "guidance_loss",
        "gate_penalty",
        "task_losses",
        "task_loss",
    ]

    guidance: dict | None = None
    gates: dict | None = None
    pruned_heads: dict | None = None
    hard_coded: dict | None = None

    def __post_init__(self, **kwargs):
        own = [field.name for field in fields(HeadwiseConfigMixin)]
        for name in kwargs:
            if meant := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
                raise ValueError(f"{type(self).__name__} has no {name!r}; did you mean {meant[0]!r}?")
        super().__post_init__(**kwargs)
        self.check_heads()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Reads a configuration file; one of the stock parent becomes one of this class."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        # A list, since a damaged file may have anything as its type.
        known = [parent.model_type for parent in cls.__mro__ if getattr(parent, "model_type", "")]
        if config_dict.get("model_type") in known:
            config_dict["model_type"] = cls.model_type
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Builds a configuration; what keywords say of heads replaces that of `config_dict` before it is read."""
        own = {field.name: kwargs[field.name] for field in fields(HeadwiseConfigMixin) if field.name in kwargs}
        return super().from_dict({**config_dict, **own}, **kwargs)

    def code_map(self) -> dict[str, str]:
        # Not above, since that file imports this one. Named here, it is saved beside this one.
        from .headwise_classes import code_map

        return code_map(self.architecture)

    def saved_code(self) -> Any:
        from .headwise_classes import code_map

        return code_map

    def attention_sites(self) -> dict[HeadSite, int]:
        """Number of heads, removed ones included, at each site of the model."""
        kinds = ["decoder" if getattr(self, "is_decoder", False) else "encoder"]
        if getattr(self, "add_cross_attention", False):
            kinds.append("cross")
        # Read once: in configurations that takes time, and every forward pass asks.
        heads, layers = self.num_attention_heads, range(self.num_hidden_layers)
        return {HeadSite(kind, layer): heads for kind in kinds for layer in layers}

    def kept_heads(self) -> dict[HeadSite, list[int]]:
        """Heads that are left at each site, in the original numbering.

        Example:
            >>> from hf_attn_dynamics import HeadwiseRobertaConfig
            >>> config = HeadwiseRobertaConfig(num_hidden_layers=1, num_attention_heads=4, pruned_heads={0: [1]})
            >>> config.kept_heads()
            {HeadSite(kind='encoder', layer=0): [0, 2, 3]}
        """
        sites = self.attention_sites()
        removed = heads_by_site(self.pruned_heads or {}, sites, "pruned_heads", from_json=True)
        return {site: [h for h in range(count) if h not in removed.get(site, [])] for site, count in sites.items()}

    def gate_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of the gates, for each kind of site that has gates."""
        return {
            kind: completed_gates(settings, self._named("gates", kind))
            for kind, settings in self._by_site("gates").items()
        }

    def hard_coded_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of hard-coded attention, for each kind of site that has it."""
        return {
            kind: completed_hard_coded(settings, kind, self._num_heads(kind)[0], self._named("hard_coded", kind))
            for kind, settings in self._by_site("hard_coded").items()
        }

    def _by_site(self, field: str) -> dict[str, Any]:
        """Value of a field for each kind of site that it names; it must name one, unless it is `None`."""
        value, kinds = getattr(self, field), kinds_of(self.attention_sites())
        if value is None:
            return {}
        by_site = by_kind(value, kinds, field)
        if not by_site:
            raise ValueError(
                f"{field}={{}} names no site; give {{site: {{}}}} for some of {', '.join(kinds)}, or None."
            )
        return by_site

    def guidance_settings(self) -> dict[str, dict[str, Any]]:
        """Complete settings of the guidance, for each kind of site that has guided heads."""
        kinds = kinds_of(self.attention_sites())
        by_site = {} if self.guidance is None else by_kind(self.guidance, kinds, "guidance")
        return {kind: self._completed_guidance(settings, kind) for kind, settings in by_site.items()}

    def max_positions(self) -> int:
        """Largest number of tokens that the position embeddings serve."""
        return self.max_position_embeddings

    def _named(self, field: str, kind: str) -> str:
        """What the value of a field is called in messages."""
        return f"{field}[{kind!r}]" if len(kinds_of(self.attention_sites())) > 1 else field

    def _num_heads(self, kind: str) -> list[int]:
        """Number of heads in each layer of a kind, removed ones included."""
        return [count for site, count in self.attention_sites().items() if site.kind == kind]

    def _completed_guidance(self, guidance: dict, kind: str) -> dict:
        """`guidance` with defaults filled in, values in the types JSON gives back, and no key unknown."""
        name = self._named("guidance", kind)
        if not isinstance(guidance, dict):
            raise ValueError(f"{name} must be a dictionary or None, got {guidance!r}.")
        if unknown := sorted(set(guidance) - set(GUIDANCE_DEFAULTS)):
            raise ValueError(f"{name} has no key {unknown[0]!r}; its keys are {', '.join(GUIDANCE_DEFAULTS)}.")
        guidance = {key: value for key, value in guidance.items() if value is not None}
        completed = {**GUIDANCE_DEFAULTS, **guidance}
        if completed["heads"] is not None:
            if given := [key for key in ("fraction", "patterns") if key in guidance]:
                raise ValueError(f"{name} takes either 'heads' or {given[0]!r}, not both: 'heads' already says all.")
            completed["fraction"] = None
            if isinstance(completed["heads"], dict):
                # JSON knows no integer keys.
                completed["heads"] = {str(key): value for key, value in completed["heads"].items()}
        elif completed["patterns"] is None:
            guided = self._num_guided(completed["fraction"], kind)
            completed["patterns"] = DEFAULT_PATTERNS[kind][: max(1, guided)]
        if completed["delimiter_token_ids"] is None:
            ids = [getattr(self, name, None) for name in ("bos_token_id", "eos_token_id")]
            completed["delimiter_token_ids"] = [token for token in ids if isinstance(token, int)] or None
        return completed

    def _num_guided(self, fraction: float, kind: str) -> int:
        if not (is_finite(fraction) and 0 < fraction <= 1):
            name = self._named("guidance", kind)
            raise ValueError(f"{name} fraction must be greater than 0 and at most 1, got {fraction!r}.")
        return round(fraction * self._num_heads(kind)[0])

    def guided_heads(self, kind: str | None = None) -> dict[int, dict[str, list[int]]]:
        """Heads of each pattern in each guided layer of one kind of site, as `{layer: {pattern: [heads]}}`.

        Empty without guidance. Heads that are removed are not among them.

        Args:
            kind (`str`, *optional*): `encoder`, `decoder` or `cross`; if not given, the encoder, or the decoder of a
                model without one.

        Raises:
            ValueError: if the assignment does not fit the model; the message names the layer, head or pattern. Also
                if the model has no such site.

        Example:
            >>> from hf_attn_dynamics import HeadwiseRobertaConfig
            >>> config = HeadwiseRobertaConfig(num_hidden_layers=1, guidance={"fraction": 0.5})
            >>> config.guided_heads()
            {0: {'next': [0], 'prev': [1], 'first': [2, 3, 4, 5]}}
        """
        kinds = kinds_of(self.attention_sites())
        kind = kinds[0] if kind is None else kind
        if kind not in kinds:
            raise ValueError(f"kind must be one of {', '.join(kinds)}, where this model has heads, got {kind!r}.")
        settings = self.guidance_settings()
        return self.guided_heads_left(settings[kind], kind, self.kept_heads()) if kind in settings else {}

    def guided_heads_left(
        self, guidance: dict, kind: str, kept: dict[HeadSite, list[int]]
    ) -> dict[int, dict[str, list[int]]]:
        """[`guided_heads`] of one kind, from its complete `guidance` and the heads that are kept."""
        layers = {}
        for layer, layout in self._assigned_heads(guidance, kind).items():
            heads_left = kept[HeadSite(kind, layer)]
            left = {name: [h for h in heads if h in heads_left] for name, heads in layout.items()}
            if left := {name: heads for name, heads in left.items() if heads}:
                layers[layer] = left
        return layers

    def _assigned_heads(self, guidance: dict, kind: str) -> dict[int, dict[str, list[int]]]:
        """What complete `guidance` says of each layer of a kind, removed heads included."""
        every_layer = range(len(self._num_heads(kind)))
        if guidance["heads"] is None:
            return dict.fromkeys(every_layer, self._default_heads(guidance, kind))
        heads = guidance["heads"]
        if not isinstance(heads, dict) or not heads:
            name = self._named("guidance", kind)
            raise ValueError(f"{name} heads must be {{pattern: [heads]}} or {{layer: {{…}}}}, got {heads!r}.")
        by_layer = all(key.removeprefix("-").isdecimal() for key in heads)
        layers = {int(key): value for key, value in heads.items()} if by_layer else dict.fromkeys(every_layer, heads)
        return {layer: self._checked_heads(layer, layers[layer], kind) for layer in sorted(layers)}

    def _default_heads(self, guidance: dict, kind: str) -> dict[str, list[int]]:
        name, num_heads = self._named("guidance", kind), self._num_heads(kind)[0]
        patterns, guided = guidance["patterns"], self._num_guided(guidance["fraction"], kind)
        if not isinstance(patterns, list) or not patterns:
            raise ValueError(f"{name} patterns must be a list of names, got {patterns!r}.")
        if not guided > 0 or len(patterns) > guided:
            raise ValueError(
                f"{name} fraction {guidance['fraction']} of {num_heads} heads guides {guided} of them, fewer than the "
                f"patterns {patterns}; raise the fraction or name fewer patterns."
            )
        layout: dict[str, list[int]] = {}
        for head in range(guided):
            layout.setdefault(patterns[min(head, len(patterns) - 1)], []).append(head)
        return self._checked_heads(0, layout, kind)

    def _checked_heads(self, layer: int, layout: dict, kind: str) -> dict[str, list[int]]:
        name, num_heads = self._named("guidance", kind), self._num_heads(kind)
        if not 0 <= layer < len(num_heads):
            raise ValueError(f"{name} names layer {layer}, but the model has {len(num_heads)} layers.")
        if not isinstance(layout, dict):
            raise ValueError(f"{name} heads of layer {layer} must be {{pattern: [heads]}}, got {layout!r}.")
        seen: set[int] = set()
        for pattern, heads in layout.items():
            where = f"(layer {layer}, {f'head {heads[0]}' if isinstance(heads, list) and heads else 'no head'})"
            if pattern not in pattern_names():
                raise ValueError(
                    f"{name} pattern {pattern!r} {where} is not one of {', '.join(pattern_names())}; "
                    "register your own with register_pattern(), or load the model with guidance=None."
                )
            if kind == "decoder" and pattern == "next":
                raise ValueError(
                    f"{name} pattern 'next' {where} attends to the following token, which a decoder does not see; "
                    "name another pattern, such as prev."
                )
            if not isinstance(heads, list) or not heads or not all(type(head) is int for head in heads):
                raise ValueError(f"{name} pattern {pattern!r} of layer {layer} needs a list of heads, got {heads!r}.")
            for head in heads:
                if not 0 <= head < num_heads[layer]:
                    raise ValueError(
                        f"{name} names head {head} (layer {layer}, pattern {pattern!r}), "
                        f"but a layer has {num_heads[layer]} heads."
                    )
                if head in seen:
                    raise ValueError(f"{name} names head {head} of layer {layer} twice; each head takes one pattern.")
                seen.add(head)
        return {pattern: sorted(heads) for pattern, heads in layout.items()}

    def check_heads(self) -> None:
        """Completes and checks what is said of heads; runs at construction, and again when a model is built.

        The second time is for values assigned in between, as `from_pretrained(…, guidance=…)` does.

        Raises:
            ValueError: names the offending value and the way out.
        """
        kinds = kinds_of(self.attention_sites())
        if self.pruned_heads is not None:
            removed = heads_by_site(self.pruned_heads, self.attention_sites(), "pruned_heads", from_json=True)
            self.pruned_heads = config_value(removed, kinds)
        if self.gates is not None:
            settings = self.gate_settings()
            self.gates = settings if len(kinds) > 1 else settings[kinds[0]]
        hard_coded = self.hard_coded_settings()
        if hard_coded:
            self.hard_coded = hard_coded if len(kinds) > 1 else hard_coded[kinds[0]]
        if self.guidance is not None:
            settings = copy.deepcopy(self.guidance_settings())
            for kind, guidance in settings.items():
                if kind in hard_coded:
                    raise ValueError(
                        f"guidance and hard_coded both name the {kind}, whose attention is then fixed and cannot be "
                        "guided; take it out of one of them."
                    )
                self._check_guidance(guidance, kind)
            self.guidance = (settings if len(kinds) > 1 else settings[kinds[0]]) if settings else None

    def _check_guidance(self, guidance: dict, kind: str) -> None:
        name, layers = self._named("guidance", kind), self._assigned_heads(guidance, kind)
        for key, choices in (("reduction", REDUCTIONS), ("edge_rows", EDGE_ROWS)):
            if guidance[key] not in choices:
                raise ValueError(f"{name} {key} must be one of {', '.join(choices)}, got {guidance[key]!r}.")
        for pattern, key in TOKEN_SET_PATTERNS.items():
            ids = guidance[key]
            if any(pattern in layout for layout in layers.values()) and ids is None:
                raise ValueError(f"{name} pattern {pattern!r} needs the ids of its tokens: set {name}[{key!r}].")
            if ids is not None and not (
                isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < self.vocab_size for i in ids)
            ):
                raise ValueError(
                    f"{name} {key} must be a list of token ids below vocab_size {self.vocab_size}, got {ids!r}."
                )
