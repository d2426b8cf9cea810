# Licensed under the Apache License, Version 2.0.
"""Models that freeze parameters as their configuration says."""

from transformers import PreTrainedModel

from .configuration_checks import CheckedModelMixin


class FreezingModel(CheckedModelMixin, PreTrainedModel):
    """A model whose configuration sets which parameters are frozen, when it is built and when it is loaded."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Loads a checkpoint and freezes its parameters again, since loaded parameters require gradients."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze()
        return loaded

    def freeze(self) -> None:
        """Sets `requires_grad` of all parameters as the configuration says."""
        raise NotImplementedError
