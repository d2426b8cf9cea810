# Licensed under the Apache License, Version 2.0.
"""Cost of a model, in seconds or FLOPs, as a function of the heads and units that its layers keep.

The cost of a model is the cost of each attention block, which depends on its number of heads, plus the cost of each
feed-forward block, which depends on its number of units, plus a constant: embeddings, norms, residual connections and
the head of the model. A block without heads or units costs nothing.
"""

import importlib
import json
import math
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from .architecture_sizes import architecture_sizes, differences
from .device_names import device_name
from .head_roles import locate_heads
from .head_settings import PARTS
from .head_sites import SITE_KINDS, HeadSite
from .number_checks import is_finite, is_integer
from .precision import at_least_single
from .unit_roles import locate_units


if TYPE_CHECKING:
    # Within `try`, since Transformers asks for all other libraries that saved code imports.
    try:
        import pandas
    except ImportError:
        pandas = None


QUANTITIES = {"seconds": ("ms", 1e-3), "flops": ("GFLOPs", 1e9)}  # unit of tables, and its size
PHASES = ("forward", "decode")
# Parts of a model that can be removed, and the blocks whose cost they determine.
BLOCKS = {"heads": ("attention",), "units": ("feed_forward",), "blocks": ("attention", "feed_forward")}

Grid = list[list[float]]  # pairs of a number of heads or units and a cost
# Expected number of heads or units of an open block, and the probability that the block is open.
Expected = tuple[torch.Tensor, torch.Tensor | None]


class CountedGate(Protocol):
    """A gate with the expected number of its heads or units, see [`CostTable.expected`]."""

    def expected_counts(self) -> Expected: ...


@dataclass(frozen=True)
class CostTable:
    """Cost of one block of each kind by its number of heads or units; `print` it for what pruning can gain.

    `measure_latency_table` measures such a table, and `count_flops_table` counts one. The cost of a model is the sum
    of its blocks and `rest`, so predicted costs are exact for FLOPs and approximate for seconds. Costs between two
    points of a grid are interpolated linearly.

    Args:
        quantity (`str`): `seconds` or `flops`.
        rest (`float`): Cost of a model whose blocks have neither heads nor units.
        attention (`dict[str, list]`): Pairs of a number of heads and the cost of one attention block with so many, by
            kind of site, from 0 to all heads in ascending order.
        feed_forward (`dict[str, list]`): The same for units and feed-forward blocks; empty if units cannot be pruned.
        layers (`dict[str, int]`): Number of attention modules by kind of site. Layers that share their modules, as in
            ALBERT, count once: the cost of a block then is the cost of all its runs.
        device, dtype (`str`): Name of the device and data type of the weights; the device is empty for FLOPs.
        threads, batch (`int`): Number of CPU threads, and sentences or images of a batch.
        length (`int`, *optional*): Tokens per sentence; tokens in the cache for `decode`; `None` for images.
        phase (`str`): `forward` is a forward pass on whole sentences, `decode` on one token with a filled cache.
        fingerprint (`dict`): Class and sizes of the model, see `architecture_sizes`.
        kernel (`str`): Name of the attention function.

    Raises:
        ValueError: if a value is not of this form.

    Example:
        >>> heads, units = {"encoder": [[0, 0], [4, 20]]}, {"encoder": [[0, 0], [8, 40]]}
        >>> table = CostTable("flops", 10, heads, units, {"encoder": 2})
        >>> table.dense
        130
        >>> table.cost({HeadSite("encoder", 1): 1}, {HeadSite("encoder", 0): 0})
        75.0
        >>> {part: round(speedup, 2) for part, speedup in table.largest_speedup().items()}
        {'heads': 1.44, 'units': 2.6, 'blocks': 13.0}
    """

    quantity: str
    rest: float
    attention: dict[str, Grid]
    feed_forward: dict[str, Grid]
    layers: dict[str, int]
    device: str = ""
    dtype: str = "float32"
    threads: int = 1
    batch: int = 1
    length: int | None = None
    phase: str = "forward"
    fingerprint: dict[str, Any] = field(default_factory=dict)
    kernel: str = ""

    def __post_init__(self):
        for name, known in (("quantity", QUANTITIES), ("phase", PHASES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        if not is_finite(self.rest) or self.rest < 0:
            raise ValueError(f"rest must be a number of at least 0, got {self.rest!r}.")
        if not self.attention or self.attention.keys() != self.layers.keys() or not self._kinds_are_known():
            raise ValueError(
                f"attention and layers must have the same kinds of sites out of {', '.join(SITE_KINDS)}, and "
                f"feed_forward no other ones, got {list(self.attention)}, {list(self.layers)} and "
                f"{list(self.feed_forward)}."
            )
        for kind, count in self.layers.items():
            if not is_integer(count) or count < 1:
                raise ValueError(f"layers of {kind} must be an integer greater than 0, got {count!r}.")
        for part in ("attention", "feed_forward"):
            for kind, grid in getattr(self, part).items():
                _check_grid(f"{part} of {kind}", grid)
        if not self.dense:
            raise ValueError("the dense model has no cost.")

    def _kinds_are_known(self) -> bool:
        return self.attention.keys() <= {*SITE_KINDS} and self.feed_forward.keys() <= self.attention.keys() - {"cross"}

    def attention_cost(self, kind: str, heads: Any) -> Any:
        """Cost of one attention block with this number of heads.

        Args:
            kind (`str`): `encoder`, `decoder` or `cross`.
            heads (`float` or `torch.Tensor`): Number of heads; not necessarily whole.

        Returns:
            `float`, or `torch.Tensor` of the same shape: differentiable, float32 (float64 in double precision).
        """
        return _at(self._grid("attention", kind), heads)

    def feed_forward_cost(self, kind: str, units: Any) -> Any:
        """Cost of one feed-forward block with this number of units, see [`attention_cost`]."""
        return _at(self._grid("feed_forward", kind), units)

    def _grid(self, part: str, kind: str) -> Grid:
        grids = getattr(self, part)
        if kind not in grids:
            raise ValueError(f"the table has no {part} blocks of {kind}, but of {', '.join(grids) or 'no kind'}.")
        return grids[kind]

    @property
    def dense(self) -> float:
        """Cost of the dense model."""
        return self.cost({}, {})

    def cost(self, heads: Mapping[HeadSite, int], units: Mapping[HeadSite, int]) -> float:
        """Cost of a model.

        Args:
            heads (`dict[HeadSite, int]`): Number of heads by site; missing sites keep all.
            units (`dict[HeadSite, int]`): Number of units by site; missing sites keep all.

        Raises:
            ValueError: if the table has no such site.
        """
        total = self.rest
        for part, counts in (("attention", heads), ("feed_forward", units)):
            total += sum(_at(self._grid(part, site.kind), count) for site, count in counts.items())
            given = self._given(part, counts)
            total += sum((self.layers[kind] - given[kind]) * grid[-1][1] for kind, grid in getattr(self, part).items())
        return total

    def _given(self, part: str, sites: Iterable[HeadSite]) -> Counter:
        """Number of given sites by kind."""
        given = Counter()
        for kind, layer in sites:
            self._grid(part, kind)
            if not 0 <= layer < self.layers[kind]:
                raise ValueError(f"the table has {self.layers[kind]} layers of {kind}, but no layer {layer}.")
            given[kind] += 1
        return given

    def cost_of(self, model: nn.Module) -> float:
        """Cost of a model with the heads and units that its layers keep.

        Raises:
            ValueError: if the table belongs to another architecture.
        """
        self.check_fits(model)
        heads = {layer.site: len(layer.heads) for layer in locate_heads(model)}
        located = locate_units(model) if self.feed_forward else []
        return self.cost(heads, {layer.site: len(layer.units) for layer in located})

    def speedup_of(self, model: nn.Module) -> float:
        """Cost of the dense model over the cost of a model."""
        return self._speedup(self.cost_of(model))

    def _speedup(self, cost: float) -> float:
        return self.dense / cost if cost else math.inf

    def expected(
        self, head_gates: Mapping[HeadSite, CountedGate], unit_gates: Mapping[HeadSite, CountedGate]
    ) -> torch.Tensor:
        """[`expected_from`] of the gates of a model.

        Args:
            head_gates, unit_gates (`dict[HeadSite, HardConcreteGate]`): Gates by site, with a method `expected_counts`
                that returns the expected number of heads or units of an open block, and the probability that the block
                is open (`None` if it has no gate).
        """
        return self.expected_from(
            {site: gate.expected_counts() for site, gate in head_gates.items()},
            {site: gate.expected_counts() for site, gate in unit_gates.items()},
        )

    def expected_from(self, heads: Mapping[HeadSite, Expected], units: Mapping[HeadSite, Expected]) -> torch.Tensor:
        """Expected cost of a model with gates, as a fraction of the dense model's cost.

        The expected cost of a block is `P(open) · cost(E[heads | open])`, which is exact where the cost is linear.

        Args:
            heads (`dict[HeadSite, tuple]`): Expected number of heads given that the block is open, and the probability
                that it is open or `None` for 1, both scalar tensors; missing sites keep all heads.
            units (`dict[HeadSite, tuple]`): The same for units.

        Returns:
            `torch.Tensor`: a differentiable scalar, float32 (float64 in double precision).

        Raises:
            ValueError: if no site is given, or the table has no such site.

        Example:
            >>> table = CostTable("flops", 10, {"encoder": [[0, 0], [4, 20]]}, {}, {"encoder": 2})
            >>> one = table.expected_from({HeadSite("encoder", 0): (torch.tensor(2.0), torch.tensor(0.5))}, {})
            >>> one.item()  # (10 + 0.5 · 10 + 20) / 50
            0.699...
        """
        terms, constant = [], self.rest
        for part, counts in (("attention", heads), ("feed_forward", units)):
            given = self._given(part, counts)
            for kind, grid in getattr(self, part).items():
                constant += (self.layers[kind] - given[kind]) * grid[-1][1]
                if given[kind]:
                    terms.append(_expected(grid, [pair for site, pair in counts.items() if site.kind == kind]))
        if not terms:
            raise ValueError("expected_from() needs the expected number of heads or units of a site.")
        return (torch.stack([term.to(terms[0].device) for term in terms]).sum() + constant) / self.dense

    def largest_speedup(self, parts: Iterable[str] = PARTS) -> dict[str, float]:
        """Speed-up of a model that loses all heads, all units, or both.

        Args:
            parts (`list[str]`): `heads`, `units`, and `blocks` for both.

        Returns:
            `dict[str, float]`: speed-up by part.

        Raises:
            ValueError: if a part has another name, or the table has no units.
        """
        return {part: self._speedup(self._left([part])) for part in self._checked_parts(parts)}

    def _checked_parts(self, parts: Iterable[str]) -> list[str]:
        parts = [parts] if isinstance(parts, str) else list(parts)
        if not parts or not set(parts) <= set(PARTS):
            raise ValueError(f"parts must be some of {', '.join(PARTS)}, got {parts!r}.")
        if "units" in parts and not self.feed_forward:
            raise ValueError(
                "parts has units, but the units of this model cannot be pruned, for a reason that "
                "locate_units(model) raises; its heads can."
            )
        return parts

    def _left(self, parts: Iterable[str], kinds: Iterable[str] = SITE_KINDS) -> float:
        """Cost of a model that has lost all these parts at sites of these kinds."""
        blocks = {block for part in parts for block in BLOCKS[part]}
        total = self.rest
        for block in ("attention", "feed_forward"):
            for kind, grid in getattr(self, block).items():
                total += self.layers[kind] * grid[0 if block in blocks and kind in kinds else -1][1]
        return total

    def check_target(self, target: float, parts: Iterable[str] = ("heads",)) -> None:
        """Checks that pruning can reach a speed-up.

        Args:
            target (`float`): Cost of the dense model over the cost of the pruned model.
            parts (`list[str]`): What may be removed: `heads`, `units` and `blocks`.

        Raises:
            ValueError: if `target` is not a number greater than 1, or cannot be reached; the message says what can be.
        """
        parts = self._checked_parts(parts)
        if not is_finite(target) or target <= 1:
            raise ValueError(f"a target speed-up must be a number greater than 1, got {target!r}.")
        largest = self._speedup(self._left(parts))
        if target <= largest:
            return
        alone = f"{parts[0]} alone" if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        message = f"{target:g} × cannot be reached by {alone}: at most {_below(largest)} ×"
        both = self._speedup(self._left(["blocks"]))
        if both > largest and self.feed_forward:
            message += f"; by heads and units: {_below(both)} ×"
        raise ValueError(f"{message} ({self._setting()}).")

    def check_fits(
        self,
        model: nn.Module | None = None,
        device: str | torch.device | None = None,
        batch: int | None = None,
        length: int | None = None,
        phase: str | None = None,
        dtype: torch.dtype | str | None = None,
        threads: int | None = None,
    ) -> None:
        """Checks that the table belongs to a model and a setting; what is `None` is not checked.

        FLOPs depend neither on the device nor on data type and threads.

        Args:
            model (`PreTrainedModel`, *optional*): The model; heads and units may have been removed.
            device (`str` or `torch.device`, *optional*): Device.
            batch, length (`int`, *optional*): Shape of a batch.
            phase (`str`, *optional*): `forward` or `decode`.
            dtype (`torch.dtype` or `str`, *optional*): Data type of the weights.
            threads (`int`, *optional*): Number of CPU threads.

        Raises:
            ValueError: if it does not; the message names each difference.
        """
        wanted = {"batch": batch, "length": length, "phase": phase}
        if self.quantity == "seconds":
            wanted["dtype"] = None if dtype is None else str(dtype).removeprefix("torch.")
            wanted["device"] = None if device is None else device_name(device)
            wanted["threads"] = threads if self.device.startswith("cpu") else None
        wrong = [
            f"{name} {getattr(self, name)}, not {value}"
            for name, value in wanted.items()
            if value is not None and value != getattr(self, name)
        ]
        if model is not None:
            wrong += differences(self.fingerprint, architecture_sizes(model))
        if wrong:
            raise ValueError(
                f"the cost table does not fit: it was made for {'; '.join(wrong)}. Measure a new table with "
                "measure_latency_table(), or count one with count_flops_table()."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CostTable":
        """The inverse of `to_dict`.

        Raises:
            ValueError: if `values` is not a table.
        """
        names = {one.name for one in fields(cls)}
        if not isinstance(values, Mapping) or values.keys() != names:
            raise ValueError(f"a cost table must be a dictionary with the keys {', '.join(sorted(names))}.")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Writes the table as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A killed process leaves no half of a table.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "CostTable":
        """Reads a table that `save` wrote.

        Raises:
            ValueError: if the file does not hold a table; the message names it.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} does not hold a cost table: {error}") from error

    def to_pandas(self) -> "pandas.DataFrame":
        """The points of all grids: block, kind of site, heads or units left, cost of one block, and its fraction.

        Raises:
            ImportError: if pandas is not installed.
        """
        # By name, so that code saved with checkpoints does not require pandas.
        pandas = importlib.import_module("pandas")
        rows = [
            (part, kind, count, cost, cost / self.dense)
            for part in ("attention", "feed_forward")
            for kind, grid in getattr(self, part).items()
            for count, cost in grid
        ]
        return pandas.DataFrame(rows, columns=["block", "site", "left", self.quantity, "fraction_of_dense"])

    def _rows(self) -> list[list[str]]:
        """Cost, percentage and largest speed-up of what can be removed, and of what cannot."""
        _, unit = QUANTITIES[self.quantity]
        rows, dense = [], self.dense
        for part in PARTS if self.feed_forward else ("heads",):
            left = self._left([part])
            rows.append((f"all {part}", dense - left, f"{self._speedup(left):.2f} ×"))
            if len(self.layers) > 1 and part != "blocks":
                by_kind = {kind: self._left([part], [kind]) for kind in getattr(self, BLOCKS[part][0])}
                rows += [(f"  {kind}", dense - own, f"{self._speedup(own):.2f} ×") for kind, own in by_kind.items()]
        rows += [("the rest", left, ""), ("dense model", dense, "")]
        return [[name, f"{cost / unit:,.3f}", f"{100 * cost / dense:.1f}", most] for name, cost, most in rows]

    def _header(self) -> list[str]:
        return ["", QUANTITIES[self.quantity][0], "% of dense", "largest speed-up"]

    def _setting(self) -> str:
        """The model and the batch in words."""
        shape = f"batch of {self.batch}" + (f" × {self.length} tokens" if self.length else "")
        if self.phase == "decode":
            shape = f"decoding a token, batch of {self.batch}, {self.length} tokens in the cache"
        parts = [self.fingerprint.get("class", ""), shape]
        if self.quantity == "seconds":
            threads = f"{self.threads} thread{'s' * (self.threads != 1)}" if self.device.startswith("cpu") else ""
            parts += [self.dtype, self.kernel, self.device, threads]
        return ", ".join(filter(None, parts))

    def __str__(self) -> str:
        rows = [self._header(), *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "| " + " | ".join([f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:]))]) + " |"
            for row in rows
        ]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([lines[0], rule, *lines[1:], "", f"{self._setting()}."])

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        header = "".join(f"<th>{escape(name)}</th>" for name in self._header())
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{"right" if i else "left"}">{escape(cell)}</td>' for i, cell in enumerate(row)
            )
            + "</tr>"
            for row in self._rows()
        )
        return f"<div>{escape(self._setting())}</div><table><tr>{header}</tr>{body}</table>"


def _check_grid(name: str, grid: Any) -> None:
    """Raises ValueError unless a grid has ascending numbers from 0, and costs of at least 0."""
    pairs = [pair for pair in grid if len(pair) == 2 and is_integer(pair[0]) and is_finite(pair[1]) and pair[1] >= 0]
    numbers = [pair[0] for pair in pairs]
    if len(pairs) < max(len(grid), 2) or numbers[0] or numbers != sorted(set(numbers)):
        raise ValueError(
            f"{name} must be pairs of a number, from 0 in ascending order, and a cost of at least 0, got {grid!r}."
        )


def _at(grid: Grid, count: Any) -> Any:
    """Cost at a number of heads or units, or at each of a tensor of them."""
    if torch.is_tensor(count):
        return _interpolated(grid, at_least_single(count))
    if not 0 <= count <= grid[-1][0]:
        raise ValueError(f"the table has costs of 0 to {grid[-1][0]} heads or units, not of {count}.")
    index = max(bisect_left(grid, count, key=lambda pair: pair[0]), 1)
    (low, cost), (high, cost_high) = grid[index - 1], grid[index]
    if count == high:
        return cost_high
    # Costs in FLOPs are integers, whose product is exact before the division.
    return cost + (cost_high - cost) * (count - low) / (high - low)


def _interpolated(grid: Grid, counts: torch.Tensor) -> torch.Tensor:
    numbers, costs = torch.tensor([*zip(*grid)], dtype=counts.dtype, device=counts.device)
    upper = torch.searchsorted(numbers, counts.detach().contiguous()).clamp(1, len(grid) - 1)
    slopes = costs.diff() / numbers.diff()
    return costs[upper - 1] + (counts - numbers[upper - 1]) * slopes[upper - 1]


def _expected(grid: Grid, pairs: list[Expected]) -> torch.Tensor:
    """Sum over blocks of their expected cost."""
    device = pairs[0][0].device
    open_costs = _interpolated(grid, torch.stack([at_least_single(count).to(device) for count, _ in pairs]))
    probabilities = [1.0 if open_ is None else at_least_single(open_).to(device) for _, open_ in pairs]
    empty = grid[0][1]
    return sum(probability * (cost - empty) + empty for probability, cost in zip(probabilities, open_costs.unbind()))


def _below(speedup: float) -> str:
    """A speed-up rounded down to two decimals, so that it can be reached."""
    return f"{math.floor(100 * speedup) / 100:.2f}" if math.isfinite(speedup) else "any"
