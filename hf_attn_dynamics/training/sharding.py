# Licensed under the Apache License, Version 2.0.
"""FSDP2: sharding of tied embeddings, which Accelerate does not support, and gathering of whole models."""

import copy
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


if TYPE_CHECKING:
    from accelerate import Accelerator


def shard_embeddings(model: PreTrainedModel, accelerator: "Accelerator") -> None:
    """Shards the input embeddings and all modules with tied parameters as one group, before Accelerate does the rest.

    Accelerate 1.15 only supports embeddings that share nothing but their weight with an output layer. In BERT and
    RoBERTa, that layer also shares its bias with its parent module, with which PyTorch raises an error.

    Args:
        model (`PreTrainedModel`): The model, before it has an optimizer; changed in place.
        accelerator (`Accelerator`): Accelerator with the settings of FSDP2.

    Raises:
        ValueError: if only the first process loads weights.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            f"fsdp_cpu_ram_efficient_loading=true would load {type(model).__name__} on the first process only, which "
            "its shared parameters do not allow; set it to false."
        )
    held = [(module, p) for module in model.modules() for p in module.parameters(recurse=False)]
    owners = Counter(p for _, p in held)
    modules = [model.get_input_embeddings(), *(module for module, p in held if owners[p] > 1)]
    if accelerator.mixed_precision != "no":
        # Trained parameters are kept in single precision, as by Accelerate.
        for p in {p for module in modules for p in module.parameters() if p.requires_grad}:
            p.data = p.data.float()
    mesh = accelerator.torch_device_mesh
    settings = {"mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]}
    group = list(dict.fromkeys(modules))
    # The output layer needs these parameters again, so they are not resharded after the embeddings.
    fully_shard(
        group,
        **settings,
        reshard_after_forward=False,
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        offload_policy=plugin.cpu_offload,
    )
    for module in group:
        if not isinstance(module, FSDPModule):
            # A module inside another one of the group has no parameters left; mark it as sharded for Accelerate.
            fully_shard(module, **settings, ignored_params=set(module.parameters()))


class ShardedEmbeddingsMixin:
    """A trainer that shards embeddings with [`shard_embeddings`] under FSDP2; precedes the trainer class."""

    def create_optimizer(self, *args, **kwargs):
        """The stock method, called before Accelerate shards the model."""
        if self.accelerator.is_fsdp2 and not isinstance(self.model, FSDPModule):
            shard_embeddings(self.model, self.accelerator)
        return super().create_optimizer(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        """The stock loop; before training, each process evaluates the whole model.

        Accelerate shards a model only together with its optimizer, so the stock loop raises an error.
        """
        stock = self.is_fsdp_enabled
        self.is_fsdp_enabled = stock and (not self.accelerator.is_fsdp2 or isinstance(self.model, FSDPModule))
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.is_fsdp_enabled = stock


@torch.no_grad()
def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """Gathers all parameters of a sharded model in each process; all processes must call it.

    Tensors are gathered one by one and moved to the CPU: `get_model_state_dict` would gather all of them on the device
    first, or in the first process only.

    Args:
        model (`PreTrainedModel`): A model that FSDP2 may have sharded.

    Returns:
        `PreTrainedModel`: `model` if it is not sharded; otherwise a copy on the CPU, with the data types and the
        frozen parameters of the model.
    """
    if not isinstance(model, FSDPModule):
        return model
    plain = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    values = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
        for name, value in model.state_dict().items()
    }
    whole = plain(copy.deepcopy(model.config))
    # Assigned, so that each keeps its data type; tied ones are tied again.
    whole.load_state_dict(values, assign=True)
    whole.tie_weights()
    is_trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(is_trained[name])
    whole.name_or_path = model.name_or_path
    if model.can_generate():
        whole.generation_config = copy.deepcopy(model.generation_config)
    return whole.train(model.training)
