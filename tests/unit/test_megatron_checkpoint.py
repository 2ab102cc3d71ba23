"""The rounding state on a plain torch optimizer: it rides in the param groups and is checked before anything is loaded."""

from __future__ import annotations

import argparse
import copy
import pickle
import re

import pytest
import torch

from megatron_sr import checkpoint
from megatron_sr.config import ParamRounding
from megatron_sr.megatron import arguments

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
        (dict(noise="fixed"), dict(), "--param-rounding-noise step differs from the checkpoint's fixed", "--param-rounding-noise fixed"),
        (dict(stream=2), dict(), "ParamRounding(stream=) 0 differs from the checkpoint's 2", "ParamRounding(stream=) 2"),
        (dict(format="e8m5"), dict(format="bf16"), "--param-rounding-format bf16 differs", "--param-rounding-format e8m5"),
        (dict(exclude=("*norm*",)), dict(), "--param-rounding-exclude (none) differs from the checkpoint's *norm*", "*norm*"),
    ],
)  # fmt: skip
def test_a_load_that_would_not_continue_the_run_is_refused_untouched(theirs, ours, start, way_out):
    optimizer = adam()
    config = ParamRounding(**dict(mode="stochastic", seed=1) | ours)
    checkpoint.on_load(optimizer, config, loaded=lambda state: pytest.fail("loaded"))
    state = saved(ParamRounding(**dict(mode="stochastic", seed=1) | theirs))
    state["param_groups"][0]["lr"] = 7.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="^" + re.escape(start)) as refused:
        optimizer.load_state_dict(state)
    assert way_out in str(refused.value)
    assert "--param-rounding-on-mismatch recompute" in str(refused.value)
    assert optimizer.state_dict() == before


def test_with_recompute_other_settings_are_loaded():
    steps = []
    config = ParamRounding(seed=6, on_mismatch="recompute")
    optimizer = adam()
    checkpoint.on_load(optimizer, config, loaded=lambda state: steps.append(state["step"]))
    optimizer.load_state_dict(saved(ParamRounding(seed=5), step=4))
    assert steps == [4]


def test_a_state_of_an_older_version_has_the_defaults_of_what_it_lacks():
    state = {"mode": "stochastic", "seed": 5, "format": "bf16", "noise": "step", "stream": 0, "step": 3}
    assert checkpoint.saved_config(state) == ParamRounding(seed=5, format="bf16")
    assert checkpoint.differences(ParamRounding(seed=5, format="bf16"), ParamRounding(seed=5)) == {}


@pytest.mark.parametrize("state", [{"mode": "sideways"}, {"seed": -1}, {"from": "the future"}])
def test_a_damaged_state_is_refused_in_words(state):
    with pytest.raises(ValueError, match="rounding state cannot be read"):
        checkpoint.check_loadable({"step": 1, **state}, ParamRounding())


def test_turned_on_it_goes_on_at_the_optimizers_own_step(capsys):
    """Adam's count, by param as torch keeps it or by group as FusedAdam does."""
    stepped = adam()
    for group in stepped.param_groups:
        group["params"][0].grad = torch.ones(3)
    for _ in range(3):
        stepped.step()
    steps = []
    optimizer = adam()
    checkpoint.on_load(optimizer, CONFIG, loaded=lambda state: steps.append(state["step"]))
    optimizer.load_state_dict(stepped.state_dict())
    by_group = adam().state_dict()
    for group in by_group["param_groups"]:
        group["step"] = 7
    optimizer.load_state_dict(by_group)
    assert steps == [3, 7]


def test_turned_off_it_says_so_and_leaves_no_state_behind(capsys):
    optimizer = adam()
    checkpoint.on_load(optimizer, ParamRounding(mode="nearest"), loaded=lambda state: None)
    optimizer.load_state_dict(saved(ParamRounding(seed=8), step=4))
    assert checkpoint.find(optimizer.param_groups) is None
    assert all(checkpoint.KEY not in group for group in optimizer.param_groups)
    said = capsys.readouterr().out
    assert said.startswith(
        "megatron-sr: --param-rounding nearest: rounding was stochastic (seed 8) up to step 4 of this checkpoint"
    )


def test_nearest_loads_a_checkpoint_without_rounding_state(capsys):
    optimizer = adam()
    checkpoint.on_load(optimizer, ParamRounding(mode="nearest"), loaded=lambda state: None)
    optimizer.load_state_dict(saved(None))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "args, named",
    [
        (dict(no_save_optim=True, ckpt_format="torch_dist"), "--no-save-optim on"),
        (dict(no_save_optim=None, ckpt_format="torch"), "--ckpt-format torch:"),
    ],
)
def test_c6_flags_that_do_not_go_with_save_model_none(args, named):
    args = argparse.Namespace(**args)
    arguments.check_arguments(args, ParamRounding())
    with pytest.raises(ValueError, match=f"--param-rounding-save-model none does not work with {named}"):
        arguments.check_arguments(args, ParamRounding(save_model="none"))
