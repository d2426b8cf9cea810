# Licensed under the Apache License, Version 2.0.
"""A batch whose loss is no number is kept, and is told of even where it can not be."""

from pathlib import Path

import pytest
import torch

from hf_attn_dynamics.training.resuming import save_nonfinite_batch


def message_of(folder, process=0):
    return save_nonfinite_batch(
        torch.tensor(float("nan")), 3, {"input_ids": torch.full((9,), process)}, folder, process
    )


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
    assert f"the batch could not be kept in {tmp_path / 'nonfinite_batch.pt'} (" in message_of(tmp_path)


def test_a_folder_that_can_not_be_made_does_not_hide_the_loss(tmp_path):
    (tmp_path / "file").touch()
    assert "the batch could not be kept in" in message_of(tmp_path / "file")
