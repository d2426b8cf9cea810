import pytest

from hf_attn_dynamics.training import first_at_or_below, mean_over_steps


def test_mean_over_steps_weights_each_window_by_its_steps():
    history = [{"step": 10, "task_loss": 4.0}, {"step": 10, "eval_loss": 9.0}, {"step": 15, "task_loss": 1.0}]
    assert mean_over_steps(history, "task_loss") == pytest.approx(3.0)
    assert mean_over_steps(history, "nothing") is None


@pytest.mark.parametrize(("loss", "expected"), [(4.0, (20, 3.5)), (3.5, (20, 3.5)), (3.0, None)])
def test_the_first_evaluation_at_or_below_a_loss_is_found(loss, expected):
    history = [{"step": 10, "eval_loss": 5.0}, {"step": 15, "task_loss": 1.0}, {"step": 20, "eval_loss": 3.5}]
    history.append({"step": 30, "eval_loss": 3.2})
    assert first_at_or_below(history, loss) == expected
