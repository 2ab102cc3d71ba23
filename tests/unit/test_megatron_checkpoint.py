"""The rounding state on a plain torch optimizer: it rides in the param groups and is checked before anything is loaded."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

from megatron_sr.config import ParamRounding
from megatron_sr.megatron import checkpoint

CONFIG = ParamRounding(mode="stochastic", seed=2**64 - 1)


def adam() -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    return torch.optim.AdamW(
        [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, (0.0, 0.1))], lr=0.1
    )


def saved(config: ParamRounding | None, step: int = 4) -> dict:
    optimizer = adam()
    if config is not None:
        checkpoint.store(optimizer, checkpoint.rounding_state(config, step))
    return pickle.loads(pickle.dumps(optimizer.state_dict()))


def test_the_state_survives_a_round_trip_with_the_largest_seed():
    steps = []
    optimizer = adam()
    checkpoint.on_load(optimizer, CONFIG, loaded=lambda state: steps.append(state["step"]))
    optimizer.load_state_dict(saved(CONFIG, step=4))
    assert steps == [4]
    assert [group["param_rounding"] for group in optimizer.param_groups] == [checkpoint.rounding_state(CONFIG, 4)] * 2


def test_a_saved_state_is_not_changed_by_later_steps():
    """A checkpoint written in the background shares its param groups' values with the running optimizer."""
    optimizer = adam()
    checkpoint.store(optimizer, checkpoint.rounding_state(CONFIG, 1))
    being_written = optimizer.state_dict()
    checkpoint.store(optimizer, checkpoint.rounding_state(CONFIG, 2))
    assert [group["param_rounding"]["step"] for group in being_written["param_groups"]] == [1, 1]


@pytest.mark.parametrize(
    "theirs, ours, start, way_out",
    [
        (dict(seed=5), dict(seed=6), "--param-rounding-seed 6 differs from the checkpoint's 5", "--param-rounding-seed 5"),
        (dict(noise="fixed"), dict(), "ParamRounding noise step differs from the checkpoint's fixed", "ParamRounding noise fixed"),
        (dict(stream=2), dict(), "ParamRounding stream 0 differs from the checkpoint's 2", "ParamRounding stream 2"),
        (dict(seed=5), dict(mode="nearest"), "--param-rounding nearest differs from the checkpoint's stochastic",
         "--param-rounding stochastic --param-rounding-seed 5"),
        (None, dict(), "--param-rounding stochastic: the optimizer state in this checkpoint was saved without", "nearest"),
    ],
)  # fmt: skip
def test_a_load_that_would_not_continue_the_run_is_refused_untouched(theirs, ours, start, way_out):
    optimizer = adam()
    config = ParamRounding(**dict(mode="stochastic", seed=1) | ours)
    checkpoint.on_load(optimizer, config, loaded=lambda state: pytest.fail("loaded"))
    state = saved(theirs and ParamRounding(**dict(mode="stochastic", seed=1) | theirs))
    state["param_groups"][0]["lr"] = 7.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="^" + re.escape(start)) as refused:
        optimizer.load_state_dict(state)
    assert way_out in str(refused.value)
    assert "--finetune" in str(refused.value)
    assert optimizer.state_dict() == before


def test_nearest_loads_a_checkpoint_without_rounding_state():
    optimizer = adam()
    checkpoint.on_load(optimizer, ParamRounding(mode="nearest"), loaded=lambda state: None)
    optimizer.load_state_dict(saved(None))
