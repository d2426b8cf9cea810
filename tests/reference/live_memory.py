# Licensed under the Apache License, Version 2.0.
"""How much memory tensors take, counted and not measured."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within the context, follows the storages that operations make; `peak` is the most bytes alive after one."""

    def __init__(self):
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return output
