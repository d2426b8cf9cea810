# Licensed under the Apache License, Version 2.0.
"""Objects that get another class and stay the same object: the one place that assigns `__class__`."""

from typing import TypeVar


Class = TypeVar("Class")


def take_class(instance: object, cls: type[Class]) -> Class:
    """Gives an object another class, whose layout is the same, where no new object can take its place.

    - An attention module that has lost heads: it was built with arguments that it does not keep, and hooks, other
      modules and users refer to it.
    - The configuration of a stock model that has lost heads: a body such as `model.bert` shares it with the model
      around it, which it does not know, and which is what is saved.
    - A model that was loaded by a class that is its own for as long as it takes: what loading has put into it, such
      as hooks that spread it over devices, refers to it.

    Returns:
        the same object.
    """
    instance.__class__ = cls
    return instance
