# Licensed under the Apache License, Version 2.0.
"""Stacked gradient descent on functions whose path is known."""

import pytest
import torch

from hf_attn_dynamics.training import stacked_gradient_descent


def parabolas(starts):
    """Losses x² of runs; an update with the rate η multiplies x by 1 − 2η."""
    x = torch.tensor(starts, dtype=torch.float64)
    return x, (lambda: x.square())


def test_each_run_goes_its_own_way():
    x, losses = parabolas([1.0, 2.0, 3.0])
    rates = torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64)
    ended = stacked_gradient_descent(losses, {"x": x}, {"x": rates}, epochs=3)
    assert x.tolist() == [0.0, 0.25, 3.0]
    assert ended.losses.tolist() == [0.0, 0.0625, 9.0]
    assert ended.epochs.tolist() == ended.best_epochs.tolist() == [3, 3, 3]


def test_parameters_without_a_rate_stay_and_may_be_unused():
    x, losses = parabolas([1.0])
    unused = torch.ones(1)
    stacked_gradient_descent(losses, {"x": x, "unused": unused}, {"x": 0.25, "unused": 0.0}, epochs=1)
    assert (x.item(), unused.item(), unused.requires_grad) == (0.5, 1.0, False)


def test_records_are_of_the_parameters_after_so_many_updates():
    x, losses = parabolas([8.0])
    seen = []
    stacked_gradient_descent(
        losses, {"x": x}, {"x": 0.25}, 5, record=lambda *found: seen.append((*found, x.item())), record_at=(0, 2)
    )
    assert [(epoch, loss.item(), value) for epoch, loss, value in seen] == [(0, 64, 8), (2, 4, 2), (5, 0.0625, 0.25)]


def test_a_run_stops_after_its_patience_and_keeps_its_parameters():
    x, losses = parabolas([8.0, 8.0])
    # The first run is best at 2, after two updates, and passes by; the second one never stops to get better.
    goals = torch.tensor([2.0, 0.0], dtype=torch.float64)
    ended = stacked_gradient_descent(
        losses, {"x": x}, {"x": 0.25}, epochs=9, validation=lambda: (x - goals).square(), patience=3
    )
    assert ended.epochs.tolist() == [5, 9]
    assert ended.best_epochs.tolist() == [2, 9]
    assert x.tolist() == [8 / 2**5, 8 / 2**9]


def test_training_ends_when_all_runs_have_stopped():
    x, losses = parabolas([8.0, 4.0])
    seen = []
    ended = stacked_gradient_descent(
        losses,
        {"x": x},
        {"x": 0.25},
        epochs=1000,
        validation=lambda: -x,
        patience=2,
        record=lambda epoch, _: seen.append(epoch),
    )
    # −x grows less and less from below, so it has no new minimum after the start.
    assert ended.epochs.tolist() == [2, 2]
    assert ended.best_epochs.tolist() == [0, 0]
    assert seen == [2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"patience": 3}, "early stopping needs both validation and patience"),
        ({"validation": lambda: torch.zeros(1)}, "early stopping needs both"),
        ({"validation": lambda: torch.zeros(1), "patience": 0}, "patience must be at least 1, got 0"),
        ({"learning_rates": {"y": 0.1}}, "the same names, but only one has 'x'"),
        ({"learning_rates": {"x": 0.0}}, "learning_rates are 0 for all parameters; set at least one"),
        ({"learning_rates": {"x": 1e200}}, "the loss of run 0 is .* after 9 epochs; lower learning_rates"),
    ],
    ids=["epochs", "no validation", "no patience", "patience", "names", "frozen", "diverged"],
)
def test_impossible_settings_are_refused(settings, message):
    x, losses = parabolas([8.0])
    with pytest.raises(ValueError, match=message):
        stacked_gradient_descent(
            **{"losses": losses, "parameters": {"x": x}, "learning_rates": {"x": 0.1}, "epochs": 9, **settings}
        )
