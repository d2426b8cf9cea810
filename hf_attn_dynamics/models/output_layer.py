# Licensed under the Apache License, Version 2.0.
"""The layer that gives each word of a vocabulary its logit."""

import torch
from torch import nn
from torch.nn.functional import linear


class OutputLayer(nn.Linear):
    """`nn.Linear`; what takes most of the time where a model translates.

    Without gradients, in float32 on a CPU, oneDNN multiplies in the place of MKL, which keeps to AVX2 on processors
    that are not Intel's: on one with AVX-512, this takes half the time, although the logits are copied once.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._by_onednn(inputs):
            try:
                # Inputs in the layout of oneDNN are multiplied by it, weights as they are, without a copy.
                return linear(inputs.to_mkldnn(), self.weight, self.bias).to_dense()
            except RuntimeError:
                pass  # inputs that cannot be laid out: without values, or those that `torch.func` hands in
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
