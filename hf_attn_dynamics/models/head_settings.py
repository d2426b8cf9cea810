# Licensed under the Apache License, Version 2.0.
"""Typed and checked settings of guidance, gates, hard-coded attention and removed heads.

A configuration stores these settings as JSON; [`HeadSettings.of`] reads them. This file does not import PyTorch.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from .guidance_settings import GuidanceSettings, check_columns, target_columns
from .head_sites import HeadSite, by_kind, config_value, heads_by_site, kinds_of
from .number_checks import is_finite
from .setting_checks import check_choice, given_settings
from .teacher_settings import TEACHER
from .unit_ranges import units_by_site, units_value


FIELDS = ("guidance", "gates", "pruned_heads", "pruned_units", "added_biases", "hard_coded")  # of a configuration

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
        given = given_settings(value, [one.name for one in fields(cls)], where)
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
        check_choice(self, "evaluation", EVALUATIONS, where)
        check_choice(self, "penalty", PENALTIES, where)
        if self.unit is not None:
            check_choice(self, "unit", UNITS, where)
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

    @property
    def threshold(self) -> float:
        """φ above which a gate is open outside training.

        For binary gates, it is where P(gate = 0) = P(gate = 1); 0 for limits that are symmetric about ½.
        """
        low, high = self.limits
        if self.evaluation == "fractional":
            return math.log(-low / high)
        # Rounded, so that symmetric limits give exactly 0.
        log_ratio = round(math.log((1 - low) * -low / ((high - 1) * high)), 12)
        return 0.5 * self.temperature * log_ratio

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
        given = given_settings(value, [one.name for one in fields(cls)], where)
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
        check_columns(guidance)
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
    def names_with_loss(self) -> tuple[str, ...]:
        """[`guided_names`] of remaining heads, each of which has a summand of the guidance loss."""
        layouts = [layout for layers in self.guided_indices.values() for layout in layers.values()]
        left = {name for layout in layouts for name, heads in layout.items() if len(heads)}
        return tuple(name for name in self.guided_names if name in left or (name == TEACHER and self.taught_indices))

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

    @cached_property
    def taught_indices(self) -> dict[HeadSite, dict[int, int]]:
        """Heads of the teacher by head of the student, as an index among the remaining heads, for each layer that
        learns from a teacher; layers that learn relations only have no heads."""
        found: dict[HeadSite, dict[int, int]] = {}
        kept = self.kept_heads()
        for kind, settings in self.guidance.items():
            for layer in settings.taught.layers if settings.taught else ():
                site = HeadSite(kind, layer)
                own, taught = kept[site], settings.taught.taught.get(layer, {})
                left = {own.index(head): other for head, other in taught.items() if head in own}
                if left or (settings.taught.relations and own):
                    found[site] = left
        return found


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
