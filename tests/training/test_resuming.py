# Licensed under the Apache License, Version 2.0.
"""A batch whose loss is no number is kept, and is told of even where it cannot be."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_training import build, examples, trainer
from transformers import TrainerCallback

from hf_attn_dynamics.training import train_from_newest
from hf_attn_dynamics.training.finite_loss import OVERFLOWS, FiniteLossMixin, save_nonfinite_batch


class Steps(TrainerCallback):
    """Numbers of the steps that were taken."""

    def __init__(self):
        self.taken = []

    def on_step_end(self, args, state, control, **kwargs):
        self.taken.append(state.global_step)


@pytest.mark.parametrize("max_steps", [3, 4, 5])
def test_a_run_that_has_come_to_its_end_is_not_trained_further(tmp_path, max_steps):
    def run(seed):
        model, steps = build("SequenceClassification", guidance=None, seed=seed), Steps()
        saved = {"save_strategy": "steps", "save_steps": max_steps, "lr_scheduler_type": "constant"}
        made = trainer(
            tmp_path,
            model,
            examples("SequenceClassification"),
            callbacks=[steps],
            max_steps=max_steps,
            per_device_train_batch_size=2,  # four steps an epoch
            guidance_weight=None,
            **saved,
        )
        train_from_newest(made)
        return model, steps.taken, [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    first, again = run(0), run(1)
    assert first[1] == list(range(1, max_steps + 1))
    assert again[1] == []
    assert again[2] == first[2]
    for expected, found in zip(first[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(expected, found)


def message_of(folder, process=0):
    return save_nonfinite_batch(
        torch.tensor(float("nan")), 3, {"input_ids": torch.full((9,), process)}, folder, process
    )


class Given:
    """Stands for the stock trainer, with given losses."""

    def __init__(self, folder, fp16, losses):
        self.args = SimpleNamespace(fp16=fp16, output_dir=folder, process_index=0)
        self.state, self.losses = SimpleNamespace(global_step=0), iter(losses)

    def training_step(self, model, inputs, num_items_in_batch=None):
        return torch.tensor(next(self.losses))


class Checked(FiniteLossMixin, Given):
    pass


def test_single_overflows_are_skipped_under_fp16_and_lasting_ones_stop(tmp_path):
    inf = float("inf")
    for fp16, losses in ((False, [inf]), (True, [*[inf] * (OVERFLOWS - 1), 1.0, *[inf] * OVERFLOWS])):
        made = Checked(tmp_path, fp16, losses)
        for _ in losses[1:]:
            made.training_step(None, {})
        with pytest.raises(FloatingPointError, match="the loss is inf at step 1"):
            made.training_step(None, {})


def test_each_process_keeps_its_own_batch(tmp_path):
    messages = [message_of(tmp_path, process) for process in range(2)]
    for process, name in enumerate(["nonfinite_batch.pt", "nonfinite_batch_1.pt"]):
        assert f"the batch is in {tmp_path / name}." in messages[process]
        assert torch.load(tmp_path / name)["input_ids"].tolist() == [process] * 9
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_does_not_hide_the_loss(tmp_path):
    (tmp_path / "nonfinite_batch.part").symlink_to("/dev/full")
    assert "the loss is nan at step 3; " in message_of(tmp_path)
    assert f"the batch could not be saved in {tmp_path / 'nonfinite_batch.pt'} (" in message_of(tmp_path)


def test_a_folder_that_can_not_be_made_does_not_hide_the_loss(tmp_path):
    (tmp_path / "file").touch()
    assert "the batch could not be saved in" in message_of(tmp_path / "file")
