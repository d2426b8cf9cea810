# Licensed under the Apache License, Version 2.0.
"""The only assignment of `__class__` in this package."""

from typing import TypeVar


Class = TypeVar("Class")


def take_class(instance: object, cls: type[Class]) -> Class:
    """Changes the class of an object, where a new object could not replace it.

    - An attention module with removed heads: it does not keep its constructor arguments, and hooks, other modules and
      users refer to it.
    - The configuration of a stock model with removed heads: a body such as `model.bert` shares it with the model
      around it, which is saved.
    - A model that was loaded by a temporary class: hooks that dispatch it over devices refer to it.

    Returns:
        the same object.
    """
    instance.__class__ = cls
    return instance
