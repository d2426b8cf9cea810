# Licensed under the Apache License, Version 2.0.
"""Typed and checked settings of guidance, see [`HeadwiseConfigMixin`]. This file does not import PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .number_checks import is_finite
from .setting_checks import check_choice, given_settings
from .teacher_settings import TEACHER, TeacherSettings


REDUCTIONS = ("row_mean", "paper", "code")
EDGE_ROWS = ("uniform", "zero")
# Forms of targets that a batch brings, and losses between attention and a target.
TARGET_FORMS = ("keys", "weights", "sparse")
LOSSES = ("squared", "cross_entropy", "mass", "avoid")
# What computes the guidance loss: Triton where it runs, Triton, or a loop over blocks of rows.
GUIDANCE_KERNELS = ("auto", "triton", "blocks")
COLUMN_PREFIX = "guidance_"
WEIGHTS_SUFFIX = "_weights"
# Names of targets whose columns would have the names of arguments or outputs of a forward pass.
RESERVED_TARGETS = ("counts", "kernel", "loss", "losses", "rows", "weight")
# Patterns that attend to given tokens, and the settings with their ids.
TOKEN_SET_PATTERNS = {"delim": "delimiter_token_ids", "period": "period_token_ids"}
DEFAULT_PATTERNS = {
    "encoder": ["next", "prev", "first"],
    "decoder": ["prev", "first"],
    "cross": ["self", "prev", "next", "first"],
}


def check_guidance_kernel(kernel: object) -> None:
    """Raises ValueError unless it is one of `GUIDANCE_KERNELS`."""
    if kernel not in GUIDANCE_KERNELS:
        raise ValueError(f"guidance_kernel must be one of {', '.join(GUIDANCE_KERNELS)}, got {kernel!r}.")


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
        given = {key: one for key, one in given_settings(value, list(cls.KEYS), where).items() if one is not None}
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
        check_choice(self, "reduction", REDUCTIONS, where)
        check_choice(self, "edge_rows", EDGE_ROWS, where)
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


def check_each_weighted(weights: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError if a guidance loss has no weight.

    Args:
        weights (`dict`): α by the names of patterns and targets.
        names (iterable of `str`): Names whose losses are added.
    """
    if missing := [name for name in names if name not in weights]:
        raise ValueError(
            f"guidance_weight needs a weight for each name: it has those of {list(weights)}, and lacks "
            f"{', '.join(map(repr, missing))}; a weight of 0 leaves a loss out."
        )


def check_columns(guidance: dict[str, GuidanceSettings]) -> None:
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
