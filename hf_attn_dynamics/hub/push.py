# Licensed under the Apache License, Version 2.0.
"""Pushes a finished model and its card to the Hub.

    python -m hf_attn_dynamics.hub runs/prune_heads/model-8 USER/NAME [--private]

pushes a folder that a recipe has written, and can be repeated.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import get_session, validate_repo_id
from transformers import TrainingArguments
from yaml import YAMLError

from .._files import read_text, read_weight_index
from .._refusals import refuse_bad_input
from .card import CARD, REPOSITORY, count_parameters, one_line


SILENCE = 120  # timeout of requests in seconds
COMMAND = ("python", "-m", "hf_attn_dynamics.hub")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # may run code when they are loaded
_PUSH_SETTINGS = ("push_to_hub", "hub_model_id", "hub_private_repo")
_NO_EFFECT = ("hub_strategy", "hub_always_push", "hub_revision", "hub_token")


class PushError(OSError):
    """Raised if a push fails. The model on disk is unchanged and can be pushed again."""


class Push(NamedTuple):
    """Target repository of a finished model.

    Args:
        repo_id (`str`): Repository on the Hub, `USER/NAME`, or `NAME` for the current user.
        private (`bool`, *optional*): Whether a new repository is private; defaults to the owner's setting.
    """

    repo_id: str
    private: bool | None = None


def push_model(folder: str | Path, repo_id: str, private: bool | None = None) -> str:
    """Pushes a saved model with its card to the Hub, in one commit.

    The commit contains the files directly in the folder, except hidden and pickled ones, such as `training_args.bin`.
    The placeholder for the repository in the card is replaced on the Hub; the folder is not changed.

    Args:
        folder (`str` or `Path`): Folder of the model: `config.json`, safetensors and `README.md`.
        repo_id (`str`): Repository, created if it does not exist. `huggingface_hub` reads the token from `HF_TOKEN`
            or `hf auth login`.
        private (`bool`, *optional*): Whether a new repository is private; defaults to the owner's setting.

    Returns:
        `str`: URL of the commit.

    Raises:
        ValueError: if the folder is not a model with a card, or `repo_id` is invalid; nothing is sent then.
        PushError: if the Hub cannot be reached, or rejects or aborts the push. There is no commit then; the message
            has the command to try again, which does not repeat completed uploads.
    """
    validate_repo_id(repo_id)
    files = model_files(folder)
    card = read_text(Path(folder) / CARD)
    api = HfApi()
    try:
        with _patience():
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            contents = {file.name: file for file in files} | {CARD: card.replace(REPOSITORY, repo_id).encode()}
            operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
            return api.create_commit(repo_id, operations, commit_message="Model and card").commit_url
    # Errors during the upload of several files are RuntimeErrors.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        retry = [*COMMAND, str(folder), repo_id, *(["--private"] if private else [])]
        raise PushError(
            f"{folder} was not pushed to {repo_id}: {_reason(error)} It is unchanged on disk; try again with: "
            f"{shlex.join(retry)}"
        ) from error


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Context with a timeout for requests of `huggingface_hub`, which has none by default."""
    session = get_session()
    before, session.timeout = session.timeout, SILENCE
    try:
        yield
    finally:
        session.timeout = before


def _reason(error: Exception) -> str:
    """Describes an error in one sentence, with advice."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error) or type(error).__name__
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    advice = " Log in with `hf auth login`, or set HF_TOKEN to a token with write access." * (status in (401, 403))
    return text.rstrip(".") + "." + advice


def model_files(folder: str | Path) -> list[Path]:
    """Files of a saved model to push, see [`push_model`].

    Args:
        folder (`str` or `Path`): Folder of the model.

    Returns:
        `list[Path]`: sorted by name.

    Raises:
        ValueError: if `config.json`, weights or a card with metadata are missing, or a file is a link to another
            folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; pass the folder of the model.")
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.is_file() and not file.name.startswith(".") and file.suffix not in PICKLED
    ]
    names = {file.name for file in files}
    for file in files:
        if file.resolve().parent != folder.resolve():
            raise ValueError(f"{file} is a link to {file.resolve()}, outside of the folder; copy the file there.")
    for name, way_out in (("config.json", "save_pretrained()"), (CARD, "write_model_card()")):
        if name not in names:
            raise ValueError(f"{folder} has no {name}; {way_out} writes it.")
    count_parameters(folder)
    for index in (file for file in files if file.name.endswith(".safetensors.index.json")):
        for shard in read_weight_index(index):
            if shard not in names:
                raise ValueError(f"{index} names {shard!r}, which is not in the folder; save the model again.")
    _check_card(folder / CARD)
    return files


def _check_card(path: Path) -> None:
    """Raises ValueError for a card with unreadable metadata, or without any."""
    try:
        metadata = ModelCard(read_text(path)).data.to_dict()
    except (ValueError, YAMLError) as error:
        raise ValueError(f"the metadata of {path} cannot be read: {one_line(error)}") from error
    if not metadata:
        raise ValueError(f"{path} has no metadata; write_model_card() writes a card with metadata.")


def take_push(training_args: TrainingArguments) -> Push | None:
    """Removes the push settings from a trainer's arguments, since a recipe pushes after the run, not during training.

    Args:
        training_args (`TrainingArguments`): Arguments of a recipe, whose push settings are reset to their defaults.

    Returns:
        [`Push`], *optional*: `hub_model_id`, or a repository with the name of the output folder; `None` without
        `push_to_hub`.

    Raises:
        ValueError: for settings without effect; or for a token, since summary and card contain the command of the run.
    """
    default = {one.name: one.default for one in fields(TrainingArguments)}
    values = {name: getattr(training_args, name) for name in (*_PUSH_SETTINGS, *_NO_EFFECT)}
    given = {name: value for name, value in values.items() if value != default[name]}
    if "hub_token" in given:
        raise ValueError("hub_token would be saved in the run's summary; set HF_TOKEN, or use `hf auth login`.")
    for name in _NO_EFFECT:
        if name in given:
            raise ValueError(f"{name}={given[name]} has no effect: only the finished model is pushed; leave it out.")
    if given and "push_to_hub" not in given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} needs push_to_hub; set it to true, or leave {name} out.")
    for name in given:
        setattr(training_args, name, default[name])
    if not given:
        return None
    repo_id = given.get("hub_model_id") or Path(training_args.output_dir).absolute().name
    validate_repo_id(repo_id)
    return Push(repo_id, given.get("hub_private_repo"))


def push_finished(folder: str | Path, push: Push | None) -> None:
    """Pushes the model of a recipe, if requested, and prints the URL.

    Args:
        folder (`str` or `Path`): Folder of the model.
        push ([`Push`], *optional*): Target repository; `None` for no push.

    Raises:
        SystemExit: with status 2 and one line on standard error, if the push fails.
    """
    if push is not None:
        with refuse_bad_input():
            address = push_model(folder, *push)
        sys.stdout.write(f"Pushed: {address}\n")


def main(argv: list[str] | None = None) -> None:
    """The command `python -m hf_attn_dynamics.hub`."""
    parser = argparse.ArgumentParser(prog=shlex.join(COMMAND), description="Push a finished model to the Hub.")
    parser.add_argument("folder", help="folder of the model, with its card")
    parser.add_argument("repo_id", help="repository on the Hub: USER/NAME")
    parser.add_argument("--private", action="store_true", default=None, help="create a new repository as private")
    args = parser.parse_args(argv)
    push_finished(args.folder, Push(args.repo_id, args.private))
