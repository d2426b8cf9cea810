# Licensed under the Apache License, Version 2.0.
"""Typed and checked settings of guidance, gates, hard-coded attention and removed heads.

A configuration stores these settings as JSON; [`HeadSettings.of`] reads them. This file does not import PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from .head_sites import HeadSite, by_kind, config_value, heads_by_site, kinds_of
from .number_checks import is_finite
from .teacher_settings import TEACHER, TeacherSettings
from .unit_ranges import units_by_site, units_value


FIELDS = ("guidance", "gates", "pruned_heads", "pruned_units", "added_biases", "hard_coded")  # of a configuration

REDUCTIONS = ("row_mean", "paper", "code")
EDGE_ROWS = ("uniform", "zero")
# Forms of targets that a batch brings, and losses between attention and a target.
TARGET_FORMS = ("keys", "weights", "sparse")
LOSSES = ("squared", "cross_entropy", "mass", "avoid")
COLUMN_PREFIX = "guidance_"
WEIGHTS_SUFFIX = "_weights"
# Names of targets whose columns would have the names of arguments or outputs of a forward pass.
RESERVED_TARGETS = ("counts", "loss", "losses", "rows", "weight")
# Patterns that attend to given tokens, and the settings with their ids.
TOKEN_SET_PATTERNS = {"delim": "delimiter_token_ids", "period": "period_token_ids"}
DEFAULT_PATTERNS = {
    "encoder": ["next", "prev", "first"],
    "decoder": ["prev", "first"],
    "cross": ["self", "prev", "next", "first"],
}

VARIANTS: dict[str, dict[str, Any]] = {
    # Voita et al. 2019, section 6: gates of a trained model start nearly open and are 0 or 1 after training.
    "paper": {"initial_log_alpha": 2.5, "evaluation": "binary", "penalty": "sum"},
    # Its published code: Glorot's uniform initialisation for 8 heads, fractional gates, mean over gated modules.
    "paper_code": {"initial_log_alpha": [-0.61, 0.61], "evaluation": "fractional", "penalty": "module_mean"},
}
EVALUATIONS = ("binary", "fractional")
PENALTIES = ("sum", "module_mean")
UNITS = ("group", "head")
PARTS = ("heads", "units", "blocks")

HARD_CODED_OFFSETS = {"encoder": [-1, 1], "decoder": [-1, 0]}


def _given(value: Any, keys: list[str], where: str) -> dict[str, Any]:
    """Returns the given settings of one kind of site, after checking that they are a dictionary of known keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a dictionary or None, got {value!r}.")
    if unknown := sorted(str(key) for key in set(value) - set(keys)):
        raise ValueError(f"{where} has no key {unknown[0]!r}; its keys are {', '.join(keys)}.")
    return dict(value)


def _check_choice(settings: Any, key: str, choices: tuple[str, ...], where: str) -> None:
    if getattr(settings, key) not in choices:
        raise ValueError(f"{where} {key} must be one of {', '.join(choices)}, got {getattr(settings, key)!r}.")


@dataclass(frozen=True)
class GateSettings:
    """Settings of the gates of one kind of site, see [`HeadwiseConfigMixin`]; `variant` names the defaults.

    Example:
        >>> GateSettings.from_dict({"variant": "paper_code"}).evaluation
        'fractional'
    """

    variant: str = "paper"
    initial_log_alpha: float | list[float] = VARIANTS["paper"]["initial_log_alpha"]
    evaluation: str = VARIANTS["paper"]["evaluation"]
    penalty: str = VARIANTS["paper"]["penalty"]
    temperature: float = 0.33
    limits: tuple[float, float] = (-0.1, 1.1)
    unit: str | None = None
    parts: tuple[str, ...] = ("heads",)

    @classmethod
    def from_dict(cls, value: Any, where: str = "gates", kind: str | None = None) -> GateSettings:
        """Reads settings and fills in the defaults of their variant.

        Args:
            value (`dict`): Settings that differ from the defaults.
            where (`str`): Name of the settings, for messages.
            kind (`str`, *optional*): `encoder`, `decoder` or `cross`.

        Raises:
            ValueError: if a value is invalid; the message names the key, the value and valid values.
        """
        given = _given(value, [one.name for one in fields(cls)], where)
        variant = given.get("variant", "paper")
        if not isinstance(variant, str) or variant not in VARIANTS:
            raise ValueError(f"{where} variant must be one of {', '.join(VARIANTS)}, got {variant!r}.")
        settings = {**VARIANTS[variant], **given}
        if isinstance(settings["initial_log_alpha"], (list, tuple)):
            settings["initial_log_alpha"] = list(settings["initial_log_alpha"])
        if "limits" in settings:
            settings["limits"] = check_limits(settings["limits"], where)
        if "parts" in settings:
            settings["parts"] = _checked_parts(settings["parts"], where, kind)
        completed = cls(**settings)
        completed._check(where)
        return completed

    def _check(self, where: str) -> None:
        _check_choice(self, "evaluation", EVALUATIONS, where)
        _check_choice(self, "penalty", PENALTIES, where)
        if self.unit is not None:
            _check_choice(self, "unit", UNITS, where)
        initial = self.initial_log_alpha
        is_range = isinstance(initial, list) and len(initial) == 2 and all(map(is_finite, initial))
        if not (is_range and initial[0] < initial[1]) and not (not isinstance(initial, list) and is_finite(initial)):
            raise ValueError(f"{where} initial_log_alpha must be a number or [low, high], got {initial!r}.")
        if not is_finite(self.temperature) or not self.temperature > 0:
            raise ValueError(f"{where} temperature must be a number greater than 0, got {self.temperature!r}.")

    @property
    def gates_attention(self) -> bool:
        """Whether heads or attention blocks have gates."""
        return "heads" in self.parts or "blocks" in self.parts

    @property
    def gates_feed_forward(self) -> bool:
        """Whether units or feed-forward blocks have gates."""
        return "units" in self.parts or "blocks" in self.parts

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON."""
        values = {**vars(self), "limits": list(self.limits), "parts": list(self.parts)}
        # Two keys only if they are given: one has no effect in most models, the other is unknown to earlier versions.
        left_out = {"unit": None, "parts": list(GateSettings.parts)}
        return {key: value for key, value in values.items() if key not in left_out or value != left_out[key]}


def _checked_parts(parts: Any, where: str, kind: str | None) -> tuple[str, ...]:
    """Parts of a model with gates, in the order of `PARTS`."""
    is_list = isinstance(parts, (list, tuple)) and len(parts) > 0
    if not is_list or any(part not in PARTS for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(f"{where} parts must be a list of some of {', '.join(PARTS)}, got {parts!r}.")
    if kind == "cross" and "units" in parts:
        raise ValueError(
            f"{where} parts names 'units', but cross-attention has no feed-forward units: name those of the decoder "
            "in gates['decoder']."
        )
    return tuple(part for part in PARTS if part in parts)


def check_limits(limits: Any, where: str = "gates") -> tuple[float, float]:
    """Returns the stretch interval (γ, ζ) of a Hard Concrete distribution.

    Raises:
        ValueError: unless `limits` are two numbers with γ < 0 < 1 < ζ.
    """
    if not (isinstance(limits, (list, tuple)) and len(limits) == 2 and all(map(is_finite, limits))):
        raise ValueError(f"{where} limits must be two numbers (γ, ζ), got {limits!r}.")
    if not limits[0] < 0 < 1 < limits[1]:
        raise ValueError(f"{where} limits (γ, ζ) must contain [0, 1] in their interior, got {limits!r}.")
    return tuple(limits)


@dataclass(frozen=True)
class HardCodedSettings:
    """Settings of the hard-coded attention of one kind of site, see [`HeadwiseConfigMixin`].

    Example:
        >>> HardCodedSettings.from_dict({"std": 0.5}, "decoder", num_heads=8).offsets
        [-1, 0]
    """

    offsets: list[int]
    std: float = 1.0

    @classmethod
    def from_dict(cls, value: Any, kind: str, num_heads: int, where: str = "hard_coded") -> HardCodedSettings:
        """Reads settings and fills in defaults.

        Args:
            value (`dict`): Settings that differ from the defaults.
            kind (`str`): `encoder` or `decoder`.
            num_heads (`int`): Number of heads to which the offsets are assigned.
            where (`str`): Name of the settings, for messages.

        Raises:
            ValueError: if a value is invalid; the message names the key, the value and valid values.
        """
        if kind not in HARD_CODED_OFFSETS:
            raise ValueError(
                f"{where} is not possible: cross-attention cannot be hard-coded; name "
                f"{' or '.join(HARD_CODED_OFFSETS)}."
            )
        given = _given(value, [one.name for one in fields(cls)], where)
        settings = cls(**{"offsets": HARD_CODED_OFFSETS[kind], **given})
        offsets, std = settings.offsets, settings.std
        if not isinstance(offsets, (list, tuple)) or not offsets or not all(type(offset) is int for offset in offsets):
            raise ValueError(f"{where} offsets must be a list of integers, got {offsets!r}.")
        if num_heads % len(offsets):
            raise ValueError(
                f"{where} has {len(offsets)} offsets; the number of heads, {num_heads}, must be divisible by it."
            )
        if not (is_finite(std) and std > 0):
            raise ValueError(f"{where} std must be a number greater than 0, got {std!r}.")
        return cls(list(offsets), std)

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON."""
        return {"offsets": list(self.offsets), "std": self.std}


@dataclass(frozen=True)
class GuidanceSettings:
    """Settings of the guidance of one kind of site, see [`HeadwiseConfigMixin`].

    Attributes:
        layers (`dict[int, dict[str, list[int]]]`): Heads of each pattern in each guided layer, removed ones included.
        causal (`bool`): Whether attention is causal.
        taught ([`TeacherSettings`], *optional*): What is learned from a teacher.
    """

    fraction: float | None = 0.5
    patterns: list[str] | None = None
    heads: dict | None = None
    reduction: str = "row_mean"
    edge_rows: str = "uniform"
    delimiter_token_ids: list[int] | None = None
    period_token_ids: list[int] | None = None
    targets: dict[str, str] | None = None
    loss: str | dict[str, str] | None = None
    teacher: dict | None = None
    layers: dict[int, dict[str, list[int]]] = field(default_factory=dict, repr=False)
    causal: bool = False
    taught: TeacherSettings | None = field(default=None, repr=False)

    KEYS: ClassVar[tuple[str, ...]] = (
        "fraction",
        "patterns",
        "heads",
        "reduction",
        "edge_rows",
        "delimiter_token_ids",
        "period_token_ids",
        "targets",
        "loss",
        "teacher",
    )
    # Stored only if they are given.
    OPTIONAL_KEYS: ClassVar[tuple[str, ...]] = ("targets", "loss", "teacher")

    @classmethod
    def from_dict(
        cls,
        value: Any,
        kind: str,
        num_heads: list[int],
        vocab_size: int | None,
        delimiters: list[int] | None = None,
        where: str = "guidance",
        causal: bool = False,
    ) -> GuidanceSettings:
        """Reads settings, fills in defaults and assigns heads to patterns.

        Args:
            value (`dict`): Settings that differ from the defaults; `None` values are ignored.
            kind (`str`): `encoder`, `decoder` or `cross`.
            num_heads (`list[int]`): Number of heads of each layer, removed ones included.
            vocab_size (`int`, *optional*): Vocabulary size of a text model.
            delimiters (`list[int]`, *optional*): Default of `delimiter_token_ids`.
            where (`str`): Name of the settings, for messages.
            causal (`bool`): Whether attention is causal.

        Raises:
            ValueError: if a value is invalid; the message names the key, the value and the way out.
        """
        given = {key: one for key, one in _given(value, list(cls.KEYS), where).items() if one is not None}
        settings = copy.deepcopy(given)
        if "heads" in given:
            if other := [key for key in ("fraction", "patterns") if key in given]:
                raise ValueError(f"{where} takes either 'heads' or {other[0]!r}, not both.")
            settings["fraction"] = None
            if isinstance(given["heads"], dict):
                # JSON has no integer keys.
                settings["heads"] = {str(key): one for key, one in settings["heads"].items()}
        elif "teacher" in given and not {"fraction", "patterns"} & given.keys():
            settings["fraction"] = None  # only the teacher guides
        elif "patterns" not in given:
            guided = _num_guided(given.get("fraction", cls.fraction), num_heads[0], where)
            settings["patterns"] = DEFAULT_PATTERNS["decoder" if causal else kind][: max(1, guided)]
        settings.setdefault("delimiter_token_ids", delimiters)
        _check_targets(settings.get("targets"), where)
        taught = None
        if "teacher" in given:
            taught = TeacherSettings.from_dict(given["teacher"], kind, num_heads, f"{where} {TEACHER}")
            settings["teacher"] = taught.to_dict()
        completed = cls(**settings, causal=causal, taught=taught)
        if completed.fraction is not None or completed.heads is not None or completed.patterns is not None:
            completed.layers.update(_assigned_heads(completed, num_heads, where))
        completed._check(vocab_size, where)
        return completed

    def _check(self, vocab_size: int | None, where: str) -> None:
        _check_choice(self, "reduction", REDUCTIONS, where)
        _check_choice(self, "edge_rows", EDGE_ROWS, where)
        assigned = sorted({name for layout in self.layers.values() for name in layout})
        for name in self.targets or ():
            if name not in assigned:
                raise ValueError(
                    f"{where} targets name {name!r}, which no head has; assign heads to it, or remove it."
                )
        losses = self.loss if isinstance(self.loss, dict) else {name: self.loss for name in assigned if self.loss}
        for name, loss in losses.items():
            if name not in assigned:
                raise ValueError(f"{where} loss names {name!r}, but heads have {', '.join(assigned)}.")
            if not isinstance(loss, str) or loss not in LOSSES:
                raise ValueError(f"{where} loss of {name!r} must be one of {', '.join(LOSSES)}, got {loss!r}.")
        if self.taught is not None:
            self._check_taught(where)
        for pattern, key in TOKEN_SET_PATTERNS.items():
            ids = getattr(self, key)
            is_used = any(pattern in layout for layout in self.layers.values())
            if vocab_size is None and (is_used or ids is not None):
                raise ValueError(f"{where} {key} needs a model that reads tokens; name other patterns.")
            if is_used and ids is None:
                raise ValueError(f"{where} pattern {pattern!r} needs the ids of its tokens: set {where}[{key!r}].")
            if ids is not None and not (
                isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < vocab_size for i in ids)
            ):
                raise ValueError(
                    f"{where} {key} must be a list of token ids below vocab_size {vocab_size}, got {ids!r}."
                )

    def _check_taught(self, where: str) -> None:
        """Raises ValueError if a head is guided and taught."""
        for layer, taught in self.taught.taught.items():
            for name, heads in self.layers.get(layer, {}).items():
                if both := sorted(set(heads) & taught.keys()):
                    raise ValueError(
                        f"{where} guides head {both[0]} of layer {layer} to {name!r} and to the teacher; assign it to "
                        "one of them."
                    )

    def token_ids(self, pattern: str) -> list[int] | None:
        """Ids of the tokens that a pattern attends to; `None` for positional patterns."""
        return getattr(self, TOKEN_SET_PATTERNS[pattern]) if pattern in TOKEN_SET_PATTERNS else None

    def to_dict(self) -> dict[str, Any]:
        """The settings for JSON."""
        values = {key: copy.deepcopy(getattr(self, key)) for key in self.KEYS}
        return {key: one for key, one in values.items() if key not in self.OPTIONAL_KEYS or one is not None}

    def loss_of(self, name: str) -> str:
        """Loss of the heads with this pattern or target, one of `LOSSES`."""
        loss = self.loss.get(name) if isinstance(self.loss, dict) else self.loss
        return loss or "squared"


def _check_targets(targets: Any, where: str) -> None:
    """Raises ValueError for names and forms of targets that are invalid."""
    # Imported here because patterns import PyTorch.
    from .patterns import pattern_names

    if targets is None:
        return
    if not isinstance(targets, dict) or not targets:
        raise ValueError(f"{where} targets must be {{name: form}}, got {targets!r}.")
    reserved = (*RESERVED_TARGETS, TEACHER)
    for name, form in targets.items():
        if not isinstance(name, str) or not name.isidentifier() or name in reserved:
            raise ValueError(
                f"{where} targets name {name!r}; choose a name of letters, digits and underscores, but not "
                f"{', '.join(reserved)}."
            )
        if name in pattern_names():
            raise ValueError(f"{where} targets name {name!r}, which is a pattern; choose another name.")
        if not isinstance(form, str) or form not in TARGET_FORMS:
            raise ValueError(f"{where} target {name!r} must be one of {', '.join(TARGET_FORMS)}, got {form!r}.")


def target_columns(name: str, form: str) -> tuple[str, ...]:
    """Columns of a batch with the target of this name and form.

    Example:
        >>> target_columns("syntax", "keys"), target_columns("words", "sparse")
        (('guidance_syntax',), ('guidance_words', 'guidance_words_weights'))
    """
    column = COLUMN_PREFIX + name
    return (column, column + WEIGHTS_SUFFIX) if form == "sparse" else (column,)


def _num_guided(fraction: Any, num_heads: int, where: str) -> int:
    if not (is_finite(fraction) and 0 < fraction <= 1):
        raise ValueError(f"{where} fraction must be greater than 0 and at most 1, got {fraction!r}.")
    return round(fraction * num_heads)


def _assigned_heads(guidance: GuidanceSettings, num_heads: list[int], where: str) -> dict[int, dict[str, list[int]]]:
    """Heads of each pattern in each guided layer."""
    every_layer = range(len(num_heads))
    if guidance.heads is None:
        layout = _default_heads(guidance, num_heads, where)
        return dict.fromkeys(every_layer, layout)
    heads = guidance.heads
    if not isinstance(heads, dict) or not heads:
        raise ValueError(f"{where} heads must be {{pattern: [heads]}} or {{layer: {{…}}}}, got {heads!r}.")
    by_layer = all(key.removeprefix("-").isdecimal() for key in heads)
    layers = {int(key): one for key, one in heads.items()} if by_layer else dict.fromkeys(every_layer, heads)
    return {layer: _checked_heads(layer, layers[layer], guidance, num_heads, where) for layer in sorted(layers)}


def _default_heads(guidance: GuidanceSettings, num_heads: list[int], where: str) -> dict[str, list[int]]:
    patterns, guided = guidance.patterns, _num_guided(guidance.fraction, num_heads[0], where)
    if not isinstance(patterns, list) or not patterns:
        raise ValueError(f"{where} patterns must be a list of names, got {patterns!r}.")
    if not guided > 0 or len(patterns) > guided:
        raise ValueError(
            f"{where} fraction {guidance.fraction} of {num_heads[0]} heads guides {guided} heads, fewer than the "
            f"patterns {patterns}; raise the fraction or name fewer patterns."
        )
    layout: dict[str, list[int]] = {}
    for head in range(guided):
        layout.setdefault(patterns[min(head, len(patterns) - 1)], []).append(head)
    return _checked_heads(0, layout, guidance, num_heads, where)


def _checked_heads(
    layer: int, layout: Any, guidance: GuidanceSettings, num_heads: list[int], where: str
) -> dict[str, list[int]]:
    # Imported here because patterns import PyTorch.
    from .patterns import pattern_names

    if not 0 <= layer < len(num_heads):
        raise ValueError(f"{where} names layer {layer}, but the model has {len(num_heads)} layers.")
    if not isinstance(layout, dict):
        raise ValueError(f"{where} heads of layer {layer} must be {{pattern: [heads]}}, got {layout!r}.")
    seen: set[int] = set()
    known = [*pattern_names(), *(guidance.targets or ())]
    for pattern, heads in layout.items():
        place = f"(layer {layer}, {f'head {heads[0]}' if isinstance(heads, list) and heads else 'no head'})"
        if pattern not in known:
            raise ValueError(
                f"{where} pattern {pattern!r} {place} is not one of {', '.join(known)}; "
                "register your own with register_pattern(), name it in targets if batches bring it, or load the model "
                "with guidance=None."
            )
        if guidance.causal and pattern == "next":
            raise ValueError(
                f"{where} pattern 'next' {place} attends to the next token, which causal attention masks; "
                "choose another pattern, such as prev."
            )
        if not isinstance(heads, list) or not heads or not all(type(head) is int for head in heads):
            raise ValueError(f"{where} pattern {pattern!r} of layer {layer} needs a list of heads, got {heads!r}.")
        for head in heads:
            if not 0 <= head < num_heads[layer]:
                raise ValueError(
                    f"{where} names head {head} (layer {layer}, pattern {pattern!r}), "
                    f"but a layer has {num_heads[layer]} heads."
                )
            if head in seen:
                raise ValueError(f"{where} names head {head} of layer {layer} twice; each head takes one pattern.")
            seen.add(head)
    return {pattern: sorted(heads) for pattern, heads in layout.items()}


@dataclass(frozen=True)
class HeadSettings:
    """All settings of the heads of a model.

    Args:
        sites (`dict[HeadSite, int]`): Number of heads, removed ones included, at each site.
        removed (`dict[HeadSite, list[int]]`): Removed heads, without empty sites.
        removed_units (`dict[HeadSite, list[int]]`): Removed feed-forward units, without empty sites.
        gates (`dict[str, GateSettings]`), hard_coded (`dict[str, HardCodedSettings]`), guidance (`dict[str,
            GuidanceSettings]`): Settings by kind of site.
    """

    sites: dict[HeadSite, int]
    removed: dict[HeadSite, list[int]]
    removed_units: dict[HeadSite, list[int]]
    gates: dict[str, GateSettings]
    hard_coded: dict[str, HardCodedSettings]
    guidance: dict[str, GuidanceSettings]
    _source: tuple = field(repr=False, compare=False, default=())

    @classmethod
    def of(cls, config: Any) -> HeadSettings:
        """Reads the settings of a configuration.

        Raises:
            ValueError: if a value is invalid; the message names it and the way out.
        """
        sites = config.attention_sites()
        kinds = kinds_of(sites)
        counts = {kind: [count for site, count in sites.items() if site.kind == kind] for kind in kinds}

        def named(name: str, kind: str) -> str:
            return f"{name}[{kind!r}]" if len(kinds) > 1 else name

        removed = {}
        if config.pruned_heads is not None:
            removed = heads_by_site(config.pruned_heads, sites, "pruned_heads", from_json=True)
        removed_units = {}
        if config.pruned_units is not None:
            # The model checks the number of units, which configurations name differently.
            blocks = {site: None for site in sites if site.kind != "cross"}
            removed_units = units_by_site(config.pruned_units, blocks, "pruned_units", from_json=True)
        if not isinstance(config.added_biases, bool):
            raise ValueError(f"added_biases must be True or False, got {config.added_biases!r}.")
        gates = {
            kind: GateSettings.from_dict(value, named("gates", kind), kind)
            for kind, value in _by_site(config, "gates", kinds).items()
        }
        hard_coded = {
            kind: HardCodedSettings.from_dict(value, kind, counts[kind][0], named("hard_coded", kind))
            for kind, value in _by_site(config, "hard_coded", kinds).items()
        }
        ids = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
        delimiters = [token for token in ids if isinstance(token, int)] or None
        guidance = {}
        for kind, value in ({} if config.guidance is None else by_kind(config.guidance, kinds, "guidance")).items():
            if kind in hard_coded:
                raise ValueError(
                    f"guidance and hard_coded both name the {kind}, but hard-coded attention cannot be guided; remove "
                    "it from one of them."
                )
            guidance[kind] = GuidanceSettings.from_dict(
                value,
                kind,
                counts[kind],
                getattr(config, "vocab_size", None),
                delimiters,
                named("guidance", kind),
                kind in config.causal_kinds(),
            )
        _check_columns(guidance)
        settings = cls(sites, removed, removed_units, gates, hard_coded, guidance, _values_of(config))
        # Compiled code cannot enter the lock of a cached property.
        for name, attribute in vars(cls).items():
            if isinstance(attribute, cached_property):
                getattr(settings, name)
        return settings

    def is_of(self, config: Any) -> bool:
        """Whether the configuration still has the values that these settings were read from."""
        return self._source == _values_of(config, copied=False)

    @property
    def kinds(self) -> list[str]:
        """Kinds of sites with heads, in the order encoder, decoder, cross."""
        return kinds_of(self.sites)

    def to_config(self) -> dict[str, Any]:
        """The settings as fields of a configuration, defaults filled in."""

        def value(settings: dict[str, Any]) -> dict | None:
            by_site = {kind: one.to_dict() for kind, one in settings.items()}
            return (by_site if len(self.kinds) > 1 else by_site[self.kinds[0]]) if by_site else None

        return {
            "guidance": value(self.guidance),
            "gates": value(self.gates),
            "pruned_heads": config_value(self.removed, self.kinds),
            "pruned_units": units_value(self.removed_units, [kind for kind in self.kinds if kind != "cross"]),
            "hard_coded": value(self.hard_coded),
        }

    def kept_heads(self) -> dict[HeadSite, list[int]]:
        """Remaining heads at each site, in the original numbering."""
        return {
            site: [head for head in range(count) if head not in self.removed.get(site, ())]
            for site, count in self.sites.items()
        }

    def guided_heads(self, kind: str) -> dict[int, dict[str, list[int]]]:
        """Heads of each pattern in each guided layer of one kind of site, without removed heads."""
        layers = {}
        for layer, layout in self.guidance[kind].layers.items() if kind in self.guidance else ():
            gone = self.removed.get(HeadSite(kind, layer), ())
            left = {name: [head for head in heads if head not in gone] for name, heads in layout.items()}
            if left := {name: heads for name, heads in left.items() if heads}:
                layers[layer] = left
        return layers

    @cached_property
    def target_columns(self) -> frozenset[str]:
        """Columns of a batch that targets read."""
        targets = [target for settings in self.guidance.values() for target in (settings.targets or {}).items()]
        return frozenset(column for name, form in targets for column in target_columns(name, form))

    @cached_property
    def guided_names(self) -> tuple[str, ...]:
        """Patterns and targets of guided heads, removed ones included, and `teacher`, if the model has one: the names
        to which weights and schedules refer."""
        layouts = [layout for settings in self.guidance.values() for layout in settings.layers.values()]
        teacher = (TEACHER,) if self.is_taught else ()
        return (*dict.fromkeys(name for layout in layouts for name in layout), *teacher)

    @property
    def is_taught(self) -> bool:
        """Whether the model learns the attention of a teacher."""
        return any(settings.taught is not None for settings in self.guidance.values())

    @cached_property
    def guided_indices(self) -> dict[str, dict[int, dict[str, list[int]]]]:
        """[`guided_heads`] by kind of site, as indices among the remaining heads."""
        kept = self.kept_heads()
        return {
            kind: {
                layer: {name: [kept[HeadSite(kind, layer)].index(h) for h in heads] for name, heads in layout.items()}
                for layer, layout in self.guided_heads(kind).items()
            }
            for kind in self.guidance
        }

    @property
    def taught_indices(self) -> dict[str, dict[int, dict[int, int]]]:
        """Heads of the teacher by layer and head of the student, by kind of site, as an index among the remaining
        heads; layers that learn relations only have none."""
        found: dict[str, dict[int, dict[int, int]]] = {}
        if not self.is_taught:
            return found
        kept = self.kept_heads()
        for kind, settings in self.guidance.items():
            for layer in settings.taught.layers if settings.taught else ():
                own, taught = kept[HeadSite(kind, layer)], settings.taught.taught.get(layer, {})
                left = {own.index(head): other for head, other in taught.items() if head in own}
                if left or (settings.taught.relations and own):
                    found.setdefault(kind, {})[layer] = left
        return found


def check_guided_names(argument: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raises ValueError if an argument names a pattern or target that no head is guided to.

    Args:
        argument (`str`): Name of the argument, for messages; its value may follow.
        given (iterable of `str`): The names in it.
        names (collection of `str`): `guided_names` of the model.
    """
    for name in given:
        if name not in names:
            raise ValueError(f"{argument} names {name!r}, but heads are guided to {', '.join(names)}.")


def _check_columns(guidance: dict[str, GuidanceSettings]) -> None:
    """Raises ValueError if two targets would read the same column of a batch."""
    readers: dict[str, str] = {}
    for kind, settings in guidance.items():
        for name, form in (settings.targets or {}).items():
            for column in target_columns(name, form):
                if column in readers:
                    raise ValueError(
                        f"guidance targets {readers[column]!r} and {name!r} ({kind}) both read the column {column!r}; "
                        "give each target of each site its own name."
                    )
                readers[column] = name


def _by_site(config: Any, name: str, kinds: list[str]) -> dict[str, Any]:
    """Values of a field by kind of site; empty if the field is `None`."""
    value = getattr(config, name)
    if value is None:
        return {}
    by_site = by_kind(value, kinds, name)
    if not by_site:
        raise ValueError(f"{name}={{}} has no sites; pass {{site: {{}}}} for some of {', '.join(kinds)}, or None.")
    return by_site


def _values_of(config: Any, copied: bool = True) -> tuple:
    values = tuple(getattr(config, name) for name in FIELDS)
    return copy.deepcopy(values) if copied else values
