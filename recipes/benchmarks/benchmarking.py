# Licensed under the Apache License, Version 2.0.
"""What all benchmarks share: flags, turns, peak memory in a process of its own, and the summary."""

import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hf_attn_dynamics.recipes.arguments.base import RunArguments, check_names, flag
from hf_attn_dynamics.recipes.run import SUMMARY, provenance, write_json


Result = TypeVar("Result")
DTYPES = ("float32", "bfloat16")


@dataclass
class BenchmarkArguments(RunArguments):
    """Flags of every benchmark."""

    # A benchmark is not resumed, and runs on the CPU unless it has a flag for the device.
    resume: bool = field(default=False, init=False)
    device: str = field(default="cpu", init=False)
    cpu_threads: int | None = flag(1, "Number of CPU threads.", earlier="threads")
    rounds: int = flag(5, "Number of measured turns of each system.")
    seed: int = flag(0, "Random seed of weights and data.")
    output_dir: str | None = flag(
        None, f"Output folder of {SUMMARY}, or a file that ends in .json; none by default.", earlier="output"
    )

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "rounds")
        self.check_at_least(0, "seed")
        folder = Path(self.output_dir or "")
        if self.output_dir is not None and folder.suffix != ".json":
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"output_dir {folder} is a file; name a folder.")
            if folder.is_dir() and any(folder.iterdir()):
                raise ValueError(f"output_dir {folder} already holds files; name another folder.")

    @property
    def summary_path(self) -> Path | None:
        """The file to write, if any."""
        if self.output_dir is None:
            return None
        path = Path(self.output_dir)
        return path if path.suffix == ".json" else path / SUMMARY

    @property
    def torch_device(self) -> torch.device:
        """The device to run on."""
        return torch.device("cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu")


def parse_shapes(shapes: Iterable[str]) -> list[tuple[int, int]]:
    """Sentences and tokens of batches such as `8x128`.

    Raises:
        ValueError: if one is not two numbers, or one is given twice.
    """
    check_names("shapes", list(shapes))
    for shape in shapes:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
            raise ValueError(f"shapes must be like 8x128, sentences and tokens, got {shape!r}.")
    return [tuple(map(int, shape.split("x"))) for shape in shapes]


@dataclass
class Seconds:
    """Wall-clock and CPU seconds of each turn of each system."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]


def take_turns(
    systems: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1, order: random.Random | None = None
) -> Seconds:
    """Runs systems in turns, and measures each run.

    Args:
        systems (`dict[str, callable]`): Run the systems once, by name.
        rounds (`int`): Number of turns that are measured.
        warm_up (`int`): Number of turns before.
        order (`random.Random`, *optional*): Draws the order of the systems in each turn, which is fixed without it.
    """
    seconds = Seconds({name: [] for name in systems}, {name: [] for name in systems})
    for turn in range(warm_up + rounds):
        for name in systems if order is None else order.sample(list(systems), len(systems)):
            run = systems[name]
            _wait_for_gpu()
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            _wait_for_gpu()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if turn >= warm_up:
                seconds.wall[name].append(wall)
                seconds.cpu[name].append(cpu)
    return seconds


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of the turns of each system."""
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def median_ratio(seconds: Mapping[str, list[float]], one: str, other: str) -> float:
    """Median over turns of the ratio of two systems within a turn."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other]))


def peak_resident_mb() -> float:
    """Largest resident size of this process so far, in MB (Linux only)."""
    # Not `resource.getrusage`: a new process starts there with the peak of the one that started it.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**10


def in_new_process(measure: Callable[..., Result], args: BenchmarkArguments, *others: Any) -> Result:
    """`measure(args, *others)` in a process of its own, whose time and peak memory owe nothing to earlier work."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (args.cpu_threads,)) as process:
        return process.submit(measure, args, *others).result()


@dataclass
class StepArguments(BenchmarkArguments):
    """Flags of benchmarks of optimizer steps: sizes of the models, which have no dropout, and of the batches."""

    lengths: list[int] = flag([128, 512], "Lengths of the sentences, in tokens.")
    tokens: int = flag(2048, "Batch size, in tokens.")
    num_hidden_layers: int = flag(3, "Number of layers.")
    hidden_size: int = flag(768, "Hidden size; feed-forward layers are four times as wide.")
    num_attention_heads: int = flag(12, "Number of heads per layer.")
    vocab_size: int = flag(1000, "Size of the vocabulary.")
    rounds: int = flag(9, "Number of measured steps of each system.")
    cpu_threads: int | None = flag(2, "Number of CPU threads.", earlier="threads")
    device: str = flag("cpu", "Device: auto, cpu or cuda.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "tokens", "num_hidden_layers")
        check_names("lengths", self.lengths)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the configuration of a model, without the number of layers."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": 4 * self.hidden_size,
        }

    @property
    def roberta_sizes(self) -> dict[str, float]:
        """The same of a RoBERTa without dropout that reads the longest sentences."""
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {**self.sizes, **no_dropout, "max_position_embeddings": max(self.lengths) + 2}


@dataclass
class PrecisionArguments(StepArguments):
    """Flags of benchmarks whose models may have half precision."""

    dtype: str = flag("float32", f"Precision of the model: {' or '.join(DTYPES)}.")

    def __post_init__(self):
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {self.dtype!r}.")

    def placed(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model in the precision, on the device."""
        return model.to(self.torch_device, getattr(torch, self.dtype))


class StepSystem(Protocol):
    """A model and the way it takes an optimizer step."""

    def step(self, ids: torch.Tensor) -> None: ...


def token_batch(args: StepArguments, length: int) -> torch.Tensor:
    """Random token ids, of shape `(tokens / length, length)`."""
    generator = torch.Generator().manual_seed(args.seed + length)
    ids = torch.randint(3, args.vocab_size, (max(args.tokens // length, 1), length), generator=generator)
    return ids.to(args.torch_device)


def seconds_of_steps(
    build: Callable[[str, Any, int], StepSystem], names: Iterable[str], args: StepArguments, length: int
) -> dict[str, list[float]]:
    """Wall-clock seconds of each step of each system, which take turns.

    Args:
        build (callable): Returns a system, given its name, the flags and the length of the sentences.
        names (iterable of `str`): Names of the systems.
        args ([`StepArguments`]): Flags.
        length (`int`): Length of the sentences.
    """
    ids = token_batch(args, length)
    systems = {name: build(name, args, length) for name in names}
    return take_turns({name: partial(one.step, ids) for name, one in systems.items()}, args.rounds, warm_up=2).wall


def peak_of_steps(args: StepArguments, build: Callable[[str, Any, int], StepSystem], name: str) -> float:
    """Peak memory of two steps of one system in MB, to be called in a process of its own."""
    before = peak_resident_mb()
    ids = token_batch(args, args.lengths[0])
    system = build(name, args, args.lengths[0])
    for _ in range(2):
        system.step(ids)
    if ids.is_cuda:
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_resident_mb() - before


def peaks_of_steps(
    build: Callable[[str, Any, int], StepSystem], names: Iterable[str], args: StepArguments, length: int
) -> dict[str, float]:
    """Peak memory of each system in MB, each in a process of its own; see [`seconds_of_steps`] for the arguments."""
    alone = replace(args, lengths=[length])
    return {name: in_new_process(peak_of_steps, alone, build, name) for name in names}


def run_python(interpreter: str | None, code: str, *words: str, threads: int) -> str:
    """Runs code in an interpreter, on the CPU, and returns the last line that it prints.

    Args:
        interpreter (`str`, *optional*): Its path; the one of this process by default.
        code (`str`): What it runs.
        words (`str`): `sys.argv[1:]` of the code.
        threads (`int`): Number of CPU threads.

    Raises:
        RuntimeError: with the last line of the error, if the code fails; `OSError` if there is no such interpreter.
    """
    environment = {
        **os.environ,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [interpreter or sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return done.stdout.rstrip().rpartition("\n")[2]


def write_summary(args: BenchmarkArguments, results: Mapping[str, Any]) -> dict[str, Any]:
    """Completes results with settings and provenance, and writes them if `--output_dir` says where.

    Settings have the earliest names of their flags as keys, so that summaries of all versions have the same.

    Returns:
        `dict`: the summary.
    """
    settings = {}
    for one in fields(args):
        if one.init and one.name != "output_dir":
            key = one.metadata.get("aliases", [one.name])[0].lstrip("-")
            settings[key] = getattr(args, one.name)
    if args.cpu_threads is None:
        settings["threads"] = torch.get_num_threads()
    device = torch.cuda.get_device_name() if args.torch_device.type == "cuda" else "cpu"
    summary = {**results, **settings, **provenance(args.seed, device)}
    if args.summary_path is not None:
        write_json(args.summary_path, summary)
    return summary
