"""TensorBoard and W&B get every number of a metrics record."""

import importlib.util
import sys
import types

import pytest

from megatron_sr.rl import options
from megatron_sr.rl.metrics import open_log
from megatron_sr.rl.trackers import scalars


def record_of(iteration, reward):
    return {
        "rounding": "stochastic", "seed": 3, "iteration": iteration, "exact_reward": reward, "sampled_reward": None,
        "unchanged_after_steps": [[1, 0.99], [2, 0.98]] if iteration == 1 else [], "parity": {"syncs": iteration, "tensors": 50},
        "staleness": {"0": 64}, "operators": ["text"], "new_metric": 7,
    }  # fmt: skip


def flags(*extra):
    return options.parser().parse_args(["--model", "none", *map(str, extra)])


def test_scalars_are_the_numbers_of_a_record():
    assert dict(scalars(record_of(1, 0.25))) == {
        "reward/exact": 0.25, "weights/unchanged_after_step/1": 0.99, "weights/unchanged_after_step/2": 0.98,
        "sync/parity/syncs": 1.0, "sync/parity/tensors": 50.0, "rollouts/staleness/0": 64.0, "other/new_metric": 7.0,
    }  # fmt: skip


def test_tensorboard_reads_back_what_was_written_and_a_resume_replaces(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = open_log(flags("--tensorboard-dir", tmp_path), "stochastic-seed3")
    for i, reward in enumerate([0.25, 0.5, 0.75, 1.0]):
        log.write(record_of(i, reward))
    # No close: a killed job's events are there all the same.
    resumed = open_log(flags("--tensorboard-dir", tmp_path), "stochastic-seed3")
    resumed.rewind(1, rounding="stochastic", seed=3)
    resumed.write(record_of(2, 0.125))
    resumed.close()
    events = EventAccumulator(str(tmp_path / "stochastic-seed3"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/exact")] == [(0, 0.25), (1, 0.5), (2, 0.125)]
    assert [e.value for e in events.Scalars("sync/parity/syncs")] == [0, 1, 2]
    assert "weights/unchanged_after_step/2" in events.Tags()["scalars"]
    log.close()


def test_wandb_gets_configuration_and_scalars(monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda row: calls.append(row),
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        finish=lambda: calls.append("finish"),
    )
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **settings: calls.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = open_log(flags("--wandb-project", "sr", "--lr", "2e-6"), "nearest-seed0")
    log.write(record_of(0, 0.25))
    log.close()
    start, axis, row, end = calls
    assert (start["project"], start["name"], start["config"]["lr"]) == ("sr", "nearest-seed0", 2e-6)
    assert start["config"]["model"] == "none"  # a path, as text
    assert axis == ("*", "iteration")
    assert (row["iteration"], row["reward/exact"]) == (0, 0.25)
    assert end == "finish"


@pytest.mark.parametrize(("flag", "package"), [("--wandb-project", "wandb"), ("--tensorboard-dir", "tensorboard")])
def test_a_missing_package_stops_before_anything_starts(monkeypatch, flag, package, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else found(name, *a))
    args = flags(flag, tmp_path / "x")
    with pytest.raises(ImportError, match=f"{flag} needs the package {package}: pip install {package}"):
        options.check(args, 1)
    assert not (tmp_path / "x").exists()
