# Licensed under the Apache License, Version 2.0.
"""Hard Concrete gates: a factor in [0, 1] for each element of a block (Louizos et al. 2018, Voita et al. 2019).

Elements are the heads of an attention module or the units of a feed-forward block. The only parameter of a gate is φ,
`log_alpha`, the location of its distribution. A block may have a gate, too, by which the gates of its elements
are multiplied (Xia et al. 2022).
"""

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .head_settings import GateSettings, check_limits
from .precision import at_least_single


EPSILON = 1e-6  # noise is clamped to [EPSILON, 1 - EPSILON]
LOCATIONS = ("log_alpha", "block_log_alpha")  # names of the parameters of a gate


def expected_open_heads(
    log_alpha: torch.Tensor, temperature: float = 0.33, limits: tuple[float, float] = (-0.1, 1.1)
) -> torch.Tensor:
    """Expected number of heads whose Hard Concrete gate is not zero (Voita et al. 2019, section 6.1).

    Args:
        log_alpha (`torch.Tensor` of shape `(..., heads)`): Location φ of each gate's distribution.
        temperature (`float`): Temperature T of the concrete distribution, > 0.
        limits (`tuple[float, float]`): Stretch interval (γ, ζ), γ < 0 < 1 < ζ.

    Returns:
        `torch.Tensor` of shape `(...)`: sum over heads of `P(gate ≠ 0) = σ(φ − T·ln(−γ/ζ))`, differentiable, float32
        (float64 in double precision).

    Raises:
        ValueError: if `limits` does not contain [0, 1] in its interior.

    Example:
        >>> round(expected_open_heads(torch.zeros(4)).item(), 3)
        2.752
    """
    low, high = check_limits(limits)
    return torch.sigmoid(at_least_single(log_alpha) - temperature * math.log(-low / high)).sum(-1)


def is_of_gate(name: str) -> bool:
    """Whether a weight of this name is a parameter of a gate."""
    owner, _, leaf = name.rpartition(".")
    return leaf in LOCATIONS and owner.endswith("gate")


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, a class that PyTorch builds without distributed training lack."""
    return hasattr(tensor, "full_tensor")


class HardConcreteGate(nn.Module):
    """Hard Concrete gates of the heads of one attention module, or of the units of one feed-forward block.

    In training a gate is sampled in each forward pass, `s = σ((ln u − ln(1−u) + φ)/T)`,
    `g = clip(s·(ζ−γ) + γ, 0, 1)` with uniform u (equations 7 and 8), which is differentiable in φ. In evaluation it
    is 0 or 1, whichever is likelier (`evaluation="binary"`), or `clip(σ(φ)·(ζ−γ) + γ, 0, 1)` (`"fractional"`).

    Args:
        num_elements (`int`): Number of heads or units of the module.
        settings ([`GateSettings`]): Distribution of the gates, and their values outside training.
        group_size (`int`): Number of consecutive heads that share one gate.
        with_block (`bool`): Whether the module as a whole has a gate, a factor of the gates of its elements.
        with_elements (`bool`): Whether elements have gates of their own.

    Attributes:
        num_elements (`int`): Number of remaining heads or units.
        log_alpha (`nn.Parameter` of shape `(gates,)`, *optional*): φ of the gates of the remaining elements, in
            float32; an empty buffer if no elements remain.
        block_log_alpha (`nn.Parameter` of shape `(1,)`, *optional*): φ of the gate of the block; `None` if no elements
            remain.
    """

    def __init__(
        self,
        num_elements: int,
        settings: GateSettings,
        group_size: int = 1,
        with_block: bool = False,
        with_elements: bool = True,
    ):
        super().__init__()
        self.settings = settings
        self.group_size = group_size
        self.num_elements = num_elements
        # In single precision whatever the dtype of the model: small steps of φ are lost in half precision.
        sizes = (num_elements // group_size if with_elements else None, 1 if with_block else None)
        for name, size in zip(LOCATIONS, sizes):
            empty = None if size is None else nn.Parameter(torch.empty(size, dtype=torch.float32))
            self.register_parameter(name, empty)
        self.reset_parameters()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "HardConcreteGate":
        """Follows the model to another device and to double precision, but not to half precision."""

        def at_least_in_single(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype in (torch.float32, torch.float64) else at_least_single(tensor.to(moved.device))

        return super()._apply(at_least_in_single, recurse)

    def reset_parameters(self, init: Any = nn.init) -> None:
        """Sets φ to its initial value.

        Args:
            init: Module with `uniform_` and `constant_`; `transformers.initialization` skips loaded weights.
        """
        initial = self.settings.initial_log_alpha
        for log_alpha in self._tensors():
            if isinstance(initial, list):
                init.uniform_(log_alpha, *initial)
            else:
                init.constant_(log_alpha, float(initial))

    def _tensors(self) -> list[torch.Tensor]:
        """φ of the elements, then of the block, where they have gates."""
        return [tensor for tensor in (self.log_alpha, self.block_log_alpha) if tensor is not None]

    @property
    def has_elements(self) -> bool:
        """Whether elements have gates of their own."""
        return self.log_alpha is not None

    @property
    def has_block(self) -> bool:
        """Whether the block has a gate."""
        return self.block_log_alpha is not None

    @property
    def num_heads(self) -> int:
        """`num_elements` of an attention module."""
        return self.num_elements

    @property
    def num_gates(self) -> int:
        """Number of gates, which is the number of random numbers of a sample."""
        return sum(len(tensor) for tensor in self._tensors())

    def forward(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Gate of each element.

        Args:
            noise (`torch.Tensor` of shape `(gates,)`, *optional*): Uniform random numbers for training, for elements
                and then for the block; by default drawn from the global generator.

        Returns:
            `torch.Tensor` of shape `(elements,)`: gates in [0, 1], float32 (float64 in double precision), times the
            gate of the block.
        """
        if not self.training:
            return self.settled()
        own = block = None
        if noise is not None:
            own = noise[: len(self.log_alpha)] if self.has_elements else None
            block = noise[-1:] if self.has_block else None
        factors = self._by_element(self._sampled(self.log_alpha, own)) if self.has_elements else None
        return self._times_block(factors, self._sampled(self.block_log_alpha, block) if self.has_block else None)

    def _sampled(self, log_alpha: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        log_alpha = at_least_single(log_alpha)
        noise = torch.rand_like(log_alpha) if noise is None else noise.to(log_alpha)
        noise = noise.clamp(EPSILON, 1 - EPSILON)
        return self._stretched(torch.sigmoid((torch.logit(noise) + log_alpha) / self.settings.temperature))

    def _by_element(self, values: torch.Tensor) -> torch.Tensor:
        """Repeats the value of each gate for the heads that share it."""
        return values if self.group_size == 1 else values.repeat_interleave(self.group_size)

    def _times_block(self, values: torch.Tensor | None, block: torch.Tensor | None) -> torch.Tensor:
        """Gates of the elements times the gate of the block, as far as there are any."""
        if values is None:
            # Both are missing if no elements remain.
            return torch.empty(0) if block is None else block.expand(self.num_elements)
        return values if block is None else values * block

    @property
    def is_offloaded(self) -> bool:
        """Whether Accelerate has offloaded φ to disk or CPU and loads it only for a forward pass."""
        if not any(tensor.is_meta for tensor in self._tensors()):
            return False
        try:
            from accelerate.utils import has_offloaded_params
        except ImportError:
            return False  # on the meta device without Accelerate, φ has no values
        return has_offloaded_params(self)

    def _values(self, name: str) -> torch.Tensor:
        """φ of this name, differentiable; gathered where FSDP shards it, loaded and detached if it is offloaded."""
        if self.is_offloaded:
            # By name, so that code saved with checkpoints does not require Accelerate.
            with importlib.import_module("accelerate.utils").align_module_device(self):
                return getattr(self, name).detach()
        tensor = getattr(self, name)
        return tensor.full_tensor() if _is_sharded(tensor) else tensor

    def locations(self) -> torch.Tensor:
        """φ of the gates of all elements, of shape `(elements,)`, differentiable; gathered where FSDP shards it.

        Without gates of elements, it is φ of the block for each. Offloaded values are loaded and detached.
        """
        if self.has_elements:
            return self._by_element(self._values("log_alpha"))
        return self._times_block(None, self.block_location())

    def block_location(self) -> torch.Tensor | None:
        """φ of the gate of the block, of shape `(1,)`, as [`locations`]; `None` without one."""
        return self._values("block_log_alpha") if self.has_block else None

    def lowest_locations(self) -> torch.Tensor:
        """The lower φ of each element and its block, which says whether the element is open outside training."""
        block = self.block_location()
        return self.locations() if block is None else torch.minimum(self.locations(), block)

    @torch.no_grad()
    def set_locations(self, values: torch.Tensor) -> None:
        """Sets φ of the gates of all elements, of shape `(elements,)`; all processes must pass the same values.

        Raises:
            ValueError: if it is offloaded.
        """
        self._set("log_alpha", values[:: self.group_size])

    @torch.no_grad()
    def set_block_location(self, value: torch.Tensor) -> None:
        """Sets φ of the gate of the block, of shape `(1,)`, see [`set_locations`]."""
        self._set("block_log_alpha", value)

    def _set(self, name: str, values: torch.Tensor) -> None:
        if self.is_offloaded:
            raise ValueError("gates that device_map has offloaded cannot be set: load the model without device_map.")
        log_alpha = getattr(self, name)
        if _is_sharded(log_alpha):
            from torch.distributed.tensor import distribute_tensor

            values = distribute_tensor(values, log_alpha.device_mesh, log_alpha.placements)
        log_alpha.copy_(values)

    def settled(self) -> torch.Tensor:
        """Deterministic gate of each element outside training, of shape `(elements,)`."""
        own = self._settled(self.locations()) if self.has_elements else None
        return self._times_block(own, self._settled(self.block_location()) if self.has_block else None)

    def _settled(self, log_alpha: torch.Tensor) -> torch.Tensor:
        log_alpha = at_least_single(log_alpha)
        if self.settings.evaluation == "binary":
            return (log_alpha > self.threshold).to(log_alpha.dtype)
        return self._stretched(torch.sigmoid(log_alpha))

    def _stretched(self, concrete: torch.Tensor) -> torch.Tensor:
        low, high = self.settings.limits
        return (concrete * (high - low) + low).clamp(0, 1)

    @property
    def threshold(self) -> float:
        """φ above which a gate is open outside training."""
        return self.settings.threshold

    def _probability(self, log_alpha: torch.Tensor) -> torch.Tensor:
        """P(gate ≠ 0) of each gate."""
        # The last dimension has a single gate.
        return expected_open_heads(log_alpha[:, None], self.settings.temperature, self.settings.limits)

    def open_probabilities(self) -> torch.Tensor:
        """P(gate ≠ 0) of each element, of shape `(elements,)`, differentiable: an element is open if it and its block
        are."""
        own = self._probability(self.locations()) if self.has_elements else None
        return self._times_block(own, self._probability(self.block_location()) if self.has_block else None)

    def expected_open(self) -> torch.Tensor:
        """Expected number of elements of the module with open gates, a differentiable scalar."""
        return self.open_probabilities().sum(-1)

    def expected_open_heads(self) -> torch.Tensor:
        """[`expected_open`] of the gates of an attention module."""
        return self.expected_open()

    def expected_counts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Expected number of open elements given that the block is open, and the probability that the block is open
        (`None` if it has no gate), differentiable scalars."""
        return self._counts(self._probability)

    def approximate_counts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same with `σ(2·φ)` instead of probabilities, which approximates gates outside training.

        The expected number also counts a part of each closed gate.
        """
        return self._counts(lambda log_alpha: torch.sigmoid(2 * (log_alpha - self.threshold)))

    def _counts(self, open_of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        block = open_of(self.block_location()).sum() if self.has_block else None
        if self.has_elements:
            return open_of(self.locations()).sum(), block
        return torch.tensor(float(self.num_elements), device=None if block is None else block.device), block

    def keep(self, indices: list[int]) -> None:
        """Removes the gates of all elements but those with these indices among the present ones."""
        self.num_elements = len(indices)
        if not indices:
            self.block_log_alpha = None
        if not self.has_elements:
            return
        log_alpha = self.log_alpha
        del self.log_alpha
        if indices:
            gates = [index // self.group_size for index in indices[:: self.group_size]]
            self.log_alpha = nn.Parameter(log_alpha.detach()[gates].clone(), log_alpha.requires_grad)
        else:
            # A buffer: distributed training would wait for the gradient of an empty parameter.
            self.register_buffer("log_alpha", log_alpha.detach()[:0].clone())

    def extra_repr(self) -> str:
        shared = f" of {self.group_size} heads" if self.group_size > 1 else ""
        own = [f"{len(self.log_alpha)} gates{shared}"] if self.has_elements else []
        return ", ".join([*own, *(["block gate"] if self.has_block else []), f"evaluation={self.settings.evaluation}"])
