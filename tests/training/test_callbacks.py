import time
from types import SimpleNamespace

import pytest

from hf_attn_dynamics.training import StepTimer


def test_the_timer_counts_steps_alone_and_the_tokens_since_it_started(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 21.5])  # half a second, a pause, one and a half
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = StepTimer()
    assert timer.figures() == {"seconds_per_step": None, "tokens_per_second": None}
    for before, after in ((1000, 1300), (1300, 1500)):
        timer.on_step_begin(None, SimpleNamespace(num_input_tokens_seen=before), None)
        timer.on_step_end(None, SimpleNamespace(num_input_tokens_seen=after), None)
    assert timer.figures() == pytest.approx({"seconds_per_step": 1.0, "tokens_per_second": 250.0})
