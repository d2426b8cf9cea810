import pytest

from hf_attn_dynamics.training import guidance_weight_at
from hf_attn_dynamics.training.schedules import GuidanceSchedules


def schedule(steps, *args):
    return [guidance_weight_at(step, steps, 6.0, *args) for step in range(steps)]


def test_linear_falls_from_the_first_step_to_zero_at_the_last():
    assert schedule(4) == pytest.approx([6, 4, 2, 0])


def test_hold_linear_holds_before_it_falls():
    assert schedule(6, "hold_linear", 2) == pytest.approx([6, 6, 6, 4, 2, 0])


def test_constant_stays():
    assert schedule(3, "constant") == [6, 6, 6]


def test_hold_holds_and_releases():
    assert schedule(5, "hold", 2) == [6, 6, 0, 0, 0]
    assert schedule(2, "hold", 5) == [6, 6]


def test_names_with_the_same_schedule_have_one_weight():
    for made in (
        GuidanceSchedules("hold", 2),
        GuidanceSchedules("hold", {"a": 2, "b": 2}),
        GuidanceSchedules({"a": "hold", "b": "hold"}, 2),
    ):
        assert made.weights_at(1, 5, 6.0, ["a", "b"]) == 6
    # A schedule that does not hold reads no steps.
    assert GuidanceSchedules({"a": "constant", "c": "hold"}, 2).weights_at(4, 5, 6.0, ["a"]) == 6


def test_names_have_their_own_schedules():
    made = GuidanceSchedules({"a": "hold_linear", "b": "hold", "c": "constant"}, {"a": 2, "b": 3})
    weights = [made.weights_at(step, 5, 6.0, "abcd") for step in range(5)]
    found = {name: [one[name] for one in weights] for name in "abcd"}
    assert found == {
        "a": pytest.approx([6, 6, 6, 3, 0]),
        "b": [6, 6, 6, 0, 0],
        "c": [6] * 5,
        "d": pytest.approx([6, 4.5, 3, 1.5, 0]),
    }


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_have_a_weight(steps):
    assert schedule(steps)[0] == 6


def test_a_hold_longer_than_the_run_never_falls():
    assert schedule(3, "hold_linear", 10) == [6, 6, 6]
