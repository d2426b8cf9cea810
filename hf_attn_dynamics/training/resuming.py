# Licensed under the Apache License, Version 2.0.
"""Which checkpoint a stopped run goes on from."""

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
    """The last checkpoint of a `Trainer` that is whole; later ones that are not are named in one warning.

    A run that is killed while it saves leaves part of a checkpoint, which `resume_from_checkpoint=True` would take for
    the last one.

    Args:
        folder (`str` or `Path`): `output_dir` of the trainer; it need not exist.

    Returns:
        `Path`: what to give to `trainer.train(resume_from_checkpoint=…)`, which [`HeadwiseTrainer`] finds itself for
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
        passed.append(f"{path} is not whole ({damage})")
    if passed:
        logger.warning("%s; %s.", ", ".join(passed), f"{newest} is the newest that is" if newest else "none is")
    return newest


def train_from_newest(trainer: Trainer) -> TrainOutput:
    """Trains from the newest whole checkpoint in the trainer's `output_dir` on, or from the start if there is none.

    Args:
        trainer (`Trainer`): The trainer; a run that has come to its end is not trained further.

    Returns:
        `TrainOutput`: what `trainer.train` returns.
    """
    checkpoint = newest_checkpoint(trainer.args.output_dir)
    return trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


def whole_checkpoint(asked: str | bool | None, folder: str) -> str | None:
    """The checkpoint to resume from.

    Args:
        asked (`str` or `bool`, *optional*): A checkpoint; `True` for the newest whole one; none otherwise.
        folder (`str`): `output_dir` of the trainer.

    Raises:
        ValueError: if it is not whole, or there is none.
    """
    if asked is None or asked is False:
        return None
    if asked is True:
        newest = newest_checkpoint(folder)
        if newest is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but {folder} has no checkpoint that is whole: leave it out to train "
                "from the start, or name another output_dir."
            )
        return str(newest)
    if (damage := checkpoint_damage(asked)) is not None:
        raise ValueError(
            f"resume_from_checkpoint={asked!r} is no whole checkpoint: {damage}. With True, the newest whole one is "
            "taken."
        )
    return str(asked)


def checkpoint_damage(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint of a `Trainer`, which writes its state last; `None` if it is whole.

    A whole checkpoint has weights, all shards of them, and the state of the trainer; the states of the optimizer, of
    its schedule and of random numbers are all there, or none of them, as with `save_only_model`. Each file can be
    read.

    Args:
        folder (`str` or `Path`): The checkpoint.

    Returns:
        `str`: the file and what is wrong with it. Numbers that have changed within weights cannot be seen.
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
            return f"{path.name} is cut off or damaged"
    saved = read_json(state)
    if not isinstance(saved, dict) or not isinstance(saved.get("global_step"), int):
        return f"{TRAINER_STATE_NAME} has no global_step"
    for index in folder.glob("*.index.json"):
        try:
            names = read_weight_index(index)
        except ValueError:
            return f"{index.name} is no index of weights"
        for name in names:
            if not (folder / name).is_file():
                return f"{name} is missing"
    return None


# What a trainer saves, under the names that one or several processes give it, FSDP and DeepSpeed among them.
_WEIGHTS = ("model*.safetensors*", "pytorch_model*", "adapter_model*", "*/adapter_model*", "global_step*")
_STATES = {
    "optimizer.pt": ("*optimizer.pt", "optimizer*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}


def _missing_file(folder: Path) -> str | None:
    """What a checkpoint should have and has not."""

    def has(patterns: tuple[str, ...]) -> bool:
        return any(True for pattern in patterns for _ in folder.glob(pattern))

    if not has(_WEIGHTS):
        return "model.safetensors"
    missing = [name for name, patterns in _STATES.items() if not has(patterns)]
    if missing and len(missing) < len(_STATES):
        return missing[0]
    # Distributed checkpoints of PyTorch write this last.
    parts = {part.parent for part in folder.glob("*/*.distcp")}
    return next((f"{part.name}/.metadata" for part in sorted(parts) if not (part / ".metadata").is_file()), None)


def _is_json(path: Path) -> bool:
    try:
        read_json(path)
    except ValueError:
        return False
    return True


def _is_archive(path: Path) -> bool:
    """Whether the file is what `torch.save` writes, with the checksums that it should have."""
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
