# Licensed under the Apache License, Version 2.0.
"""PyTorch's default initialisation, for the models of the papers."""

import torch
from torch import nn
from transformers import initialization


@torch.no_grad()
def initialize_as_pytorch(module: nn.Module, embedding_std: float) -> None:
    """Initialises embeddings from a normal distribution, 0 at padding, and linear layers and LSTMs uniformly.

    Args:
        module (`nn.Module`): An embedding, a linear layer or an LSTM; other modules are skipped.
        embedding_std (`float`): Standard deviation of embeddings.
    """
    if isinstance(module, nn.Embedding):
        initialization.normal_(module.weight, std=embedding_std)
        if module.padding_idx is not None:
            initialization.zeros_(module.weight[module.padding_idx])
    elif isinstance(module, (nn.Linear, nn.LSTM)):
        bound = (module.in_features if isinstance(module, nn.Linear) else module.hidden_size) ** -0.5
        for parameter in module.parameters():
            initialization.uniform_(parameter, -bound, bound)
