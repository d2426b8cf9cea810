# Licensed under the Apache License, Version 2.0.
"""The push of a finished model, with its card, to the Hub.

    python -m hf_attn_dynamics.hub runs/prune_heads/model-8 USER/NAME [--private]

pushes what a recipe has left in a folder, now or again.
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


SILENCE = 120  # seconds after which a server that says nothing has failed
COMMAND = ("python", "-m", "hf_attn_dynamics.hub")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # may run code where they are loaded
_PUSH_SETTINGS = ("push_to_hub", "hub_model_id", "hub_private_repo")
_NO_EFFECT = ("hub_strategy", "hub_always_push", "hub_revision", "hub_token")


class PushError(OSError):
    """A model did not get to the Hub, or not all of it. It lies on disk as before, and can be pushed again."""


class Push(NamedTuple):
    """Where a finished model is to go.

    Args:
        repo_id (`str`): Repository on the Hub, `USER/NAME`, or `NAME` for one of one's own.
        private (`bool`, *optional*): Whether a new repository is private; as its owner has it by default.
    """

    repo_id: str
    private: bool | None = None


def push_model(folder: str | Path, repo_id: str, private: bool | None = None) -> str:
    """Pushes a saved model with its card to the Hub, in one commit.

    Takes the files that lie directly in the folder, without hidden ones and without any that is pickled, such as
    `training_args.bin`. The card on the Hub names the repository where that on disk leaves room for it; otherwise the
    folder is only read.

    Args:
        folder (`str` or `Path`): Folder of the model: `config.json`, safetensors and `README.md`.
        repo_id (`str`): Repository, made if it does not exist. Who may write there is found as everywhere in
            `huggingface_hub`: from `HF_TOKEN`, or from `hf auth login`.
        private (`bool`, *optional*): Whether a new repository is private; as its owner has it by default.

    Returns:
        `str`: address of the commit.

    Raises:
        ValueError: if the folder is not a model with a card, or `repo_id` is not possible; nothing is sent then.
        PushError: if the Hub cannot be reached, refuses or breaks off. There is no commit then; the message has the
            command that tries again, which does not send anew what has arrived.
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
    # What fails while several files are on their way is a RuntimeError.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        retry = [*COMMAND, str(folder), repo_id, *(["--private"] if private else [])]
        raise PushError(
            f"{folder} was not pushed to {repo_id}: {_reason(error)} It lies on disk as before; try again with: "
            f"{shlex.join(retry)}"
        ) from error


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Has requests of `huggingface_hub` end some time: by default they wait for ever for a server that is silent."""
    session = get_session()
    before, session.timeout = session.timeout, SILENCE
    try:
        yield
    finally:
        session.timeout = before


def _reason(error: Exception) -> str:
    """What went wrong, as a sentence, with what to do about it."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error) or type(error).__name__
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    advice = " Log in with `hf auth login`, or set HF_TOKEN to a token that may write there." * (status in (401, 403))
    return text.rstrip(".") + "." + advice


def model_files(folder: str | Path) -> list[Path]:
    """Files of a saved model that may be published, see [`push_model`].

    Args:
        folder (`str` or `Path`): Its folder.

    Returns:
        `list[Path]`: sorted by name.

    Raises:
        ValueError: if there is no `config.json`, no card with metadata, or there are no weights; if an index names
            weights that are not there; or if a file is a link to another folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name the one that holds the model.")
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
            raise ValueError(f"{folder} holds no {name}; {way_out} writes it.")
    count_parameters(folder)
    for index in (file for file in files if file.name.endswith(".safetensors.index.json")):
        for shard in read_weight_index(index):
            if shard not in names:
                raise ValueError(f"{index} names {shard!r}, which is not in the folder; save the model again.")
    _check_card(folder / CARD)
    return files


def _check_card(path: Path) -> None:
    """Refuses a card whose metadata `huggingface_hub` cannot read, or that has none."""
    try:
        metadata = ModelCard(read_text(path)).data.to_dict()
    except (ValueError, YAMLError) as error:
        raise ValueError(f"{path} has no metadata that can be read: {one_line(error)}") from error
    if not metadata:
        raise ValueError(f"{path} is no card: it has no metadata; write_model_card() writes some.")


def take_push(training_args: TrainingArguments) -> Push | None:
    """Takes the wish to push out of a trainer's arguments, for after the run: a trainer would push amid training.

    Args:
        training_args (`TrainingArguments`): Arguments of a recipe; push settings are at their defaults afterwards.

    Returns:
        [`Push`], *optional*: to `hub_model_id`, or a repository called as the output folder; `None` without
        `push_to_hub`.

    Raises:
        ValueError: if settings are given that would have no effect, or a token: the command that a run is made with
            is written into its summary and card.
    """
    default = {one.name: one.default for one in fields(TrainingArguments)}
    values = {name: getattr(training_args, name) for name in (*_PUSH_SETTINGS, *_NO_EFFECT)}
    given = {name: value for name, value in values.items() if value != default[name]}
    if "hub_token" in given:
        raise ValueError("hub_token would be written into the run's summary; set HF_TOKEN, or use `hf auth login`.")
    for name in _NO_EFFECT:
        if name in given:
            raise ValueError(f"{name}={given[name]} has no effect: the finished model is pushed once; leave it out.")
    if given and "push_to_hub" not in given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name}={value!r} has no effect without push_to_hub; set that to true, or leave it out.")
    for name in given:
        setattr(training_args, name, default[name])
    if not given:
        return None
    repo_id = given.get("hub_model_id") or Path(training_args.output_dir).absolute().name
    validate_repo_id(repo_id)
    return Push(repo_id, given.get("hub_private_repo"))


def push_finished(folder: str | Path, push: Push | None) -> None:
    """The last step of a recipe: pushes its model if that was asked for, and says where it is or how to try again.

    Args:
        folder (`str` or `Path`): Folder of the model.
        push ([`Push`], *optional*): Where it is to go.

    Raises:
        SystemExit: with status 2 and one line on standard error, if it did not get there.
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
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    args = parser.parse_args(argv)
    push_finished(args.folder, Push(args.repo_id, args.private))
