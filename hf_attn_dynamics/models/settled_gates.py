# Licensed under the Apache License, Version 2.0.
"""Final values of gates after training, so that a model has exactly the heads, or the cost, that was asked for.

An element, a head or unit, is open if its own gate and the gate of its block are. Its distance to
the threshold is the smaller one of the two gates.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .cost_table import CostTable
from .gate_costs import counts_left
from .hard_concrete import HardConcreteGate
from .head_roles import locate_heads
from .head_sites import HeadSite


MARGIN = 1e-3  # distance of a moved gate from its threshold
ROUNDING = 1e-9  # relative error of costs that are summed step by step


@torch.no_grad()
def settle_gates(model: PreTrainedModel, keep: int) -> int:
    """Opens the gates of the `keep` heads with the largest φ and closes all others.

    Gates on the wrong side of their threshold are moved just across it. If attention blocks have gates, too, the lower
    φ of a head and its block counts.

    Args:
        model (`PreTrainedModel`): A headwise model with gates.
        keep (`int`): Number of heads whose gates are open outside training.

    Returns:
        `int`: number of gates that were moved.

    Raises:
        ValueError: if there are fewer than `keep` gated heads, or so many cannot be chosen because gates are shared by
            groups of heads.
    """
    blocks = [_Block.of(site, gate) for site, gate in model.head_gates().items()]
    order = torch.cat([block.distances() for block in blocks])
    sizes = [block.size for block in blocks for _ in block.kept]
    places = [(block, index) for block in blocks for index in range(len(block.kept))]
    for block in blocks:
        block.kept = [False] * len(block.kept)
    left = keep
    for place in order.argsort(descending=True, stable=True).tolist():
        if sizes[place] <= left:
            block, index = places[place]
            block.kept[index] = True
            left -= sizes[place]
    if keep > sum(sizes):
        raise ValueError(f"keep={keep} heads cannot stay open: the model has {sum(sizes)} gated heads.")
    if left:
        raise ValueError(f"keep={keep} heads cannot stay open: {max(sizes)} heads share one gate.")
    return sum(block.settle() for block in blocks)


@torch.no_grad()
def settle_gates_to_cost(model: PreTrainedModel, table: CostTable, speedup: float) -> int:
    """Closes and opens gates so that the pruned model costs 1 / `speedup` of the dense model, or just less.

    First, open heads, units and blocks are closed in ascending order of φ until the cost is low enough; then closed
    heads and units are opened in descending order of φ as far as they fit, after which no other one does. Gates on the
    wrong side of their threshold are moved just across it.

    Args:
        model (`PreTrainedModel`): A headwise model with gates of heads, units or blocks.
        table ([`CostTable`]): Costs of its architecture.
        speedup (`float`): Cost of the dense model over the cost of the pruned model, > 1.

    Returns:
        `int`: number of gates that were moved.

    Raises:
        ValueError: if the target cannot be reached by closing all gates, or gates of single query heads share a
            key/value head, so that closing one removes nothing.
    """
    check_whole_groups(model)
    blocks = [_Block.of(site, gate) for site, gate in model.head_gates().items()]
    blocks += [_Block.of(site, gate, "feed_forward") for site, gate in model.unit_gates().items()]
    running = _RunningCost(model, table, speedup, [block for block in blocks if block.kept])
    running.close()
    running.open()
    return sum(block.settle() for block in blocks)


def check_whole_groups(model: PreTrainedModel) -> None:
    """Raises ValueError if query heads that share a key/value head have their own gates."""
    gates = model.head_gates()
    for layer in locate_heads(model):
        gate = gates.get(layer.site)
        if gate is not None and gate.has_elements and gate.group_size < layer.group_size:
            raise ValueError(
                f"the gates of {type(model).__name__} have unit='head', but {layer.group_size} query heads share a "
                "key/value head and are only removed together: build it with gates={'unit': 'group'}."
            )


@dataclass
class _Block:
    """Gates of one attention module or feed-forward block, and which of its elements stay open.

    Attributes:
        kept (`list[bool]`): For each gate of an element, or once if only the block has a gate.
        size (`int`): Number of heads or units of each of them.
    """

    site: HeadSite
    gate: HardConcreteGate
    part: str
    own: torch.Tensor | None
    block: float | None
    kept: list[bool]
    size: int

    @classmethod
    def of(cls, site: HeadSite, gate: HardConcreteGate, part: str = "attention") -> "_Block":
        own = block = None
        if gate.has_elements:
            own = (gate.locations().float().cpu() - gate.threshold)[:: gate.group_size]
        if gate.has_block:
            block = gate.block_location().float().item() - gate.threshold
        size = gate.group_size if gate.has_elements else gate.num_elements
        made = cls(site, gate, part, own, block, [], size)
        made.kept = (made.distances() > 0).tolist()
        return made

    def distances(self) -> torch.Tensor:
        """Distance of each element to its threshold."""
        if self.own is None:
            return torch.tensor([] if self.block is None else [self.block])
        return self.own if self.block is None else self.own.clamp(max=self.block)

    @property
    def count(self) -> int:
        """Number of heads or units that stay open."""
        return self.size * sum(self.kept)

    def settle(self) -> int:
        """Moves gates to the side of their threshold that `kept` says; returns their number."""
        moved, threshold = 0, self.gate.threshold
        has_open = any(self.kept)
        if self.block is not None and (self.block > 0) != has_open:
            value = threshold + MARGIN if has_open else threshold - MARGIN
            self.gate.set_block_location(torch.full_like(self.gate.block_location(), value))
            moved += 1
        # Elements of a closed block keep their gates.
        if self.own is None or not self.kept or (self.block is not None and not has_open):
            return moved
        locations = self.gate.locations()
        chosen = torch.tensor(self.kept).to(locations.device).repeat_interleave(self.size)
        wrong = (locations > threshold) != chosen
        settled = torch.where(chosen, threshold + MARGIN, threshold - MARGIN)
        self.gate.set_locations(torch.where(wrong, settled, locations))
        return moved + int(wrong.sum()) // self.size


class _RunningCost:
    """Cost of a model while gates are closed and opened one after the other.

    Args:
        model (`PreTrainedModel`): The model.
        table ([`CostTable`]): Costs.
        speedup (`float`): The target.
        blocks (`list[_Block]`): Its gates; `kept` of each is changed.
    """

    def __init__(self, model: PreTrainedModel, table: CostTable, speedup: float, blocks: list[_Block]):
        self._table, self._blocks, self._speedup = table, blocks, speedup
        self._budget = table.dense / speedup
        self._left = counts_left(model, table)
        self._costs = [self._costs_of(block) for block in blocks]
        self._open = [sum(block.kept) for block in blocks]
        self._sum = self._exact()

    def _costs_of(self, block: _Block) -> list[float]:
        """Cost of a block by the number of its elements that stay open."""
        cost = self._table.attention_cost if block.part == "attention" else self._table.feed_forward_cost
        return [cost(block.site.kind, number * block.size) for number in range(len(block.kept) + 1)]

    def _exact(self) -> float:
        heads, units = map(dict, self._left)
        for block in self._blocks:
            (heads if block.part == "attention" else units)[block.site] = block.count
        return self._table.cost(heads, units)

    def _fits(self) -> bool:
        if abs(self._sum - self._budget) <= ROUNDING * self._budget:
            self._sum = self._exact()
        return self._sum <= self._budget

    def _set(self, number: int, indices: list[int], kept: bool) -> None:
        """Opens or closes elements of a block."""
        block, costs, before = self._blocks[number], self._costs[number], self._open[number]
        for index in indices:
            self._open[number] += kept - block.kept[index]
            block.kept[index] = kept
        self._sum += costs[self._open[number]] - costs[before]

    def close(self) -> None:
        """Closes open elements and blocks in ascending order of φ until the target is reached."""
        candidates = []
        for number, block in enumerate(self._blocks):
            every = list(range(len(block.kept)))
            if block.own is not None:
                candidates += [(distance, number, [index]) for index, distance in enumerate(block.own.tolist())]
            if block.block is not None:
                candidates.append((block.block, number, every))
        for _, number, indices in sorted(candidates, key=lambda candidate: candidate[0]):
            if self._fits():
                return
            self._set(number, indices, False)
        if not self._fits():
            raise ValueError(
                f"a speed-up of {self._speedup:g} × cannot be reached: closing all gates gives "
                f"{self._table.dense / self._exact():.2f} ×."
            )

    def open(self) -> None:
        """Opens closed elements in descending order of φ as far as they fit, until no other one fits."""
        closed = [
            (distance, number, index)
            for number, block in enumerate(self._blocks)
            for index, distance in enumerate(block.distances().tolist())
            if not block.kept[index]
        ]
        closed.sort(key=lambda candidate: -candidate[0])
        has_opened = True
        # An element may fit after another one of its block has been opened.
        while has_opened:
            remaining = []
            for candidate in closed:
                _, number, index = candidate
                self._set(number, [index], True)
                if not self._fits():
                    self._set(number, [index], False)
                    remaining.append(candidate)
            has_opened, closed = len(remaining) < len(closed), remaining
