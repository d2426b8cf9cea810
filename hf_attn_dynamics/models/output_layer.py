# Licensed under the Apache License, Version 2.0.
"""Output layer over a vocabulary."""

import torch
from torch import nn
from torch.nn.functional import linear


class OutputLayer(nn.Linear):
    """`nn.Linear`, computed by oneDNN for inference in float32 on a CPU, since it dominates the time of translation.

    MKL only uses AVX2 on CPUs that are not Intel's. With AVX-512, oneDNN takes half the time, although it copies the
    logits once.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._by_onednn(inputs):
            try:
                # Only the inputs need the layout of oneDNN; the weights are not copied.
                return linear(inputs.to_mkldnn(), self.weight, self.bias).to_dense()
            except RuntimeError:
                pass  # fake tensors, and tensors inside `torch.func`, have no values
        return super().forward(inputs)

    def _by_onednn(self, inputs: torch.Tensor) -> bool:
        return (
            inputs.device.type == "cpu"
            and inputs.dtype == self.weight.dtype == torch.float32
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and torch.backends.mkldnn.is_available()
            and torch.backends.mkldnn.enabled
        )
