import random

import numpy as np
import pytest
import torch

from hf_attn_dynamics.training.random_state import random_state_kept


def draw():
    return random.random(), np.random.random(), torch.rand(()).item()


@pytest.mark.parametrize("ending", ["as planned", "by an error"])
def test_random_numbers_go_on_as_if_none_had_been_drawn(ending):
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        expected = draw()
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        try:
            with random_state_kept(torch.device("cpu")):
                draw()
                if ending == "by an error":
                    raise ArithmeticError
        except ArithmeticError:
            pass
        assert draw() == expected
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
