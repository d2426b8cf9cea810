# Licensed under the Apache License, Version 2.0.
"""A run of a recipe: its arguments from YAML or flags, its folder, and what it leaves there."""

import contextlib
import csv
import dataclasses
import inspect
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from accelerate import PartialState
from filelock import FileLock, Timeout
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers.utils.logging import disable_progress_bar

from .. import __version__
from .._files import fingerprint, read_json, write_text
from .._refusals import refuse_bad_input
from ..hub.push import COMMAND, push_finished, take_push
from . import PROGRAM
from .arguments.base import CPU_ONLY, RunArguments
from .arguments.parsing import parse_yaml_or_flags, read_yaml


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


def use_threads(number: int | None = None) -> None:
    """Has this process compute with its share of the cores, if it computes on the CPU, and says with how many.

    A launcher leaves each process one thread. Whoever sets `OMP_NUM_THREADS` without one has chosen.

    Args:
        number (`int`, *optional*): Threads to use instead.
    """
    state = PartialState()
    if state.device.type != "cpu":
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(number or _threads_of_user() or max(1, cores // state.num_processes))
    if state.is_main_process:
        count = torch.get_num_threads()
        of_each = " a process" if state.num_processes > 1 else ""
        print(f"Computing on the CPU with {count} thread{'s' * (count > 1)}{of_each}.")


def _threads_of_user() -> int | None:
    """What `OMP_NUM_THREADS` says, unless it is the 1 that launchers set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    return int(first) if first.isdecimal() and int(first) and not (is_launched and first == "1") else None


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
            f"output_dir {folder} holds a run with {one}, which cannot be resumed with {two}; name another folder."
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
    # The name of a recipe comes with that of the command.
    words = script.split() if script.startswith(f"{PROGRAM} ") else [script]
    packages = ("transformers", "torch", "accelerate", "datasets", "tokenizers")
    return {
        "seed": seed,
        "device": device,
        "command": shlex.join([*words, *sys.argv[1:]]),
        "python_version": platform.python_version(),
        "hf_attn_dynamics_version": __version__,
        **{f"{name}_version": version(name) for name in packages},
    }


class Run:
    """A run of a recipe, from its arguments to its summary.

        run = Run(args, training_args, PRESETS)
        with run.preparing():
            model, data = prepare(args, training_args)    # reads, checks, refuses: nothing is written before it ends
        rows = [run.once(name, partial(make, name)) for name in names]    # read, where a stopped run left them
        return run.finish(figures_of(rows), publish, print_report, pushed="model")

    Args:
        args ([`RunArguments`]): Flags of the recipe itself.
        training_args (`TrainingArguments`, *optional*): Those of its trainer, which then has `output_dir` and `seed`.
        presets (`dict`, *optional*): Presets of the recipe.
        pushes (`bool`): Whether one of its models is pushed to the Hub, if that is asked for.

    Attributes:
        folder (`Path`): Where it writes; known once it is being prepared.
        is_main (`bool`): Whether this process is the one that writes; known once it is prepared.
    """

    def __init__(
        self,
        args: RunArguments,
        training_args: "TrainingArguments | None" = None,
        presets: dict[str, dict[str, Any]] | None = None,
        pushes: bool = True,
    ):
        self.args, self.training_args, self.presets, self.pushes = args, training_args, presets or {}, pushes
        self._push = None
        self.folder: Path
        self.state: PartialState

    @contextlib.contextmanager
    def preparing(self, choose: Callable[[], None] | None = None) -> Iterator[None]:
        """Refuses bad input in one line while a recipe reads and checks; then claims the folder.

        Args:
            choose (callable, *optional*): Sets what the command line leaves open, before it is written down.

        Raises:
            SystemExit: with status 2 for what is raised as `ValueError` or `OSError` meanwhile.
        """
        settings = self.training_args or self.args
        with refuse_bad_input():
            if self.training_args is not None:
                self._take_push()
            if choose is not None:
                choose()
            values = self._values()
            self.folder = check_output_dir(settings.output_dir, values, self.args.resume)
            yield
        self.state = PartialState() if self.training_args is not None else start_processes()
        self.args.use_threads()
        self.state.wait_for_everyone()
        if self.is_main:
            begin_run(self.folder, values)

    @property
    def is_main(self) -> bool:
        return self.state.is_main_process

    @property
    def is_pushed(self) -> bool:
        """Whether a model is to be pushed to the Hub; known once the run is being prepared."""
        return self._push is not None

    def _values(self) -> dict[str, Any]:
        if self.training_args is not None:
            return values_of_run(self.args, self.training_args, self.presets)
        return {key: value for key, value in dataclasses.asdict(self.args).items() if key not in NOT_OF_THE_RUN}

    def _take_push(self) -> None:
        self._push = take_push(self.training_args)
        if self._push and not self.pushes:
            raise ValueError(f"push_to_hub does not say which model is meant; push one with {' '.join(COMMAND)}.")

    def once(self, name: str, make: Callable[[], tuple[dict[str, Any], "Trainer", str | None]]) -> dict[str, Any]:
        """Figures of one model, see [`run_or_read`]."""
        return run_or_read(name, self.folder, make)

    def finish(
        self,
        figures: dict[str, Any],
        publish: Callable[[dict[str, Any]], None],
        report: Callable[[dict[str, Any]], None] | None = None,
        pushed: str | None = None,
    ) -> dict[str, Any]:
        """Writes all that the run leaves, with `summary.json` last, says what it found, and pushes a model if asked.

        Args:
            figures (`dict`): What the run found; where it comes from is added, with the seed of the arguments unless
                there is one.
            publish (callable): Draws pictures and writes tables and cards, given the summary.
            report (callable, *optional*): Prints the summary for people, once all is written.
            pushed (`str`, *optional*): Folder of the model that is pushed.

        Returns:
            `dict`: the summary.
        """
        settings = self.training_args or self.args
        device = device_name(self.training_args or self.state)
        number = {"num_processes": self.state.num_processes}
        summary = {**figures, **number, **provenance(figures.get("seed", settings.seed), device)}
        if self.is_main:
            publish(summary)
            write_json(self.folder / SUMMARY, summary)
            if report is not None:
                report(summary)
            if pushed is not None:
                push_finished(self.folder / pushed, self._push)
        return summary


def flags_of(main: Callable[..., Any]) -> list[type]:
    """Dataclasses of the flags of a recipe: the annotations of the parameters of its `main`."""
    return [parameter.annotation for parameter in inspect.signature(main).parameters.values()]


def run_recipe(main: Callable[..., Any], presets: dict[str, dict[str, Any]] | None = None) -> None:
    """Parses the command line into the dataclasses that `main` takes, and calls it.

    Transformers shows no progress bars for reading and writing weights meanwhile, which takes no time here. Log
    messages are printed on lines of their own, above progress bars.

    Args:
        main (callable): The recipe, see [`flags_of`].
        presets (`dict`, *optional*): See [`parse_yaml_or_flags`].

    Raises:
        SystemExit: as [`parse_yaml_or_flags`] does, and with status 130 after Ctrl-C, once it is said how to go on.
    """
    disable_progress_bar()
    try:
        description = sys.modules[main.__module__].__doc__
        arguments = parse_yaml_or_flags(*flags_of(main), presets=presets, description=description)
        with logging_redirect_tqdm([logging.getLogger(), logging.getLogger("transformers")]):
            main(*arguments)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            begun = "".join(f"; the same command with --resume goes on with {folder}" for folder in _locks)
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped{begun or ' before anything was written'}.\n")
        raise SystemExit(130) from None
