# Licensed under the Apache License, Version 2.0.
"""Saving code with a checkpoint, so that it can be loaded where this package is not installed."""

from pathlib import Path
from typing import Any

from .compat import custom_object_save
from .own_architectures import OWN_ARCHITECTURES


class SavedCodeMixin:
    """A configuration that is saved with the code of its models; precedes `PreTrainedConfig`.

    Transformers copies a configuration from the Hub together with the files that it imports. The saved file must
    therefore import those of the models, by statements that Transformers finds in its source.
    """

    def code_map(self) -> dict[str, str]:
        """The `auto_map`: a file and a class for each Auto class, `{"AutoModel": "file.Class", …}`."""
        return OWN_ARCHITECTURES[self.model_type].code_map()

    def saved_code(self) -> Any:
        """A class or function whose file is saved, together with its imports; `None` for no file."""
        raise NotImplementedError(f"{type(self).__name__}.saved_code must return a class from the file of its models")

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """Saves the configuration with the code of its models, and uploads both with `push_to_hub=True`."""
        given, own = getattr(self, "auto_map", None) or {}, self.code_map()
        # Keep classes that users registered, but not earlier files of the classes of this package.
        others = {auto: name for auto, name in given.items() if _class(name) != _class(own.get(auto, ""))}
        # Kept afterwards, as in a loaded configuration.
        self.auto_map = {**own, **others}
        code = self.saved_code()
        super().save_pretrained(save_directory, push_to_hub=push_to_hub and code is None, **kwargs)
        if code is not None:
            custom_object_save(code, save_directory)
            if push_to_hub:
                # The stock method would upload before the code is there.
                self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).resolve().name), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Registers derived custom classes; the classes of this package always save their code."""
        if not is_of_this_package(cls):
            super().register_for_auto_class(auto_class)


def is_of_this_package(cls: type) -> bool:
    """Whether a class is defined in the folder of this file."""
    return cls.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _class(reference: str) -> str:
    return reference.rpartition(".")[2]
