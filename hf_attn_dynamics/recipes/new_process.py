# Licensed under the Apache License, Version 2.0.
"""New processes, which share no state with the one that starts them."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from typing import TypeVar


Result = TypeVar("Result")

LIBRARIES = ("torch", "transformers", "datasets", "hf_attn_dynamics.training")


def process_context(preload: Sequence[str] = ()) -> BaseContext:
    """Starts new processes.

    Args:
        preload (`list[str]`): Modules that all processes need beside the libraries.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # The server has imported everything and touched no device, so that a forked process starts at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LIBRARIES, *preload])
    return context


def in_new_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Calls a function of a module in a new process, and returns its result.

    Args:
        function (callable): The function; it, its arguments and its result can be pickled.
    """
    with ProcessPoolExecutor(1, mp_context=process_context()) as executor:
        return executor.submit(function, *arguments).result()
