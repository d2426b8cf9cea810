import pytest

from hf_attn_dynamics.training import guidance_weight_at


def schedule(steps, *args):
    return [guidance_weight_at(step, steps, 6.0, *args) for step in range(steps)]


def test_linear_falls_from_the_first_step_to_zero_at_the_last():
    assert schedule(4) == pytest.approx([6, 4, 2, 0])


def test_hold_linear_holds_before_it_falls():
    assert schedule(6, "hold_linear", 2) == pytest.approx([6, 6, 6, 4, 2, 0])


def test_constant_stays():
    assert schedule(3, "constant") == [6, 6, 6]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_have_a_weight(steps):
    assert schedule(steps)[0] == 6


def test_a_hold_longer_than_the_run_never_falls():
    assert schedule(3, "hold_linear", 10) == [6, 6, 6]
