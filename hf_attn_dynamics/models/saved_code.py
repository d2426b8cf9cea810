# Licensed under the Apache License, Version 2.0.
"""Code that is saved beside a checkpoint, so that it loads where this package is not installed."""

from .compat import custom_object_save


class SavedCodeMixin:
    """A configuration that is saved with the code of its models; it goes before `PreTrainedConfig`.

    Where code comes from the Hub, Transformers puts a configuration and the files that it imports into a folder of
    their own. So the models have to be imported by name, by a line that Transformers reads off the file.
    """

    def auto_classes(self) -> dict[str, type]:
        """The configuration and the models by their Auto classes, imported from a file beside this one."""
        raise NotImplementedError(f"{type(self).__name__} must return its classes: {{'AutoModel': HeadwiseXModel, …}}")

    def code_map(self) -> dict[str, str]:
        """For each Auto class the class of this configuration, and the file that it is in."""
        return {
            auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in self.auto_classes().items()
        }

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Saves the configuration, with the code that brings back models of it where this package is not installed."""
        # What a model has said of its class stays; and the map itself, as in a configuration that is loaded.
        self.auto_map = {**self.code_map(), **(getattr(self, "auto_map", None) or {})}
        super().save_pretrained(save_directory, *args, **kwargs)
        custom_object_save(
            next(cls for auto, cls in self.auto_classes().items() if auto != "AutoConfig"), save_directory
        )
