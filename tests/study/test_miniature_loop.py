"""The miniature's loop: arms use the project's rounding, pairs share their random numbers, FP16 scales its loss as Megatron does."""

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_sr import Noise, mxfp8, round_to_
from megatron_sr.study.miniature import bases
from megatron_sr.study.miniature.loop import STREAM_BACKWARD, STREAM_FORWARD, MiniatureRun
from megatron_sr.study.miniature.loss_scale import DynamicLossScale
from megatron_sr.study.miniature.model import views
from megatron_sr.study.miniature.settings import RunSettings, number_format

SMALL = {"prompts": 8, "completions": 4, "mini_batches": 2, "iterations": 1, "lr": 1e-5}


def trained(**settings) -> MiniatureRun:
    """A run after one iteration of two optimizer steps."""
    run = MiniatureRun(RunSettings(**{**SMALL, **settings}))
    run.sticking = []
    run.iterate(0)
    return run


def rounded(run: MiniatureRun, format: str, step: int | None, stream: int = 0) -> dict[str, torch.Tensor]:
    """The main params rounded tensor by tensor, by the public function."""
    storage = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(format, torch.float32)
    out = {}
    for name, main in views(run.main, run.config).items():
        noise = None if step is None else Noise(run.settings.seed, step, name, stream)
        out[name] = round_to_(
            torch.empty(main.shape, dtype=storage), main, noise=noise, format=number_format(format)
        ).float()
    return out


def weights(flat: torch.Tensor, run: MiniatureRun) -> dict[str, torch.Tensor]:
    return views(flat, run.config)


def assert_equal(found: dict, wanted: dict) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("format", ["bf16", "fp16", "e8m2", "e8m4", "e8m10"])
def test_nearest_weights_are_the_projects_rounding(format):
    run = trained(format=format, initial_loss_scale=2.0**12)
    assert run.adam.steps == 2
    assert_equal(weights(run.trainer.flat, run), rounded(run, format, None))
    assert torch.equal(run.policy.flat, run.trainer.flat)


@pytest.mark.parametrize("format", ["bf16", "e8m4"])
def test_stochastic_weights_are_the_projects_bits_of_this_step(format):
    run = trained(format=format, rounding="stochastic", seed=3)
    assert_equal(weights(run.trainer.flat, run), rounded(run, format, 2))
    assert torch.equal(run.policy.flat, run.trainer.flat)
    assert not torch.equal(run.trainer.flat, trained(format=format, seed=3).trainer.flat)


def test_fp32_weights_are_the_main_params():
    run = trained(format="fp32")
    assert torch.equal(run.policy.flat, run.main)


def test_mxfp8_rounds_linear_layers_twice_with_two_streams():
    run = trained(format="mxfp8", rounding="stochastic", seed=5)
    first = rounded(run, "bf16", 2)
    for name, weight in weights(run.trainer.flat, run).items():
        wanted = first[name]
        if name.endswith(("qkv", "proj", "fc1", "fc2")):
            wanted = mxfp8.quantize(first[name].bfloat16(), noise=Noise(5, 2, name, 1)).dequantize()
        assert torch.equal(weight, wanted), name


def test_schemes_draw_where_they_say():
    fixed = trained(rounding="stochastic", scheme="fixed")
    assert_equal(weights(fixed.policy.flat, fixed), rounded(fixed, "bf16", 0))
    rollout = trained(rounding="stochastic", scheme="rollout-only")
    assert_equal(weights(rollout.trainer.flat, rollout), rounded(rollout, "bf16", None))
    assert_equal(weights(rollout.policy.flat, rollout), rounded(rollout, "bf16", 2))
    trainer = trained(rounding="stochastic", scheme="trainer-only")
    assert_equal(weights(trainer.trainer.flat, trainer), rounded(trainer, "bf16", 2))
    assert_equal(weights(trainer.policy.flat, trainer), rounded(trainer, "bf16", None))
    backward = trained(rounding="stochastic", scheme="backward")
    assert_equal(weights(backward.trainer.flat, backward), rounded(backward, "bf16", 2))
    assert_equal(weights(backward.trainer.backward_flat, backward), rounded(backward, "bf16", 2, STREAM_BACKWARD))
    fresh = trained(rounding="stochastic", scheme="fresh")
    assert_equal(weights(fresh.policy.flat, fresh), rounded(fresh, "bf16", fresh.forwards, STREAM_FORWARD))
    assert fresh.forwards >= 1 + 1 + 2 + 1  # at the start, old log-probabilities, two mini-batches, the next rollouts
    assert not torch.equal(fresh.policy.flat, fresh.trainer.flat)


def test_stochastic_gradients_change_the_main_params_a_little():
    plain = trained(rounding="stochastic")
    noisy = trained(rounding="stochastic", scheme="gradients")
    assert not torch.equal(plain.main, noisy.main)
    assert (plain.main - noisy.main).abs().max() <= 4 * SMALL["lr"] + 1e-6  # Adam's steps are at most about lr


def test_pairs_share_prompts_and_random_numbers():
    """Before any weight has moved, both formats draw the same tokens and earn the same reward."""
    rewards = [MiniatureRun(RunSettings(**{**SMALL, "format": f, "mini_batches": 1})) for f in ("bf16", "fp32")]
    for run in rewards:
        run.sticking = []
    assert rewards[0].iterate(0) == rewards[1].iterate(0)
    other = MiniatureRun(RunSettings(**{**SMALL, "seed": 1}))
    assert not torch.equal(
        other.task.prompts(8, other._generator(0, 1)), rewards[0].task.prompts(8, rewards[0]._generator(0, 1))
    )


def test_a_run_repeats_bit_for_bit():
    settings = RunSettings(**{**SMALL, "iterations": 2, "rounding": "stochastic"})
    first, second = (MiniatureRun(settings).execute() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_staleness_generates_with_old_weights():
    run = MiniatureRun(RunSettings(**{**SMALL, "format": "fp32", "staleness": 2}))
    run.sticking, used = [], []
    generate = run.policy.generate

    def spy(*args):
        used.append(run.policy.flat.clone())
        return generate(*args)

    run.policy.generate = spy
    versions = [run.policy.flat.clone()]
    for iteration in range(4):
        run.iterate(iteration)
        versions.append(run.policy.flat.clone())
    for iteration, weights_used in enumerate(used):
        assert torch.equal(weights_used, versions[max(0, iteration - 2)]), iteration
    assert torch.equal(run.policy.flat, run.main)  # put back after generating


def test_unchanged_counts_and_series_of_a_run():
    seen = []
    result = MiniatureRun(RunSettings(**{**SMALL, "iterations": 3, "evaluate_every": 2})).execute(seen.append)
    assert seen == [1, 2, 3]
    assert result["iteration"] == [0, 2, 3]
    assert result["unchanged"][0] == 100.0
    assert 50 < result["unchanged"][-1] < 100
    assert result["sampled_reward"][0] is None
    assert len(result["unchanged_after_steps"]) == 4
    assert result["start_reward"] == result["exact_reward"][0]
    assert result["drift_k3"][0] == pytest.approx(0, abs=1e-8)
    assert result["drift_k3"][-1] > 1e-8


def test_fp16_skips_steps_until_the_loss_scale_fits():
    run = MiniatureRun(RunSettings(**{**SMALL, "format": "fp16", "iterations": 12, "evaluate_every": 12}))
    result = run.execute()
    assert result["skipped_steps"] + result["optimizer_steps"] == 24
    # hysteresis 2: the first overflow is tolerated, every later one halves the scale
    assert result["final_loss_scale"] == 2.0 ** (32 - (result["skipped_steps"] - 1))
    assert result["skipped_steps"] > 5
    settled = MiniatureRun(RunSettings(**{**SMALL, "format": "fp16", "initial_loss_scale": 2.0**12})).execute()
    assert settled["skipped_steps"] == 0


def test_loss_scale_follows_megatrons_rules():
    scale = DynamicLossScale(scale=8.0, min_scale=2.0, growth_interval=3, hysteresis=2)
    history = []
    for overflow in (True, True, True, True, False, False, False, True, True):
        scale.update(overflow)
        history.append(scale.scale)
    assert history == [8, 4, 2, 2, 2, 2, 4, 4, 2]
    grad = torch.tensor([1.0, 8.0])
    assert not scale.unscale_(grad)
    assert grad.tolist() == [0.5, 4.0]
    assert scale.unscale_(torch.tensor([1e6]))


def test_loss_scale_equals_megatrons_own(monkeypatch):
    core = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    if not core:
        pytest.skip("megatron-core is not installed")
    path = Path(core.submodule_search_locations[0]) / "optimizer" / "grad_scaler.py"
    spec = importlib.util.spec_from_file_location("grad_scaler", path)  # alone: the whole of megatron.core takes 10 s
    grad_scaler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grad_scaler)
    tensor = torch.tensor
    monkeypatch.setattr(grad_scaler.torch, "tensor", lambda *a, device=None, **k: tensor(*a, **k))
    theirs = grad_scaler.DynamicGradScaler(2.0**32, 1.0, 2.0, 0.5, 5, 2)
    ours = DynamicLossScale(growth_interval=5)
    generator = torch.Generator().manual_seed(8)
    for overflow in (torch.rand(300, generator=generator) < 0.4).tolist():
        theirs.update(overflow)
        ours.update(overflow)
        assert ours.scale == theirs.scale.item()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"base": "nothing"}, "base 'nothing' is not known"),
        ({"format": "bf15"}, "format 'bf15' is not known"),
        ({"rounding": "up"}, "rounding 'up' is not known"),
        ({"scheme": "often"}, "scheme 'often' is not known"),
        ({"scheme": "fresh"}, "with rounding nearest leave it out"),
        ({"format": "fp32", "rounding": "stochastic"}, "not rounded"),
        ({"prompts": 10}, "cannot be shared by 4 mini-batches"),
        ({"completions": 1}, "completions must be at least 2"),
    ],
)
def test_settings_that_cannot_run_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunSettings(**settings)


def test_the_base_is_rounded_to_the_panels_grid():
    run = MiniatureRun(RunSettings(**{**SMALL, "grid": "e8m4", "format": "e8m6"}))
    base = bases.load("addition-0")
    wanted = round_to_(torch.empty_like(base), base, format="e8m4")
    assert torch.equal(run.main, wanted)
    assert torch.equal(run.policy.flat, wanted)
