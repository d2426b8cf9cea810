# Licensed under the Apache License, Version 2.0.
"""Complete and damaged checkpoints of a stopped run."""

import logging
import zipfile
from pathlib import Path

from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .._files import read_json, read_weight_index
from ..models.compat import TRAINER_STATE_NAME
from ..models.loaded_weights import is_whole


logger = logging.getLogger(__name__)


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a `Trainer`; warns of later ones that are incomplete.

    A run that is killed while saving leaves an incomplete checkpoint, from which the stock Trainer would resume with
    `resume_from_checkpoint=True`.

    Args:
        folder (`str` or `Path`): `output_dir` of the trainer; it need not exist.

    Returns:
        `Path`: the checkpoint for `trainer.train(resume_from_checkpoint=…)`, which [`HeadwiseTrainer`] also finds for
        `True`; `None` if there is none.

    Example:
        >>> from hf_attn_dynamics.training import newest_checkpoint
        >>> newest_checkpoint("runs/not_yet") is None
        True
    """
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.split("-")[-1].isdigit()]
    newest, passed = None, []
    for path in sorted(found, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        damage = checkpoint_damage(path)
        if damage is None:
            newest = path
            break
        passed.append(f"{path} is incomplete ({damage})")
    if passed:
        found = f"the newest complete checkpoint is {newest}" if newest else "there is no complete checkpoint"
        logger.warning("%s; %s.", ", ".join(passed), found)
    return newest


def train_from_newest(trainer: Trainer) -> TrainOutput:
    """Resumes training from the newest complete checkpoint in `output_dir`, or starts it if there is none.

    Args:
        trainer (`Trainer`): The trainer; a complete run is not trained further.

    Returns:
        `TrainOutput`: the output of `trainer.train`.
    """
    checkpoint = newest_checkpoint(trainer.args.output_dir)
    return trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


def whole_checkpoint(requested: str | bool | None, folder: str) -> str | None:
    """The checkpoint to resume from.

    Args:
        requested (`str` or `bool`, *optional*): A checkpoint; `True` for the newest complete one; none otherwise.
        folder (`str`): `output_dir` of the trainer.

    Raises:
        ValueError: if it is incomplete, or there is none.
    """
    if requested is None or requested is False:
        return None
    if requested is True:
        newest = newest_checkpoint(folder)
        if newest is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but {folder} has no complete checkpoint: leave it out to train from "
                "the start, or choose another output_dir."
            )
        return str(newest)
    if (damage := checkpoint_damage(requested)) is not None:
        raise ValueError(
            f"resume_from_checkpoint={requested!r} is not a complete checkpoint: {damage}. True selects the newest "
            "complete one."
        )
    return str(requested)


def checkpoint_damage(folder: str | Path) -> str | None:
    """Describes what is wrong with a checkpoint of a `Trainer`; `None` if it is complete.

    A complete checkpoint has all shards of the weights and the trainer state, which is written last; it has the states
    of optimizer, schedule and random numbers, or none of them (`save_only_model`); and all files can be read.

    Args:
        folder (`str` or `Path`): The checkpoint.

    Returns:
        `str`: the damaged file and the problem. Changed values within weights are not detected.
    """
    folder = Path(folder)
    state = folder / TRAINER_STATE_NAME
    if not state.is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    if missing := _missing_file(folder):
        return f"{missing} is missing"
    for path in sorted(folder.iterdir()):
        check = _CHECKS.get(path.suffix)
        if check is not None and not check(path):
            return f"{path.name} is truncated or damaged"
    saved = read_json(state)
    if not isinstance(saved, dict) or not isinstance(saved.get("global_step"), int):
        return f"{TRAINER_STATE_NAME} has no global_step"
    for index in folder.glob("*.index.json"):
        try:
            names = read_weight_index(index)
        except ValueError:
            return f"{index.name} is not an index of weights"
        for name in names:
            if not (folder / name).is_file():
                return f"{name} is missing"
    return None


# Files that a trainer saves, with one or several processes, FSDP and DeepSpeed included.
_WEIGHTS = ("model*.safetensors*", "pytorch_model*", "adapter_model*", "*/adapter_model*", "global_step*")
_STATES = {
    "optimizer.pt": ("*optimizer.pt", "optimizer*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}


def _missing_file(folder: Path) -> str | None:
    """Name of a file that a checkpoint lacks, if any."""

    def has(patterns: tuple[str, ...]) -> bool:
        return any(True for pattern in patterns for _ in folder.glob(pattern))

    if not has(_WEIGHTS):
        return "model.safetensors"
    missing = [name for name, patterns in _STATES.items() if not has(patterns)]
    if missing and len(missing) < len(_STATES):
        return missing[0]
    # PyTorch writes this file last in distributed checkpoints.
    parts = {part.parent for part in folder.glob("*/*.distcp")}
    return next((f"{part.name}/.metadata" for part in sorted(parts) if not (part / ".metadata").is_file()), None)


def _is_json(path: Path) -> bool:
    try:
        read_json(path)
    except ValueError:
        return False
    return True


def _is_archive(path: Path) -> bool:
    """Whether a file is a valid archive of `torch.save` with correct checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError):
        return False


_CHECKS = {
    ".json": _is_json,
    ".safetensors": is_whole,
    ".pt": _is_archive,
    ".pth": _is_archive,
    ".bin": _is_archive,
}
