# Licensed under the Apache License, Version 2.0.
"""Heads over the checkpoints of a run and the revisions of a repository."""

import pytest
import torch
from hub_server import running_hub
from stock_models import build_stock
from tiny_models import padded_batch, ragged_sentences, vivid

from hf_attn_dynamics import AttentionSink, HeadEntropy, HeadTimeline, checkpoint_timeline, observe
from hf_attn_dynamics.analysis.checkpoints import _steps_of


BATCHES = [padded_batch(ragged_sentences(4), pad=1), padded_batch(ragged_sentences(3, seed=1), pad=1)]
STEPS = (5, 20, 100)


def model_of(step):
    return vivid(build_stock("bert").bert, seed=step).eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for step in STEPS:
        model_of(step).save_pretrained(folder / f"checkpoint-{step}")
    (folder / "checkpoint-best").mkdir()
    return folder


@torch.no_grad()
def scores_of(step):
    with observe(model := model_of(step), HeadEntropy(), AttentionSink()) as seen:
        for batch in BATCHES:
            model(**batch)
    return {"entropy": seen.entropy, "sink/first": seen.sink.first, "sink/nothing": seen.sink.nothing}


def test_checkpoints_of_a_run_are_measured_in_their_order(run):
    timeline = checkpoint_timeline(run, [HeadEntropy(), AttentionSink()], BATCHES, progress=False)
    assert list(timeline.of("entropy")) == list(STEPS)
    for step in STEPS:
        expected = scores_of(step)
        assert timeline.measurements[step].keys() == expected.keys()
        for name, scores in expected.items():
            torch.testing.assert_close(timeline.measurements[step][name]["encoder"], scores["encoder"])


class Revisions:
    """A class that loads revisions; some of them fail."""

    loaded: list = []

    @classmethod
    def from_pretrained(cls, name, revision, dtype=None):
        cls.loaded.append((name, revision, dtype))
        if revision == "step3":
            raise OSError("step3 is not a valid git identifier\nfor this model")
        if revision == "step7":
            return build_stock("gpt2").transformer
        return model_of(int(revision.removeprefix("step").partition("-")[0]))


@pytest.fixture
def revisions():
    Revisions.loaded = []
    return Revisions


def test_revisions_that_fail_or_differ_are_named_and_left_out(revisions, caplog):
    names = ["step20-tokens4B", "step3", "step5", "step7"]
    with caplog.at_level("WARNING"):
        timeline = checkpoint_timeline(
            "lab/model", [HeadEntropy()], BATCHES, names, auto_class=revisions, progress=False, dtype="auto"
        )
    assert revisions.loaded == [("lab/model", name, "auto") for name in ("step3", "step5", "step7", "step20-tokens4B")]
    assert list(timeline.of("entropy")) == [5, 20]
    assert "step3 is left out of the timeline: OSError: step3 is not a valid git identifier" in caplog.text
    assert "step7 is left out of the timeline: ValueError: it has other numbers of layers or heads" in caplog.text


def test_revisions_of_a_repository_are_downloaded_one_after_the_other(run, tmp_path, monkeypatch, caplog):
    with running_hub(monkeypatch) as server:
        for step in STEPS:
            files = {file.name: file.read_bytes() for file in (run / f"checkpoint-{step}").iterdir()}
            server.repositories[f"lab/model@step{step}"] = files
        names = [*(f"step{step}" for step in STEPS), "step7"]
        with caplog.at_level("WARNING"):
            timeline = checkpoint_timeline(
                "lab/model", [HeadEntropy()], BATCHES, names, progress=False, cache_dir=tmp_path
            )
    assert list(timeline.of("entropy")) == list(STEPS)
    for step in STEPS:
        found, expected = timeline.measurements[step]["entropy"], scores_of(step)["entropy"]
        torch.testing.assert_close(found["encoder"], expected["encoder"])
    assert "step7 is left out of the timeline: OSError" in caplog.text
    assert "is not a valid git identifier" in caplog.text


def test_a_timeline_continues_where_it_was(revisions, tmp_path):
    path = tmp_path / "timeline.csv"
    arguments = {"auto_class": revisions, "path": path, "progress": False}
    checkpoint_timeline("lab/model", [HeadEntropy()], BATCHES, ["step5"], **arguments)
    timeline = checkpoint_timeline("lab/model", [HeadEntropy()], BATCHES, ["step5", "step20"], **arguments)
    assert [revision for _, revision, _ in revisions.loaded] == ["step5", "step20"]
    assert HeadTimeline.load(path) == timeline
    whole = checkpoint_timeline(
        "lab/model", [HeadEntropy()], BATCHES, {"step5": 5, "step20": 20}, auto_class=revisions
    )
    for step, scores in whole.of("entropy").items():
        torch.testing.assert_close(timeline.of("entropy")[step]["encoder"], scores["encoder"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observers": []}, "there is no observer; pass some, as in checkpoint_timeline"),
        ({"probe_data": []}, "probe_data is empty: pass at least one batch"),
        ({"revisions": []}, "revisions are empty: pass at least one"),
        ({"revisions": ["main"]}, r"revision 'main' has no number, which would be its step; pass \{revision: step\}"),
        ({"revisions": ["step5", "v5"]}, r"step5 and v5 both have the step 5; pass \{revision: step\}"),
        ({"revisions": ["step3"]}, "none of the 1 checkpoints of lab/model could be measured: step3: OSError"),
    ],
)
def test_bad_arguments_are_named(change, message, revisions):
    arguments = {"observers": [HeadEntropy()], "probe_data": BATCHES, "revisions": ["step5"], **change}
    with pytest.raises(ValueError, match=message):
        checkpoint_timeline("lab/model", **arguments, auto_class=revisions, progress=False)
    if "step3" not in message:
        assert not revisions.loaded


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no folders checkpoint-N; name the folder of a run, or pass revisions"):
        checkpoint_timeline(tmp_path, [HeadEntropy()], BATCHES)


def test_a_file_with_other_statistics_is_refused_before_anything_is_loaded(revisions, tmp_path):
    settings = {"revisions": ["step5"], "auto_class": revisions, "progress": False, "path": tmp_path / "t.csv"}
    checkpoint_timeline("lab/model", [HeadEntropy()], BATCHES, **settings)
    revisions.loaded.clear()
    with pytest.raises(ValueError, match=r"t.csv has statistics of entropy, but the observers are sink; name another"):
        checkpoint_timeline("lab/model", [AttentionSink()], BATCHES, **settings)
    assert not revisions.loaded


def test_one_batch_is_enough_and_other_data_are_refused_first(revisions):
    settings = {"revisions": ["step5"], "auto_class": revisions, "progress": False}
    alone = checkpoint_timeline("lab/model", [HeadEntropy()], BATCHES[0], **settings)
    assert alone.measurements.keys() == {5}
    revisions.loaded.clear()
    with pytest.raises(ValueError, match="batch 0 of probe_data must be a dictionary of tensors, got str"):
        checkpoint_timeline("lab/model", [HeadEntropy()], ["a text"], **settings)
    assert not revisions.loaded


def test_the_number_after_step_is_the_step(revisions):
    names = ["stage1-step20-tokens5B", "stage1-step5-tokens1B"]
    steps = _steps_of(None, names)
    assert steps == {5: names[1], 20: names[0]}


def test_a_failure_without_a_message_is_named(revisions, monkeypatch, caplog):
    def fail(name, revision, dtype=None):
        if revision == "step3":
            raise NotImplementedError
        return model_of(5)

    monkeypatch.setattr(revisions, "from_pretrained", fail)
    with caplog.at_level("WARNING"):
        checkpoint_timeline(
            "lab/model", [HeadEntropy()], BATCHES, ["step3", "step5"], auto_class=revisions, progress=False
        )
    assert "step3 is left out of the timeline: NotImplementedError: no reason given" in caplog.text
