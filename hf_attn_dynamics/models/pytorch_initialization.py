# Licensed under the Apache License, Version 2.0.
"""How layers of the papers' models start: as PyTorch has it, and not as Transformers."""

import torch
from torch import nn
from transformers import initialization


@torch.no_grad()
def initialize_as_pytorch(module: nn.Module, embedding_std: float) -> None:
    """Embeddings from a normal distribution, 0 at padding; linear layers and LSTMs uniform, by their size.

    Args:
        module (`nn.Module`): An embedding, a linear layer or an LSTM; anything else is left as it is.
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
