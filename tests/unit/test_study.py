"""Summary, verdict, report and sticking."""

import dataclasses
import json

import pytest
import torch

from megatron_sr import cli
from megatron_sr.study import demo, figures, job_pictures
from megatron_sr.study.drawing import WIDE
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
                "drift_k3": 1e-5 * i, "logprob_gap_mean": 0.003, "sync_seconds": 0.03, "sync_bytes": 820000, "parity": parity,
                **({"unchanged_after_steps": [[s, 1 - s / 100] for s in range(1, 5)]} if i == 1 else {}),
                **({"exact_reward_main_params": 0.29} if i == 3 else {}),
            }
        )  # fmt: skip
    return records


def demo_report(nearest=0.001, failure=None):
    arms = {"nearest": records_of("nearest", nearest), "stochastic": records_of("stochastic", 0.004)}
    summaries = {mode: summarise(records, 0.283) for mode, records in arms.items()}
    table = demo.comparison_table(summaries, 0.283)
    parity = {"syncs": 8, "tensors": 1200, "mismatched_tensors": 0}
    return summaries, demo.make_report(arms, summaries, 0.283, table, parity, failure, "a <subtitle>")


def test_report_is_self_contained_and_complete(tmp_path):
    summaries, report = demo_report()
    assert summaries["stochastic"].sticking == pytest.approx([99.0, 98.0, 97.0, 96.0])
    [numbers, pictures] = report.sections
    two = dataclasses.replace(pictures, pictures=pictures.pictures[:2])
    html = write_report(tmp_path, dataclasses.replace(report, sections=[numbers, two])).read_text()
    assert html.count("data:image/svg+xml;base64,") == 4  # a wide and a narrow form of each
    assert "http" not in html
    assert "a &lt;subtitle&gt;" in html  # text is escaped
    for cell in ("iterations to 0.2830", "99.42", "Readout lag", "Passed: stochastic", "4.00 x", "0 of 1,200"):
        assert cell in html
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    json.dumps({m: dataclasses.asdict(s) for m, s in summaries.items()})


def test_report_of_a_failure_says_so_and_claims_nothing():
    _, report = demo_report(nearest=0.0005, failure="it did not")  # nearest never reaches the target
    assert report.failure == "Failed: it did not."
    assert not [words for _, words in report.keys if "nearest over stochastic" in words]


def test_pictures_of_one_name_are_refused(tmp_path):
    _, report = demo_report()
    one = dataclasses.replace(report.sections[1], pictures=report.sections[1].pictures[:1])
    twice = dataclasses.replace(report, sections=[one, one])
    with pytest.raises(ValueError, match="two pictures are called reward"):
        write_report(tmp_path, twice)


def test_every_figure_draws():
    _, report = demo_report()
    for picture in report.sections[1].pictures:
        axes = picture.draw(WIDE).axes[0]
        assert axes.lines or axes.patches
        assert "at the end" in picture.alt or picture.name in ("reward", "sticking", "syncs")
    bars = figures.sticking_bars({"nearest": [99.0, 98.0, 97.0, 96.0]}, WIDE)
    assert len(bars.axes[0].patches) == 12  # this run, paper BF16 and paper FP16, four steps each


def test_response_length_has_a_band_where_records_have_percentiles():
    records = [
        {"iteration": i, "completion_tokens": 40.0 + i, "response_length": {"p10": 20 - i, "p90": 90}}
        for i in (1, 2, 3)
    ]
    [band] = figures.response_length({"stochastic": [records]}, WIDE).axes[0].collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(1, 19), (3, 17), (1, 90), (3, 90)}
    picture = job_pictures.response_length({"stochastic": [records]})
    assert "from 41.0 to 43.0" in picture.alt
    fixed = job_pictures.response_length({"stochastic": [[{"iteration": 1, "completion_tokens": 4.0}]]})
    assert "all have 4 tokens" in fixed.caption


def test_curves_are_of_the_iterations_that_all_runs_have():
    runs = [
        [{"iteration": i, "x": value} for i, value in enumerate(values)]
        for values in ([1.0, 2.0, None], [3.0, 4.0, 5.0])
    ]
    x, mean, sem = figures.curve(runs, "x")
    assert (x, mean) == ([0, 1], [2.0, 3.0])
    assert sem == pytest.approx([1.0, 1.0])  # two values 2 apart: deviation sqrt(2), over sqrt(2)


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
