"""What one process does for all."""

import accelerate
import pytest
from accelerate import utils

from hf_attn_dynamics._processes import from_main_process


@pytest.fixture
def another_process(monkeypatch):
    """Makes this process another one than the main process, which sends what the fixture is called with."""

    def receive(sent):
        monkeypatch.setattr(accelerate, "PartialState", lambda: type("State", (), {"is_main_process": False}))
        monkeypatch.setattr(utils, "broadcast_object_list", lambda found: found.__setitem__(slice(None), sent))

    return receive


def fail():
    raise OSError("the disk is full")


def test_the_main_process_returns_its_result_and_raises_its_error():
    assert from_main_process(lambda: 3) == 3
    with pytest.raises(OSError, match="the disk is full"):
        from_main_process(fail)


def test_another_process_gets_the_result_without_calling_the_function(another_process):
    another_process([3, None, None])
    assert from_main_process(fail) == 3


@pytest.mark.parametrize(
    ("is_bad_input", "error", "message"),
    [(True, ValueError, "^the disk is full"), (False, RuntimeError, "^the main process failed: the disk is full")],
)
def test_another_process_stops_when_the_main_process_fails(another_process, is_bad_input, error, message):
    another_process([None, "the disk is full", is_bad_input])
    with pytest.raises(error, match=message):
        from_main_process(lambda: 3)


@pytest.mark.parametrize(("failure", "is_bad_input"), [(fail, True), (lambda: 1 / 0, False)])
def test_the_main_process_sends_its_error_before_it_raises_it(monkeypatch, failure, is_bad_input):
    sent = []
    monkeypatch.setattr(utils, "broadcast_object_list", lambda found: sent.extend(found))
    with pytest.raises((OSError, ZeroDivisionError)):
        from_main_process(failure)
    assert sent[0] is None
    assert sent[2] is is_bad_input
