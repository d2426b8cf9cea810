# Licensed under the Apache License, Version 2.0.
"""A run of a recipe: its arguments from YAML or flags, its folder, and what it leaves there."""

import argparse
import contextlib
import csv
import dataclasses
import io
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from accelerate import PartialState
from filelock import FileLock, Timeout
from transformers import HfArgumentParser
from transformers.utils.logging import disable_progress_bar

from .. import __version__
from .._files import fingerprint, read_json, read_text, write_text
from .._tables import format_table as format_table


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments  # slow to import


logger = logging.getLogger(__name__)

SUMMARY, CONFIG, INPUTS, LOCK = "summary.json", "config.yaml", ".inputs.json", ".lock"
# Where and how a run is watched and published; changing these does not change the run.
NOT_OF_THE_RUN = (
    "resume",
    "output_dir",
    "disable_tqdm",
    "cpu_threads",
    "report_to",
    "run_name",
    "logging_dir",
    "local_rank",
    "license",
)


CPU_ONLY = "ACCELERATE_USE_CPU"  # read by Accelerate


@dataclasses.dataclass
class RunArguments:
    """Where a recipe runs, and whether it goes on with what is there."""

    resume: bool = dataclasses.field(default=False, metadata={"help": "Go on with the run in output_dir."})
    device: str = dataclasses.field(default="auto", metadata={"help": "auto, cpu or cuda."})
    cpu_threads: int | None = dataclasses.field(
        default=None, metadata={"help": "Threads of a process on the CPU; its share of the cores by default."}
    )

    def __post_init__(self):
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but PyTorch finds no GPU here; use --device cpu or auto.")
        self.check_at_least(1, "cpu_threads")
        if self.device == "cpu":
            os.environ[CPU_ONLY] = "true"

    def check_at_least(self, least: int, *names: str) -> None:
        """Refuses values below `least`; None is no value."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")

    def check_positive(self, *names: str) -> None:
        """Refuses values that are not greater than 0, such as NaN."""
        for name in names:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}.")

    def use_threads(self) -> None:
        """Gives this process its share of the cores: Accelerate's launcher leaves it one thread."""
        state = PartialState()
        if state.device.type == "cpu":
            share = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(self.cpu_threads or max(1, share // state.num_processes))


def cpu_only() -> bool:
    """Whether to train on the CPU: it was asked for, or there is nothing else.

    Said before the devices are set up: only then do several processes without a GPU find each other.
    """
    return CPU_ONLY in os.environ or not torch.accelerator.is_available()


def start_processes() -> PartialState:
    """Finds the other processes of a recipe that has no trainer, once all of them have come so far.

    They may wait for each other for days: otherwise, those whose share is done would give up after some minutes, and
    end the run.
    """
    state = PartialState(cpu=cpu_only(), timeout=timedelta(days=30))
    state.wait_for_everyone()
    return state


def share_out(items: Sequence[str], make: Callable[[str], None]) -> None:
    """Makes some things: of several processes, each one its share; all of them wait for the last.

    Args:
        items (sequence of `str`): What is to be made.
        make (callable): Makes one of them. What it refuses as bad input is said by the process that found it.
    """
    state = PartialState()
    for item in items[state.process_index :: state.num_processes]:
        with refuse_bad_input(everywhere=True):
            make(item)
    state.wait_for_everyone()


def save_made(model: "PreTrainedModel", folder: str | Path) -> None:
    """Saves what this process alone has made, as of [`share_out`]; Transformers would save on the first one only."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        model.save_pretrained(folder)
    finally:
        del model.should_save_on_this_rank


def device_name(training_args: "TrainingArguments") -> str:
    """What a run was made on, for its summary."""
    return torch.cuda.get_device_name() if training_args.device.type == "cuda" else training_args.device.type


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Flags with their defaults, below a description that keeps its lines."""


class _Parser(HfArgumentParser):
    """Says what is wrong in one line, not in the usage of two hundred flags, and in its help what a recipe does."""

    def __init__(self, dataclass_types: Iterable[type], description: str | None):
        super().__init__(
            dataclass_types,
            prog=Path(sys.argv[0]).name,
            usage="%(prog)s [CONFIG.yaml] [--flag value …]",
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
        )

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


@contextlib.contextmanager
def refuse_bad_input(everywhere: bool = False) -> Iterator[None]:
    """Turns the errors that bad input raises into one line on standard error and exit status 2.

    Args:
        everywhere (`bool`): Whether each of several processes says so, since others may not have met the error.

    Example:
        >>> with refuse_bad_input():
        ...     raise ValueError("vocab_size is 3; raise it.")
        Traceback (most recent call last):
        SystemExit: 2
    """
    try:
        yield
    except (ValueError, OSError) as error:
        logger.debug("refused", exc_info=True)
        if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {error}\n")
        raise SystemExit(2) from error


def parse_yaml_or_flags(
    *dataclass_types: type,
    presets: dict[str, dict[str, Any]] | None = None,
    argv: list[str] | None = None,
    description: str | None = None,
) -> tuple:
    """Arguments of a recipe: `[CONFIG.yaml] [--flag value …]`. Flags win over the file, the file over the preset.

    Args:
        dataclass_types (`type`): Dataclasses whose fields are the flags.
        presets (`dict`, *optional*): Defaults of some flags, by the names that the flag `--preset` takes; the first
            one is used if none is named.
        argv (`list[str]`, *optional*): Words of the command line; those of this process by default.
        description (`str`, *optional*): What `--help` says before the flags.

    Returns:
        `tuple`: one instance of each dataclass.

    Raises:
        SystemExit: with status 2 and one line on standard error, if a flag, key or value is not possible.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(dataclass_types, description)
    with refuse_bad_input():
        values = _values_of_file(Path(argv.pop(0))) if argv and not argv[0].startswith("-") else {}
        if presets:
            name = _given(argv, values).get("preset", next(iter(presets)))
            if name not in presets:
                raise ValueError(f"preset {name!r} is not one of {', '.join(presets)}.")
            parser.set_defaults(**presets[name])
        fields = chain.from_iterable(map(dataclasses.fields, dataclass_types))
        known = {"help", *(field.name for field in fields if field.init)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"the configuration has the unknown key {unknown[0]!r}; --help lists all keys.")
        # No flag can say nothing.
        empty = {key: value for key, value in values.items() if value is None or value == []}
        parser.set_defaults(**empty)
        words = [word for key, value in values.items() if key not in empty for word in _flag(key, value)]
        return parser.parse_args_into_dataclasses(words + argv)


def given_values(argv: list[str] | None = None) -> dict[str, Any]:
    """What the command line of a recipe says, before it is known which flags there are.

    Args:
        argv (`list[str]`, *optional*): Words of the command line; those of this process by default.

    Returns:
        `dict[str, Any]`: values by the names of keys of the YAML file, and of flags, which win. Those of flags are
        words as they were written, `None` for a flag without any.

    Raises:
        ValueError: if the first word is neither a flag nor a YAML file.

    Example:
        >>> given_values(["--model", "lstm", "--keep", "4", "2", "--from_scratch"])
        {'model': 'lstm', 'keep': '4 2', 'from_scratch': None}
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    values = _values_of_file(Path(argv.pop(0))) if argv and not argv[0].startswith("-") else {}
    return _given(argv, values)


def _given(words: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """`values`, and those of flags among words."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = [value] if value else []
        elif flags:
            flags[list(flags)[-1]].append(word)
    return {**values, **{name: " ".join(value) or None for name, value in flags.items()}}


def _values_of_file(path: Path) -> dict[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{str(path)!r} is neither a flag (--name value) nor a YAML file.")
    return read_yaml(path)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The `name: value` lines of a YAML file.

    Raises:
        ValueError: naming the file, if it is not such a file.
    """
    text = read_text(path)
    try:
        values = yaml.safe_load(text) or {}
    # A value may not be what its tag says (`!!bool x`), which is found by whatever fails then.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `name: value` lines, got {type(values).__name__}.")
    return values


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def values_of_run(args: Any, training_args: "TrainingArguments", presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What makes a run what it is, in a form that YAML can hold and [`parse_yaml_or_flags`] reads back.

    Args:
        args (dataclass): Arguments of the recipe, of which all are taken.
        training_args (`TrainingArguments`): Of these, what differs from its default or may come from a preset.
        presets (`dict`): The presets of the recipe.

    Returns:
        `dict[str, Any]`: values by the names of the flags, without those of [`NOT_OF_THE_RUN`].
    """
    of_presets = {key for values in presets.values() for key in values}
    # Trainer arguments compute values at construction; what these would be anyway is not the user's.
    default = type(training_args)(output_dir=training_args.output_dir).to_dict()
    training = {
        key: value for key, value in training_args.to_dict().items() if key in of_presets or value != default.get(key)
    }
    values = {**dataclasses.asdict(args), **training}
    return {key: value for key, value in values.items() if key not in NOT_OF_THE_RUN}


def refuse_flags(args: Any, without_effect: Mapping[str, str], preset: Mapping[str, Any] | None = None) -> None:
    """Refuses flags that a recipe does not read.

    Args:
        args (dataclass): Arguments.
        without_effect (`dict[str, str]`): Names of such flags, and what to do instead.
        preset (`dict`, *optional*): Defaults of flags where they are not those of the dataclass.

    Raises:
        ValueError: naming the first that differs from its default.
    """
    for name, instead in without_effect.items():
        value, field = getattr(args, name), type(args).__dataclass_fields__[name]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if value != (preset or {}).get(name, default):
            raise ValueError(f"{name}={value} has no effect here; {instead}.")


def check_names(argument: str, values: Sequence[Any], known: Iterable[str] | None = None) -> None:
    """Refuses values of a flag that takes several: no value, one twice, or one that is not known.

    Args:
        argument (`str`): Name of the flag.
        values (sequence): What was given.
        known (iterable of `str`, *optional*): What may be named.

    Raises:
        ValueError: naming the flag, what was given, and what may be.
    """
    known = None if known is None else list(known)
    for value in values if known is not None else ():
        if value not in known:
            raise ValueError(f"{argument} must be among {', '.join(known)}, got {value!r}.")
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{argument} must name something, and nothing twice, got {list(values)}.")


def check_output_dir(folder: str | Path, config: dict[str, Any], resume: bool) -> Path:
    """Refuses a folder that holds another run; writes nothing.

    Args:
        folder (`str` or `Path`): Where the run is to write.
        config (`dict`): Values of this run, see [`values_of_run`].
        resume (`bool`): Whether the run goes on with what is there.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: if the folder is a file, or is not empty and `resume` is not asked for, or has a run with other
            values, or of files that have changed since.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; name a folder.")
    # Hidden files are the lock, and what a run left half-written that was killed before it began.
    if not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return folder
    if not resume:
        raise ValueError(f"output_dir {folder} already holds files; name another folder, or go on with --resume.")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"output_dir {folder} holds no {CONFIG} of a run that could be resumed; name another folder.")
    before = read_yaml(folder / CONFIG)
    other = sorted(key for key in before.keys() | config.keys() if before.get(key) != config.get(key))
    if other:
        # Of arguments of a trainer, a run says what is not their default.
        one, two = (f"{other[0]}={c[other[0]]!r}" if other[0] in c else f"{other[0]} unset" for c in (before, config))
        raise ValueError(
            f"output_dir {folder} holds a run with {one}, which can not be resumed with {two}; name another folder."
        )
    inputs = read_json(folder / INPUTS) if (folder / INPUTS).is_file() else {}
    for name, now in _inputs(config).items():
        if inputs.get(name, now) != now:
            raise ValueError(
                f"output_dir {folder} holds a run of {name}, which has changed since; name another folder, or put "
                "back what it was."
            )
    return folder


def _inputs(config: dict[str, Any]) -> dict[str, str]:
    """Fingerprints of files and folders that a run reads, by what its values call them."""
    values = [one for value in config.values() for one in (value if isinstance(value, list) else [value])]
    # A word that some folder here is called by chance is no path.
    paths = [value for value in values if isinstance(value, str) and (os.sep in value or Path(value).is_file())]
    return {path: print_ for path in paths if (print_ := fingerprint(path)) is not None}


_locks: dict[Path, FileLock] = {}


def begin_run(folder: str | Path, config: dict[str, Any]) -> None:
    """Claims a folder for this process, as long as it lives, and writes what is run; for the main process alone.

    That is `config.yaml`, and beside it what tells the files that the values name from later ones.

    The claim goes with the process, also when it is killed: a lock of the operating system on the file `.lock`. A
    folder that another process has claimed is refused as bad input is, with exit status 2.

    Args:
        folder (`str` or `Path`): What [`check_output_dir`] has allowed; it is made.
        config (`dict`): Values of this run.
    """
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if folder not in _locks:
        lock = FileLock(folder / LOCK)
        with refuse_bad_input():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise ValueError(
                    f"another run is writing to output_dir {folder}; wait for it, or name another folder."
                ) from None
        _locks[folder] = lock
    write_yaml(folder / CONFIG, config)
    write_json(folder / INPUTS, _inputs(config))


def write_json(path: str | Path, values: Any) -> None:
    """Writes JSON, see [`write_text`]."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Writes a table with a header, see [`write_text`].

    Args:
        path (`str` or `Path`): The file.
        rows (sequence of `dict`): Its lines; `None` is an empty cell.
        columns (sequence of `str`, *optional*): Keys to write, in this order; those of the first row by default, which
            all rows must then have.
    """
    table = io.StringIO()
    ignored = "raise" if columns is None else "ignore"
    writer = csv.DictWriter(table, columns or list(rows[0]), extrasaction=ignored, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, table.getvalue())


def write_yaml(path: str | Path, values: dict[str, Any]) -> None:
    """Writes YAML, see [`write_text`]."""
    write_text(path, yaml.safe_dump(values, sort_keys=True))


def run_or_read(
    name: str, folder: str | Path, make: Callable[[], tuple[dict[str, Any], "Trainer", str | None]]
) -> dict[str, Any]:
    """Figures of one model of a run: read if an earlier, stopped run left them.

    Args:
        name (`str`): Name of the model in the folder `checkpoints` of the run.
        folder (`str` or `Path`): Folder of the run.
        make (callable): Trains it; returns figures, trainer, and the name of the folder to save it in, if any.

    Returns:
        `dict`: the figures.
    """
    record = Path(folder) / "checkpoints" / name / "run.json"
    if record.is_file():
        return read_json(record)
    figures, trainer, saved_as = make()
    if saved_as is not None:
        trainer.save_model(str(Path(folder) / saved_as))
    if trainer.is_world_process_zero():
        write_json(record, figures)
    trainer.accelerator.wait_for_everyone()
    return figures


def read_summaries(folders: Iterable[str | Path], alike: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Summaries of finished runs.

    Args:
        folders (iterable of `str` or `Path`): Their folders.
        alike (`tuple[str, ...]`): Keys that must be the same in all of them.

    Returns:
        `list[dict]`: in the order of `folders`.

    Raises:
        ValueError: if a folder holds no finished run, or runs differ where they may not.
    """
    summaries: list[dict[str, Any]] = []
    for folder in map(Path, folders):
        try:
            summary = read_json(folder / SUMMARY)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} holds no {SUMMARY} of a finished run: {error}") from error
        if not isinstance(summary, dict):
            raise ValueError(f"{folder / SUMMARY} holds no figures by name, but {type(summary).__name__}.")
        summaries.append(summary)
        for key in alike:
            first, this = summaries[0].get(key), summaries[-1].get(key)
            if first != this:
                raise ValueError(
                    f"runs must have been made alike, but {key} is {first!r} in the first, {this!r} in {folder}."
                )
    return summaries


def provenance(seed: int, device: str) -> dict[str, Any]:
    """Where figures come from: seed, device, command and versions, as flat keys of a summary."""
    script = os.path.relpath(sys.argv[0])
    if script.startswith(os.pardir):
        script = Path(script).name
    packages = ("transformers", "torch", "accelerate", "datasets", "tokenizers")
    return {
        "seed": seed,
        "device": device,
        "command": shlex.join([script, *sys.argv[1:]]),
        "python_version": platform.python_version(),
        "hf_attn_dynamics_version": __version__,
        **{f"{name}_version": version(name) for name in packages},
    }


def run_recipe(main: Callable[..., Any], *dataclass_types: type, presets: dict | None = None) -> None:
    """Parses the command line, and calls `main` with one instance of each dataclass.

    Transformers shows no progress bars for reading and writing weights meanwhile, which takes no time here.

    Raises:
        SystemExit: as [`parse_yaml_or_flags`] does, and with status 130 after Ctrl-C, once it is said how to go on.
    """
    disable_progress_bar()
    try:
        description = sys.modules[main.__module__].__doc__
        main(*parse_yaml_or_flags(*dataclass_types, presets=presets, description=description))
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            begun = "".join(f"; the same command with --resume goes on with {folder}" for folder in _locks)
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped{begun or ' before anything was written'}.\n")
        raise SystemExit(130) from None
