# Licensed under the Apache License, Version 2.0.
"""Models that FSDP2 spreads over processes: what Accelerate leaves undone, and how they become whole again."""

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
    """Spreads the input embeddings and all modules that share parameters, as one group, before Accelerate goes on.

    Accelerate 1.15 can only do so for embeddings that share their weights with an output layer and nothing else. In
    BERT and RoBERTa, that layer also shares its bias with the module around it, and PyTorch would refuse to train.

    Args:
        model (`PreTrainedModel`): The model, before it has an optimizer; changed in place.
        accelerator (`Accelerator`): Whose settings of FSDP2 are taken.

    Raises:
        ValueError: if weights are to be loaded by the first process only.
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
        # As Accelerate does: what is trained is kept in single precision.
        for p in {p for module in modules for p in module.parameters() if p.requires_grad}:
            p.data = p.data.float()
    mesh = accelerator.torch_device_mesh
    settings = {"mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]}
    group = list(dict.fromkeys(modules))
    # All of it is needed again at the other end of the model, so that it is not spread again in between.
    fully_shard(
        group,
        **settings,
        reshard_after_forward=False,
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        offload_policy=plugin.cpu_offload,
    )
    for module in group:
        if not isinstance(module, FSDPModule):
            # It is inside of another one. Nothing of it is left, and Accelerate is to see that.
            fully_shard(module, **settings, ignored_params=set(module.parameters()))


class ShardedEmbeddingsMixin:
    """A trainer that spreads embeddings by [`shard_embeddings`] under FSDP2; it goes before the trainer's class."""

    def create_optimizer(self, *args, **kwargs):
        """The stock method, before which Accelerate has not seen the model."""
        if self.accelerator.is_fsdp2 and not isinstance(self.model, FSDPModule):
            shard_embeddings(self.model, self.accelerator)
        return super().create_optimizer(*args, **kwargs)


@torch.no_grad()
def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model with all of its parameters on each process; all processes must ask for it.

    One tensor after another becomes whole on its way to the CPU: `get_model_state_dict` would gather all of them on
    the device first, or give them to the first process alone.

    Args:
        model (`PreTrainedModel`): A model that FSDP2 may have spread over processes.

    Returns:
        `PreTrainedModel`: the same if it is whole; else a copy of it, on the CPU.
    """
    if not isinstance(model, FSDPModule):
        return model
    plain = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    values = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
        for name, value in model.state_dict().items()
    }
    whole = plain(copy.deepcopy(model.config))
    whole.load_state_dict(values)
    return whole.train(model.training)
