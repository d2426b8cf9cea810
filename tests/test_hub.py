import importlib
import json
import re
import shlex
import shutil
import socket
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import STAGES, running_hub
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model
from transformers import TrainingArguments

from hf_attn_dynamics import hub, prune_heads
from hf_attn_dynamics.hub import (
    Metric,
    Push,
    PushError,
    count_parameters,
    model_files,
    push_model,
    take_push,
    write_model_card,
)
from hf_attn_dynamics.runs import parse_yaml_or_flags, provenance


ROOT = Path(__file__).parents[1]
GUIDANCE = {"heads": {0: {"next": [0]}, 1: {"next": [0]}, 3: {"first": [1, 2]}}}


def write_card(folder, config, **changes):
    arguments = {
        "name": "guided RoBERTa",
        "description": "A small model.",
        "config": config,
        "task": "fill-mask",
        "figures": {"mlm_loss_eval": 5.25, "guidance_weight_initial": None},
        "metric": Metric("loss", "masked-language-model loss", 5.25),
        "dataset": "some text",
        "provenance": provenance(7, "cpu"),
    }
    return ModelCard.load(write_model_card(folder, **{**arguments, **changes}))


def card(folder, kind="roberta", config=None, **changes):
    """The card of a model with that configuration, whose weights are saved first."""
    model = tiny_model(kind, **({"num_hidden_layers": 4, "guidance": GUIDANCE} if config is None else config))
    model.save_pretrained(folder)
    return write_card(folder, model.config, **changes)


# ---------------------------------------------------------------------------------------------------------------------
# Cards
# ---------------------------------------------------------------------------------------------------------------------


def test_a_card_has_metadata_that_the_hub_reads(tmp_path):
    data = card(tmp_path, license="apache-2.0").data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "fill-mask"
    assert data.model_name == "guided RoBERTa"
    assert data.license == "apache-2.0"


def test_every_result_on_the_hub_has_its_data_part_and_seed(tmp_path):
    metrics = [Metric("f1", "F1", 0.5, "test"), Metric("f1", "F1", 0.25), Metric("loss", "loss", 1.5)]
    results = card(tmp_path, metric=metrics).data.eval_results
    assert {(one.metric_type, one.metric_value, one.dataset_split) for one in results} == {
        ("f1", 0.5, "test"),
        ("f1", 0.25, "validation"),
        ("loss", 1.5, "validation"),
    }
    assert all(one.dataset_name == "some text" and one.metric_args == {"seed": 7} for one in results)


def test_a_card_says_what_was_guided_and_how_it_was_made(tmp_path):
    text = card(tmp_path).text
    assert "| 0–1    | next: 0" in text
    assert "| 3      | first: 1, 2" in text
    assert "guidance_weight_initial" not in text
    assert provenance(7, "cpu")["command"] in text
    assert "Seed 7; python " in text
    assert "Deshpande" in text
    assert "Voita" not in text


@pytest.mark.parametrize(("license", "line"), [(None, "that of the weights has not been chosen"), ("mit", "mit")])
def test_a_card_says_what_is_licensed_how(tmp_path, license, line):
    assert f"- Licence: {line}; Apache-2.0 for the code beside them" in card(tmp_path, license=license).text


@pytest.mark.parametrize("shard", ["1GB", "4kB"])
def test_a_card_counts_the_numbers_that_are_in_the_file(tmp_path, shard):
    model = tiny_model("roberta")
    model.save_pretrained(tmp_path, max_shard_size=shard)
    stored = [value for file in tmp_path.glob("*.safetensors") for value in load_file(file).values()]
    total = sum(value.numel() for value in stored)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(tmp_path) == {"F32": total}
    assert f"- Parameters: {total:,}\n" in write_card(tmp_path, model.config).text


def test_the_card_of_a_pruned_translator_says_and_shows_which_heads_are_left(tmp_path):
    pruned = {"encoder": {0: [1, 2]}, "cross": {0: [0, 1], 1: [0]}}
    loaded = card(
        tmp_path,
        "marian",
        {"guidance": None, "pruned_heads": pruned},
        task="translation",
        metric=Metric("bleu", "BLEU", 30.0),
        methods=["gates"],
        language=["de", "en"],
    )
    for row in ("| encoder 0            | 0, 3 ", "| cross 0              | none", "| cross 1              | 1 "):
        assert row in loaded.text, loaded.text
    picture = re.search(r"!\[.+\]\((.+)\)", loaded.text)[1]
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "AutoModelForSeq2SeqLM.from_pretrained" in loaded.text
    assert "Voita" in loaded.text
    assert "Deshpande" not in loaded.text
    assert "pruned-attention-heads" in loaded.data.tags


def test_the_card_of_a_plain_model_cites_and_shows_nothing(tmp_path):
    loaded = card(tmp_path, config={"guidance": None})
    assert "Citation" not in loaded.text
    assert "![" not in loaded.text
    assert "attention-guidance" not in loaded.data.tags


def test_a_task_that_no_class_is_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task must be one of fill-mask, .*, got 'summarization'"):
        card(tmp_path, task="summarization")


def test_a_card_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no safetensors file; save the model there"):
        write_card(tmp_path, tiny_config("roberta"))


def test_a_name_of_several_lines_stays_in_its_heading(tmp_path):
    loaded = card(tmp_path, name="a\n---\n# b", dataset="{{ seed }}\n- c")
    assert "\n# a --- # b\n" in loaded.text
    assert "\n- Training data: {{ seed }} - c\n" in loaded.text
    assert loaded.data.model_name == "a --- # b"


def test_the_card_of_a_translator_says_what_is_guided_and_what_is_fixed_at_each_site(tmp_path):
    settings = {
        "guidance": {"cross": {"heads": {"first": [1]}}, "decoder": {"heads": {"prev": [0]}}},
        "hard_coded": {"encoder": {"offsets": [-1, 1], "std": 2.0}},
    }
    loaded = card(tmp_path, "marian", settings, task="translation", metric=Metric("bleu", "BLEU", 30.0))
    rows = ("| decoder 0, decoder 1 | prev: 0", "| cross 0, cross 1     | first: 1", "| encoder        | -1, 1 ")
    for row in rows:
        assert row in loaded.text, loaded.text
    assert {"attention-guidance", "hard-coded-attention"} <= set(loaded.data.tags)
    assert "Iyyer" in loaded.text
    assert "Deshpande" in loaded.text


@pytest.mark.parametrize("license", ["Apache 2.0", "", "mit\nfoo: bar"])
def test_a_licence_that_the_hub_cannot_know_is_refused(license):
    with pytest.raises(ValueError, match="license must be an identifier of the Hub such as apache-2.0, got"):
        hub.PublishArguments(license=license)


# ---------------------------------------------------------------------------------------------------------------------
# Pushing
# ---------------------------------------------------------------------------------------------------------------------


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


def index(name):
    text = json.dumps({"weight_map": {"embeddings.weight": name}})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "is no folder; name the one that holds the model"),
        (lambda folder: (folder / "config.json").unlink(), r"holds no config.json; save_pretrained\(\) writes it"),
        (lambda folder: (folder / "README.md").unlink(), r"holds no README.md; write_model_card\(\) writes it"),
        (lambda folder: (folder / "README.md").write_text("# mine"), "is no card: it has no metadata"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "has no metadata that can be read"),
        (lambda folder: (folder / "README.md").write_text("---\n- a\n---\n"), "has no metadata that can be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read as safetensors"),
        (outside, "is a link to .*secret, outside of the folder"),
        (index("../weights.safetensors"), "names '../weights.safetensors', which is not in the folder"),
        (index("other.safetensors"), "names 'other.safetensors', which is not in the folder"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "is no index of weights"),
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
    assert {"config.json", "model.safetensors", "modeling_headwise_roberta.py", "heads.png"} <= set(names)
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
        ({"hub_model_id": "tester/mine"}, "hub_model_id='tester/mine' has no effect without push_to_hub"),
        ({"hub_private_repo": True}, "hub_private_repo=True has no effect without push_to_hub"),
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


RECIPES = {
    "pretrain_ag": ("PretrainArguments", "PretrainTrainingArguments"),
    "finetune": ("FinetuneArguments", "FinetuneTrainingArguments"),
    "prune_heads": ("PruneArguments", "PruneTrainingArguments"),
    "train_translation": ("PruningArguments", "PruningTrainingArguments"),
    "compare_translation": ("ComparisonArguments", "ComparisonTrainingArguments"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_push_last_or_not_at_all(name, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    recipe = importlib.import_module(name)
    pushes = name != "compare_translation"
    flags = {"hub_model_id": "tester/mine"} if pushes else {"push_to_hub": "true"}
    flags["output_dir"] = str(tmp_path / "run")
    argv = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    types = [getattr(recipe, one) for one in RECIPES[name]]
    with pytest.raises(SystemExit) as stop:
        recipe.main(*parse_yaml_or_flags(*types, presets=getattr(recipe, "PRESETS", None), argv=argv))
    assert stop.value.code == 2
    expected = "has no effect without push_to_hub" if pushes else "push one with python -m hf_attn_dynamics.hub"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "model_cards").glob("*.md")), ids=lambda path: path.stem)
def test_the_examples_of_cards_are_what_the_template_gives_now(path):
    template = re.sub(r"{%.*?%}", "", (ROOT / "hf_attn_dynamics" / "model_card_template.md").read_text())
    headings = {line for line in template.splitlines() if line.startswith("## ") and "{" not in line}
    example = ModelCard.load(path)
    found = {line for line in example.text.splitlines() if line.startswith("## ")}
    assert {line for line in found if not line.startswith("## Citation")} <= headings
    assert {"## Figures", "## Use", "## How it was made"} <= found
    for entry in ("- Parameters: ", "- Training data: ", "- Licence: "):
        assert entry in example.text
    assert ("## Heads that are left" in found) == ("![Heads that each layer has left]" in example.text)
    assert all(one.metric_args == {"seed": 42} and one.dataset_split for one in example.data.eval_results)
    for picture in re.findall(r"!\[.+\]\((.+)\)", example.text):
        assert (path.parent / picture).is_file()
