"""Summary, verdict, report and sticking."""

import dataclasses
import json

import pytest
import torch

from megatron_sr import cli
from megatron_sr.study import demo, figures
from megatron_sr.study.report import write_report
from megatron_sr.study.sticking import unchanged_fraction
from megatron_sr.study.summary import ArmSummary, iterations_to_target, summarise, verdict


def curve(values):
    return [{"iteration": i, "exact_reward": v} for i, v in enumerate(values)]


def test_iterations_to_target_interpolates():
    assert iterations_to_target(curve([0.0, 0.2, 0.4]), 0.3) == pytest.approx(1.5)
    assert iterations_to_target(curve([0.0, 0.2, 0.1, 0.4]), 0.2) == pytest.approx(1.0)
    assert iterations_to_target(curve([0.5, 0.6]), 0.4) == 0.0
    assert iterations_to_target(curve([0.5, 0.3, 0.6]), 0.4) == 0.0  # the start counts, also when the curve dips
    assert iterations_to_target(curve([0.0, 0.1]), 0.3) is None


def test_iterations_to_target_skips_unscored_iterations():
    records = [*curve([0.0]), {"iteration": 1}, {"iteration": 2, "exact_reward": 0.4}]
    assert iterations_to_target(records, 0.2) == pytest.approx(1.0)


ARM = ArmSummary(20.0, 0.29, 0.3, 0.28, [99.0] * 4, 40)


@pytest.mark.parametrize(
    ("nearest", "stochastic", "mismatched", "reason"),
    [
        (20.0, 10.0, 0, None),
        (20.0, 16.6, 0, None),
        (20.0, 17.0, 0, "took 17.0 iterations"),
        (20.0, None, 0, "did not reach the target"),
        (None, 30.0, 0, None),
        (None, 39.0, 0, "more than 33.3"),
        (0.0, 10.0, 0, "more than 0.0"),
        (20.0, 10.0, 1, "1 tensors read back from vLLM differ"),
    ],
)
def test_verdict(nearest, stochastic, mismatched, reason):
    arms = [dataclasses.replace(ARM, iterations_to_target=value) for value in (nearest, stochastic)]
    found = verdict(*arms, target=0.285, mismatched=mismatched, factor=1.2)
    assert found is None if reason is None else reason in found


def test_unchanged_fraction_compares_bits():
    start = {"w": torch.tensor([0.0, 1.0, 2.0, float("nan")], dtype=torch.bfloat16)}
    now = torch.tensor([-0.0, 1.0, 2.0, float("nan")], dtype=torch.bfloat16)  # -0.0 has other bits, NaN the same
    assert unchanged_fraction([("w", now)], start) == 0.75


def records_of(mode, gain):
    parity = {"syncs": 4, "tensors": 100, "mismatched_tensors": 0}
    records = [{"rounding": mode, "iteration": 0, "exact_reward": 0.28, "exact_reward_main_params": 0.28}]
    for i in range(1, 4):
        records.append(
            {
                "rounding": mode, "iteration": i, "exact_reward": 0.28 + gain * i, "sampled_reward": 0.3, "unchanged": 0.99,
                "drift_k3": 1e-5 * i, "logprob_gap_mean": 0.003, "parity": parity,
                **({"unchanged_after_steps": [[s, 1 - s / 100] for s in range(1, 5)]} if i == 1 else {}),
                **({"exact_reward_main_params": 0.29} if i == 3 else {}),
            }
        )  # fmt: skip
    return records


def test_report_is_self_contained_and_complete(tmp_path):
    arms = {"nearest": records_of("nearest", 0.001), "stochastic": records_of("stochastic", 0.004)}
    summaries = {mode: summarise(records, 0.283) for mode, records in arms.items()}
    assert summaries["stochastic"].sticking == pytest.approx([99.0, 98.0, 97.0, 96.0])
    table = demo.comparison_table(summaries, 0.283)
    pictures = {
        "reward": (figures.reward_curves(arms, 0.283), "caption <one>"),
        "gap": (figures.logprob_gap(arms), "two"),
    }
    context = dict(title="T", subtitle="S", failure=None, success="fine", table=table, notes=["a & b"])
    html = write_report(tmp_path, pictures, context).read_text()
    assert html.count("data:image/png;base64,") == 2
    assert "http" not in html.replace('lang="en"', "")
    assert "caption &lt;one&gt;" in html  # captions are escaped
    for cell in ("iterations to 0.2830", "99.42", "a &amp; b"):
        assert cell in html
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    json.dumps({m: dataclasses.asdict(s) for m, s in summaries.items()})


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_every_figure_draws(mode):
    arms = {mode: records_of(mode, 0.001)}
    for draw in (figures.sampled_reward, figures.unchanged_curve, figures.drift_curve, figures.logprob_gap):
        assert draw(arms).axes[0].lines
    bars = figures.sticking_bars({mode: [99.0, 98.0, 97.0, 96.0]})
    assert len(bars.axes[0].patches) == 12  # this run, paper BF16 and paper FP16, four steps each


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "no/base"], "--model no/base: no config.json there"),
        (["--ranks", "3"], "--ranks 3 cannot share the demo's 64 prompts evenly; choose 1, 2, 4, 8 or 16"),
        (["--ranks", "0"], "--ranks 0 cannot share"),
        (["--out", "/dev/null/x"], "--metrics /dev/null/x/metrics.jsonl cannot be written"),
        (["--iterations", "0"], "--iterations 0 must be at least 1"),
    ],
)
def test_demo_refuses_bad_input_before_it_starts_anything(flags, message, tmp_path, capsys):
    assert cli.main(["demo", "--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
