# Licensed under the Apache License, Version 2.0.
"""Code that is saved beside a checkpoint, so that it loads where this package is not installed."""

from typing import Any

from .compat import custom_object_save
from .own_architectures import OWN_ARCHITECTURES


class SavedCodeMixin:
    """A configuration that is saved with the code of its models; it goes before `PreTrainedConfig`.

    Where code comes from the Hub, Transformers puts a configuration and the files that it imports into a folder of
    their own. So the file that is saved has to name those of the models, by lines that Transformers reads off it.
    """

    def code_map(self) -> dict[str, str]:
        """For each Auto class a class, and the file that it is looked up in: `{"AutoModel": "file.Class", …}`."""
        return OWN_ARCHITECTURES[self.model_type].code_map()

    def saved_code(self) -> Any:
        """A class or function of the file that is saved, together with all that it imports; `None` for no file."""
        raise NotImplementedError(f"{type(self).__name__} must return a class of the file of its models")

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Saves the configuration, with the code that brings back models of it where this package is not installed."""
        given, own = getattr(self, "auto_map", None) or {}, self.code_map()
        # Classes that someone else has registered stay; files that these classes were in at another time do not.
        others = {auto: name for auto, name in given.items() if _class(name) != _class(own.get(auto, ""))}
        # It stays, as in a configuration that is loaded.
        self.auto_map = {**own, **others}
        super().save_pretrained(save_directory, *args, **kwargs)
        if (code := self.saved_code()) is not None:
            custom_object_save(code, save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Registers what others derive from these classes; these know their Auto classes and save their code."""
        if not is_of_this_package(cls):
            super().register_for_auto_class(auto_class)


def is_of_this_package(cls: type) -> bool:
    """Whether a class is in a file beside this one."""
    return cls.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _class(reference: str) -> str:
    return reference.rpartition(".")[2]
