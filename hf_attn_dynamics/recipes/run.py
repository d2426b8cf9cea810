# Licensed under the Apache License, Version 2.0.
"""A run of a recipe: flags, output folder, processes, resuming, summary and push."""

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
from .arguments.parsing import parse_yaml_or_flags, read_yaml, with_current_names
from .summaries.base import Summary, explained


if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments  # slow to import


logger = logging.getLogger(__name__)

SUMMARY, CONFIG, INPUTS, LOCK = "summary.json", "config.yaml", ".inputs.json", ".lock"
PROCESSES = "number of processes"  # beside the inputs
# Flags that may change when a run is resumed.
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
    """Sets and prints the number of CPU threads of this process, if it computes on the CPU.

    By default, the cores are divided among the processes, since launchers set one thread per process. An
    `OMP_NUM_THREADS` that the user has set is respected.

    Args:
        number (`int`, *optional*): Number of threads.
    """
    state = PartialState()
    if state.device.type != "cpu":
        return
    torch.set_num_threads(number or _threads_of_user() or max(1, num_cores() // state.num_processes))
    if state.is_main_process:
        count = torch.get_num_threads()
        of_each = " a process" if state.num_processes > 1 else ""
        print(f"Computing on the CPU with {count} thread{'s' * (count > 1)}{of_each}.")


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads_of_user() -> int | None:
    """`OMP_NUM_THREADS`, unless it is the 1 that launchers set."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    return int(first) if first.isdecimal() and int(first) and not (is_launched and first == "1") else None


def cpu_only() -> bool:
    """Whether to train on the CPU, because of `--device cpu` or because there is no accelerator.

    Accelerate must know before it sets up devices: otherwise processes without a GPU do not connect.
    """
    return CPU_ONLY in os.environ or not torch.accelerator.is_available()


def start_processes() -> PartialState:
    """Connects the processes of a recipe without a trainer.

    The timeout is 30 days: with the default of some minutes, processes that finish early would end the run.
    """
    state = PartialState(cpu=cpu_only(), timeout=timedelta(days=30))
    state.wait_for_everyone()
    return state


def share_out(items: Sequence[str], make: Callable[[str], None]) -> None:
    """Distributes items over processes and waits for all of them.

    Args:
        items (sequence of `str`): Names of the items.
        make (callable): Processes one item. Bad input is reported by the process that finds it.
    """
    state = PartialState()
    for item in items[state.process_index :: state.num_processes]:
        with refuse_bad_input(everywhere=True):
            make(item)
    state.wait_for_everyone()


def named_files(files: Sequence[str]) -> str:
    """Names of files without their folders, for summaries and cards."""
    return ", ".join(Path(file).name for file in files)


def save_made(model: "PreTrainedModel", folder: str | Path) -> None:
    """Saves a model from this process, see [`share_out`]; Transformers saves on the main process only."""
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        model.save_pretrained(folder)
    finally:
        del model.should_save_on_this_rank


def device_name(training_args: "TrainingArguments") -> str:
    """Name of the GPU, or cpu."""
    return torch.cuda.get_device_name() if training_args.device.type == "cuda" else training_args.device.type


def values_of_run(args: Any, training_args: "TrainingArguments", presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Values of the flags that define a run, for a YAML file that [`parse_yaml_or_flags`] reads.

    Args:
        args (dataclass): Flags of the recipe; all values are included.
        training_args (`TrainingArguments`): Flags of the trainer; values that differ from their default or occur in a
            preset are included.
        presets (`dict`): Presets of the recipe.

    Returns:
        `dict[str, Any]`: values by the names of the flags, without those in `NOT_OF_THE_RUN`.
    """
    of_presets = {key for values in presets.values() for key in values}
    # TrainingArguments compute some values at construction; a default instance has the same ones.
    default = type(training_args)(output_dir=training_args.output_dir).to_dict()
    training = {
        key: value for key, value in training_args.to_dict().items() if key in of_presets or value != default.get(key)
    }
    values = {**dataclasses.asdict(args), **training}
    return {key: value for key, value in values.items() if key not in NOT_OF_THE_RUN}


def check_output_dir(folder: str | Path, config: dict[str, Any], resume: bool, *flags: type) -> Path:
    """Checks that a run may write to a folder; writes nothing.

    Args:
        folder (`str` or `Path`): Output folder.
        config (`dict`): Values of the run, see [`values_of_run`].
        resume (`bool`): Whether to continue the run in the folder.
        flags (dataclasses): Flags of the run; the configuration in the folder may have their earlier names.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: if the folder is a file, is not empty without `resume`, holds a run with other values, or holds a
            run on files that have changed since.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file; name a folder.")
    # Hidden files are the lock, and temporary files of a run that was killed at its start.
    if not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return folder
    if not resume:
        raise ValueError(
            f"output_dir {folder} already holds files; name another folder, or continue the run with --resume true."
        )
    if not (folder / CONFIG).is_file():
        raise ValueError(f"output_dir {folder} holds no {CONFIG} of a run that can be resumed; name another folder.")
    before = with_current_names(read_yaml(folder / CONFIG), *flags)
    other = sorted(key for key in before.keys() | config.keys() if before.get(key) != config.get(key))
    if other:
        # The configuration leaves out training arguments with default values.
        one, two = (f"{other[0]}={c[other[0]]!r}" if other[0] in c else f"{other[0]} unset" for c in (before, config))
        raise ValueError(
            f"output_dir {folder} holds a run with {one}, which cannot be resumed with {two}; name another folder."
        )
    inputs = read_json(folder / INPUTS) if (folder / INPUTS).is_file() else {}
    for name, now in _inputs(config).items():
        if inputs.get(name, now) != now:
            raise ValueError(
                f"output_dir {folder} holds a run on {name}, which has changed since; name another folder, or "
                "restore the file."
            )
    processes = PartialState().num_processes
    if inputs.get(PROCESSES, processes) != processes:
        raise ValueError(
            f"output_dir {folder} holds a run in {inputs[PROCESSES]} processes, which cannot be resumed in "
            f"{processes}, whose batches are others; start as many processes, or name another folder."
        )
    return folder


def _inputs(config: dict[str, Any]) -> dict[str, str]:
    """Fingerprints of the files and folders that a run reads, by their names in its values."""
    values = [one for value in config.values() for one in (value if isinstance(value, list) else [value])]
    found = {}
    for value in values:
        # Several flags take `NAME=PATH`.
        for path in (value, value.partition("=")[2]) if isinstance(value, str) else ():
            # Without a separator it is a path only if it is a file or pattern: a folder may have the name by chance.
            if os.sep in path or os.path.isfile(path) or any(sign in path for sign in "*?["):
                found[value] = found.get(value) or fingerprint(path)
    return {name: print_ for name, print_ in found.items() if print_ is not None}


_locks: dict[Path, FileLock] = {}


def begin_run(folder: str | Path, config: dict[str, Any]) -> None:
    """Locks a folder for the lifetime of this process, and writes `config.yaml` and fingerprints of the input files.

    Only the main process calls it. The lock is one of the operating system on the file `.lock`, which ends with the
    process even if that is killed.

    Args:
        folder (`str` or `Path`): Output folder, checked by [`check_output_dir`]; it is created.
        config (`dict`): Values of the run.

    Raises:
        SystemExit: with status 2, if another process has locked the folder.
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
    write_json(folder / INPUTS, {**_inputs(config), PROCESSES: PartialState().num_processes})


def write_json(path: str | Path, values: Any) -> None:
    """Writes JSON, see [`write_text`]."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Writes a table with a header, see [`write_text`].

    Args:
        path (`str` or `Path`): The file.
        rows (sequence of `dict`): Rows; `None` is an empty cell.
        columns (sequence of `str`, *optional*): Keys to write, in this order; by default those of the first row, which
            all rows must have.
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
    """Results of one model of a run, read from disk if a stopped run has saved them.

    Args:
        name (`str`): Name of the model in the folder `checkpoints` of the run.
        folder (`str` or `Path`): Output folder of the run.
        make (callable): Trains the model; returns results, trainer, and the folder to save the model in, or None.

    Returns:
        `dict`: the results.
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
    """Reads the summaries of finished runs.

    Args:
        folders (iterable of `str` or `Path`): Output folders of the runs.
        alike (`tuple[str, ...]`): Keys whose values must be equal in all summaries.

    Returns:
        `list[dict]`: in the order of `folders`.

    Raises:
        ValueError: if a folder holds no finished run, or the values of a key in `alike` differ.
    """
    summaries: list[dict[str, Any]] = []
    for folder in map(Path, folders):
        try:
            summary = read_json(folder / SUMMARY)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} holds no {SUMMARY} of a finished run: {error}") from error
        if not isinstance(summary, dict):
            raise ValueError(f"{folder / SUMMARY} must hold an object, got {type(summary).__name__}.")
        summaries.append(summary)
        for key in alike:
            first, this = summaries[0].get(key), summaries[-1].get(key)
            if first != this:
                raise ValueError(
                    f"runs must have the same {key}, but it is {first!r} in the first run and {this!r} in {folder}."
                )
    return summaries


def _program() -> list[str]:
    """The words that start the recipe of this process, after `accelerate launch` unless they are `hf-attn NAME`."""
    script = Path(sys.argv[0])
    if script.name.startswith(f"{PROGRAM} "):
        return script.name.split()
    if script.resolve().parent == Path(__file__).parent:
        return ["-m", f"{__package__}.{script.stem}"]
    try:
        relative = os.path.relpath(script)
    except ValueError:  # another drive
        return [script.name]
    return [script.name if relative.startswith(os.pardir) else relative]


def provenance(seed: int, device: str) -> dict[str, Any]:
    """Origin of results: seed, device, command and versions, as flat keys of a summary."""
    words = _program()
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
    """A run of a recipe, from its flags to its summary.

        run = Run(args, training_args, PRESETS)
        with run.preparing():
            model, data = prepare(args, training_args)    # reads and checks; nothing is written before it ends
        rows = [run.once(name, partial(make, name)) for name in names]    # read, if a stopped run saved them
        summary = PruneSummary(rows=rows, …)
        return run.finish(summary, lambda: publish(summary), lambda: print_report(summary), pushed="model")

    Args:
        args ([`RunArguments`]): Flags of the recipe.
        training_args (`TrainingArguments`, *optional*): Flags of the trainer, which then have `output_dir` and `seed`.
        presets (`dict`, *optional*): Presets of the recipe.
        pushes (`bool`): Whether `--push_to_hub` pushes a model of the run.

    Attributes:
        folder (`Path`): Output folder; set by [`Run.preparing`].
        state (`PartialState`): Processes and device; set by [`Run.preparing`].
        is_main (`bool`): Whether this is the process that writes.
    """

    def __init__(
        self,
        args: RunArguments,
        training_args: "TrainingArguments | None" = None,
        presets: dict[str, dict[str, Any]] | None = None,
        pushes: bool = True,
    ):
        self.args, self.training_args, self.presets, self.pushes = args, training_args, presets or {}, pushes
        self._push, self._is_claimed, self._has_threads = None, False, False
        self._values: dict[str, Any]
        self.folder: Path
        self.state: PartialState

    @contextlib.contextmanager
    def preparing(self, choose: Callable[[], None] | None = None) -> Iterator[None]:
        """Refuses bad input in one line while a recipe reads and checks; claims the folder at the end.

        Args:
            choose (callable, *optional*): Sets the flags that the command line leaves open, before their values are
                compared and written.

        Raises:
            SystemExit: with status 2 for a `ValueError` or `OSError`.
        """
        settings = self.training_args or self.args
        with refuse_bad_input():
            if self.training_args is not None:
                self._take_push()
            if choose is not None:
                choose()
            self._values = self._values_of_run()
            self.folder = check_output_dir(settings.output_dir, self._values, self.args.resume, type(self.args))
            self.state = PartialState() if self.training_args is not None else start_processes()
            yield
        self.claim()

    def claim(self) -> None:
        """Claims the folder, before preparing ends if preparation writes to it: training a model of its own."""
        if self._is_claimed:
            return
        self._is_claimed = True
        self.use_threads()
        # No process checks the folder after the first one writes to it.
        self.state.wait_for_everyone()
        if self.is_main:
            begin_run(self.folder, self._values)

    def use_threads(self) -> None:
        """Sets the number of CPU threads, before preparing ends if preparation measures times."""
        if not self._has_threads:
            self.args.use_threads()
        self._has_threads = True

    @property
    def is_main(self) -> bool:
        return self.state.is_main_process

    @property
    def is_pushed(self) -> bool:
        """Whether the user asks for a push to the Hub; set by [`Run.preparing`]."""
        return self._push is not None

    def _values_of_run(self) -> dict[str, Any]:
        if self.training_args is not None:
            return values_of_run(self.args, self.training_args, self.presets)
        return {key: value for key, value in dataclasses.asdict(self.args).items() if key not in NOT_OF_THE_RUN}

    def _take_push(self) -> None:
        self._push = take_push(self.training_args)
        if self._push and not self.pushes:
            raise ValueError(
                f"push_to_hub: this recipe trains several models; push one of them with {' '.join(COMMAND)}."
            )

    def once(self, name: str, make: Callable[[], tuple[dict[str, Any], "Trainer", str | None]]) -> dict[str, Any]:
        """Results of one model, see [`run_or_read`]."""
        return run_or_read(name, self.folder, make)

    def finish(
        self,
        summary: Summary,
        publish: Callable[[], None],
        report: Callable[[], None] | None = None,
        pushed: str | None = None,
    ) -> dict[str, Any]:
        """Completes the summary with its provenance, and writes, prints and pushes the results.

        Args:
            summary ([`Summary`]): Results of the run. Its seed is the one of the arguments, unless the summary has a
                seed of its own.
            publish (callable): Writes pictures, tables and cards, before `summary.json` is written.
            report (callable, *optional*): Prints the results, after everything is written.
            pushed (`str`, *optional*): Folder of the model to push to the Hub, if the user asks for a push.

        Returns:
            `dict`: what `summary.json` holds.
        """
        settings = self.training_args or self.args
        device = device_name(self.training_args or self.state)
        summary.provenance = {
            "num_processes": self.state.num_processes,
            **provenance(getattr(summary, "seed", settings.seed), device),
        }
        values = summary.to_dict()
        if self.is_main:
            publish()
            write_json(self.folder / SUMMARY, values)
            if report is not None:
                report()
            if pushed is not None:
                push_finished(self.folder / pushed, self._push)
        return values


def flags_of(main: Callable[..., Any]) -> list[type]:
    """Dataclasses of the flags of a recipe: the annotations of the parameters of its `main`."""
    return [parameter.annotation for parameter in inspect.signature(main).parameters.values()]


def run_recipe(
    main: Callable[..., Any],
    presets: dict[str, dict[str, Any]] | None = None,
    summary: type[Summary] | None = None,
) -> None:
    """Parses the command line into the dataclasses that `main` takes, and calls it.

    The progress bars of Transformers for reading and writing weights are hidden, and log records are written above
    progress bars.

    Args:
        main (callable): The recipe, see [`flags_of`].
        presets (`dict`, *optional*): See [`parse_yaml_or_flags`].
        summary (`type`, *optional*): Dataclass of the summary, whose keys `--help` explains.

    Raises:
        SystemExit: as [`parse_yaml_or_flags`] does; with status 130 and one line on how to continue after Ctrl-C.
    """
    disable_progress_bar()
    try:
        description = sys.modules[main.__module__].__doc__
        keys = explained(summary) if summary is not None else None
        arguments = parse_yaml_or_flags(*flags_of(main), presets=presets, description=description, keys=keys)
        with logging_redirect_tqdm([logging.getLogger(), logging.getLogger("transformers")]):
            main(*arguments)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: stopped{_how_to_continue()}.\n")
        raise SystemExit(130) from None


def _how_to_continue() -> str:
    """What a stopped run has left, for its last line."""
    for folder in _locks:
        written = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        if [path.name for path in written] != [CONFIG]:
            return f"; the same command with --resume true continues from {folder}"
        return f"; the same command with --resume true starts again in {folder}, which has no checkpoint yet"
    return " before anything was written"
