# Licensed under the Apache License, Version 2.0.
"""Parameters that a configuration keeps from being trained."""

from transformers import PreTrainedModel

from .configuration_checks import CheckedModelMixin


class FreezingModel(CheckedModelMixin, PreTrainedModel):
    """A model whose configuration says what is trained, when it is made and when it is loaded."""

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Loads a checkpoint; what its configuration freezes is frozen again, since new parameters never are."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze()
        return loaded

    def freeze(self) -> None:
        """Lets exactly those parameters be trained that the configuration does not freeze."""
        raise NotImplementedError
