# Licensed under the Apache License, Version 2.0.
"""Removes rows and columns of projections, `nn.Linear` or `Conv1D`."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .compat import mark_initialised
from .hard_coded_attention import Unprojected
from .head_roles import qualified_name


class EmptyProjection(nn.Linear):
    """A projection without inputs or without outputs.

    It is an `nn.Linear`, so that Transformers initialises a bias as usual, and adapters can be put around it. Its
    empty `weight` is a saved buffer, so that stock classes raise an error for the checkpoint instead of initialising
    the weight.
    """

    def __init__(self, projection: nn.Module, inputs: int, outputs: int):
        """Replaces a projection, `nn.Linear` or `Conv1D`, by one of another size."""
        with torch.device("meta"):
            super().__init__(inputs, outputs, bias=False)
        del self.weight
        self.register_buffer("weight", projection.weight.detach().new_empty(outputs, inputs))
        # Some initialisations divide by the number of inputs.
        mark_initialised(self.weight)
        self.train(projection.training)

    def reset_parameters(self) -> None:
        """Initialises nothing: PyTorch warns of weights without elements."""


class OutputBias(EmptyProjection):
    """An output projection without inputs: returns its bias, or zero."""

    def __init__(self, projection: nn.Module):
        """Replaces a projection, and keeps its bias."""
        super().__init__(projection, 0, outputs_of(projection))
        self.bias = projection.bias


class NoUnits(EmptyProjection):
    """An input projection without outputs. Its result is part of the graph, so that gradients are zero, not None."""

    def __init__(self, projection: nn.Module):
        super().__init__(projection, inputs_of(projection), 0)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of shape `(…, 0)`."""
        return hidden_states[..., :0]


def outputs_of(projection: nn.Module) -> int:
    """Number of output features."""
    return projection.nf if isinstance(projection, Conv1D) else projection.out_features


def inputs_of(projection: nn.Module) -> int:
    """Number of input features."""
    return projection.nx if isinstance(projection, Conv1D) else projection.in_features


def input_columns(projection: nn.Module) -> torch.Tensor:
    """Weight of a projection as a view of shape `(outputs, inputs)`."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


def slice_projection(projection: nn.Module, indices: list[int], count: int, width: int, inputs: bool = False) -> None:
    """Keeps some parts of a projection's outputs or inputs, in place; the weights become new parameters.

    Args:
        projection (`nn.Module`): The projection. Its features are one or several consecutive blocks of `count` parts.
        indices (`list[int]`): Parts to keep in each block.
        count (`int`): Number of parts of a block.
        width (`int`): Number of features of a part.
        inputs (`bool`): Whether to remove inputs instead of outputs.
    """
    if isinstance(projection, Unprojected):
        projection.out_features = len(indices) * width
        return
    transposed = isinstance(projection, Conv1D)
    axis = int(inputs != transposed)
    starts = range(0, projection.weight.shape[axis], count * width)
    index = [start + feature for start in starts for feature in features_of(indices, width)]
    projection.weight = selected(projection.weight, axis, index)
    if projection.bias is not None and not inputs:
        projection.bias = selected(projection.bias, 0, index)
    size = {(True, True): "nx", (True, False): "nf", (False, True): "in_features", (False, False): "out_features"}
    setattr(projection, size[transposed, inputs], len(index))


def features_of(indices: list[int], width: int) -> list[int]:
    """Indices of the features of some parts of size `width`."""
    return [index * width + feature for index in indices for feature in range(width)]


def selected(weight: nn.Parameter, axis: int, index: list[int]) -> nn.Parameter:
    """A new parameter with some rows or columns of a weight."""
    chosen = weight.detach().index_select(axis, torch.tensor(index, device=weight.device))
    return nn.Parameter(chosen, requires_grad=weight.requires_grad)


def parameter_owners(model: PreTrainedModel) -> Counter:
    """Number of modules that own each parameter, by its `id`."""
    return Counter(id(weight) for module in model.modules() for weight in _own_parameters(module).values())


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module by name, without submodules and parametrizations."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def check_projection(name: str, projection: nn.Module, owners: Counter, meta: bool) -> None:
    """Checks that features of a projection can be removed.

    Args:
        name (`str`): Name of the projection, for messages.
        projection (`nn.Module`): The projection.
        owners (`Counter`): See [`parameter_owners`].
        meta (`bool`): Whether weights may be on the meta device.

    Raises:
        ValueError: if the projection is of another class, or its weights are quantized, adapted, sharded, tied or not
            loaded.
    """
    if isinstance(projection, Unprojected):
        return
    if type(projection) not in (nn.Linear, Conv1D):
        raise ValueError(
            f"{name} is a {qualified_name(projection)}, not an nn.Linear or Conv1D: merge adapters with PEFT's "
            "merge_and_unload(), and load the model without quantization, before pruning."
        )
    check_parameter(name, _own_parameters(projection).get("weight"), owners, meta)
    if projection.bias is not None:
        check_parameter(name, projection.bias, owners, meta)


def check_outputs(model: nn.Module, layers: Iterable[Any]) -> None:
    """Raises ValueError for output projections that are quantized, adapted, sharded, tied or not loaded.

    Args:
        model (`PreTrainedModel`): The model.
        layers (iterable of `HeadLayer` or `UnitLayer`): Attention and feed-forward blocks of the model.
    """
    owners = parameter_owners(model)
    for layer in layers:
        name = f"{type(model).__name__}: the output projection of {layer.name}"
        check_projection(name, layer.output, owners, meta=False)


def check_undispatched(model: nn.Module, layer: Any) -> None:
    """Raises ValueError if the forward pass of a block, a `HeadLayer` or `UnitLayer`, is not that of its class."""
    if "forward" in vars(layer.module):
        raise ValueError(
            f"{type(model).__name__}: the forward pass of {layer.name} has been replaced (by accelerate's hooks, if "
            "device_map dispatched the model); load the model on one device."
        )


def check_parameter(name: str, weight: Any, owners: Counter, meta: bool) -> None:
    """Checks that elements of a parameter can be removed, see [`check_projection`]."""
    if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor or hasattr(weight, "ds_id"):
        raise ValueError(f"{name} is sharded, quantized or parametrized: undo that before pruning.")
    if owners[id(weight)] > 1:
        raise ValueError(f"{name} shares its weights with another module; clone them before pruning.")
    if weight.is_meta and not meta:
        raise ValueError(f"{name} is on the meta device: load the weights before pruning.")
