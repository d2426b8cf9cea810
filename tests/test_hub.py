import json
import shlex
import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
from cards import write_card
from hub_server import STAGES, running_hub
from huggingface_hub import constants
from tiny_models import tiny_model
from transformers import TrainingArguments

from hf_attn_dynamics import prune_heads
from hf_attn_dynamics.hub import push as hub
from hf_attn_dynamics.hub.push import Push, PushError, model_files, push_model, take_push


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pruned model with its card, as a run leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "my model"
    model = prune_heads(tiny_model("roberta", guidance=None), {0: [1]})
    model.save_pretrained(folder)
    write_card(folder, model.config)
    (folder / "training_args.bin").write_bytes(b"pickled")
    (folder / ".cache").write_bytes(b"hidden")
    (folder / "checkpoints").mkdir()
    return folder


@pytest.fixture
def server(monkeypatch):
    """A Hub to push to, whose silence is noticed soon."""
    monkeypatch.setattr(hub, "SILENCE", 0.1)
    with running_hub(monkeypatch) as server:
        yield server


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def pushed_contents(folder, repo_id):
    """What the repository should hold."""
    files = contents(folder)
    del files["training_args.bin"], files[".cache"]
    return files | {"README.md": files["README.md"].replace(b"PATH_OR_NAME_OF_THIS_MODEL", repo_id.encode())}


def test_a_push_is_one_commit_of_all_that_belongs_to_the_model(saved, server):
    before = contents(saved)
    address = push_model(saved, "tester/mine", private=True)
    assert address.startswith(f"{server.address}/tester/mine/commit/")
    assert server.repositories == {"tester/mine": pushed_contents(saved, "tester/mine")}
    assert server.settings["tester/mine"]["visibility"] == "private"
    assert server.stages.count("commit") == 1
    assert "validate" in server.stages
    assert contents(saved) == before


def test_a_name_without_a_user_is_ones_own(saved, server):
    push_model(saved, "mine")
    assert b'from_pretrained("tester/mine")' in server.repositories["tester/mine"]["README.md"]


FAILURES = [
    *((stage, 500) for stage in STAGES),
    *((stage, "drop") for stage in STAGES),
    ("create", 401),
    ("preupload", 403),
    ("commit", 403),
    ("create", "hang"),
    ("upload", "hang"),
    ("commit", "hang"),
]


@pytest.mark.parametrize(("stage", "failure"), FAILURES)
def test_a_push_that_fails_changes_nothing_and_the_command_it_prints_tries_again(
    saved, server, capsys, stage, failure
):
    before = contents(saved)
    server.failures[stage] = failure
    with pytest.raises(SystemExit) as stop:
        hub.main([str(saved), "tester/mine", "--private"])
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{saved} was not pushed to tester/mine: " in error
    assert ("hf auth login" in error) == (failure in (401, 403))
    assert not any(server.repositories.values())
    assert contents(saved) == before

    server.failures.clear()
    arrived = set(server.blobs)
    server.stages.clear()
    *module, folder, repo_id, private = shlex.split(error.partition("try again with: ")[2])
    assert module == ["python", "-m", "hf_attn_dynamics.hub"]
    hub.main([folder, repo_id, private])
    assert capsys.readouterr().out.startswith(f"Pushed: {server.address}/tester/mine/commit/")
    assert server.repositories == {"tester/mine": pushed_contents(saved, "tester/mine")}
    assert server.stages.count("upload") == len(set(server.blobs) - arrived)


def test_nobody_listening_is_a_push_that_fails(saved, server, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(PushError, match="was not pushed to tester/mine: .*try again with: python -m "):
            push_model(saved, "tester/mine")


def test_offline_is_a_push_that_fails(saved, server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PushError, match="offline mode is enabled"):
        push_model(saved, "tester/mine")


def test_requests_wait_for_ever_again_after_a_push(saved, server):
    push_model(saved, "tester/mine")
    assert huggingface_hub.utils.get_session().timeout.read is None


def broken(folder, saved, change):
    """A copy of the saved model, changed."""
    shutil.copytree(saved, folder)
    change(folder)
    return folder


def outside(folder):
    (folder.parent / "secret").write_text("secret")
    (folder / "merges.txt").symlink_to(folder.parent / "secret")


def cut_off(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def index(name):
    text = json.dumps({"weight_map": {"embeddings.weight": name}})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a folder; pass the folder of the model"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config.json; save_pretrained\(\) writes it"),
        (lambda folder: (folder / "README.md").unlink(), r"has no README.md; write_model_card\(\) writes it"),
        (lambda folder: (folder / "README.md").write_text("# mine"), "has no metadata"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "the metadata of .* cannot be read"),
        (lambda folder: (folder / "README.md").write_text("---\n- a\n---\n"), "the metadata of .* cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read as safetensors"),
        (cut_off, "cannot be read as safetensors, save it again"),
        (outside, "is a link to .*secret, outside of the folder"),
        (index("../weights.safetensors"), "names '../weights.safetensors', which is not in the folder"),
        (index("other.safetensors"), "names 'other.safetensors', which is not in the folder"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is not an index of weights"),
    ],
)  # fmt: skip
def test_what_is_no_model_with_a_card_is_refused_before_anything_is_sent(saved, server, tmp_path, change, message):
    folder = broken(tmp_path / "model", saved, change)
    with pytest.raises(ValueError, match=message):
        push_model(folder, "tester/mine")
    assert not server.stages


def test_a_repository_with_an_impossible_name_is_refused_before_anything_is_sent(saved, server):
    with pytest.raises(ValueError, match="a/b/c"):
        push_model(saved, "a/b/c")
    assert not server.stages


def test_files_that_a_recipe_leaves_beside_the_model_stay_here(saved):
    names = [file.name for file in model_files(saved)]
    assert {"config.json", "model.safetensors", "headwise_classes.py", "heads.png"} <= set(names)
    assert not {"training_args.bin", ".cache", "checkpoints"} & set(names)


def training_args(**settings):
    return TrainingArguments(output_dir="runs/first", use_cpu=True, **settings)


def test_the_wish_to_push_is_taken_out_of_the_arguments_of_a_trainer():
    args = training_args(push_to_hub=True, hub_model_id="tester/mine", hub_private_repo=True)
    assert take_push(args) == Push("tester/mine", True)
    assert (args.push_to_hub, args.hub_model_id, args.hub_private_repo) == (False, None, None)
    assert take_push(args) is None


def test_a_repository_is_called_as_the_run_unless_it_is_named():
    assert take_push(training_args(push_to_hub=True)) == Push("first")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hub_model_id": "tester/mine"}, "hub_model_id='tester/mine' needs push_to_hub"),
        ({"hub_private_repo": True}, "hub_private_repo=True needs push_to_hub"),
        (
            {"push_to_hub": True, "hub_strategy": "end"},
            "hub_strategy=.* has no effect",
        ),
        ({"push_to_hub": True, "hub_token": "secret"}, "set HF_TOKEN, or use `hf auth login`"),
        ({"push_to_hub": True, "hub_model_id": "a/b/c"}, "a/b/c"),
    ],
)
def test_push_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        take_push(training_args(**settings))
    assert "secret" not in str(error.value)


def test_a_configuration_is_pushed_with_its_code(tmp_path, server):
    config = tiny_model("roberta", guidance=None).config
    config.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="tester/mine", commit_message="Both")
    local = contents(tmp_path / "mine")
    assert {"config.json", "configuration_headwise_roberta.py"} <= local.keys()
    pushed = server.repositories["tester/mine"]
    assert pushed.keys() >= local.keys()
    assert pushed["config.json"] == local["config.json"]
    config.save_pretrained(tmp_path / "by_name", push_to_hub=True)
    assert "configuration_headwise_roberta.py" in server.repositories["tester/by_name"]
