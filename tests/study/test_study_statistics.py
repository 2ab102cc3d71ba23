"""Statistics, verdict and the file of results."""

import copy
import json

import pytest

from megatron_sr.study import results as results_file
from megatron_sr.study import statistics
from megatron_sr.study.verdict import verdict, verdict_without_fp16


def raw(rewards, base="a", seed=0, drift=None) -> dict:
    """A raw run whose evaluations lie 10 iterations apart."""
    n = len(rewards)
    return {
        "base": base,
        "seed": seed,
        "start_reward": rewards[0],
        "iteration": [10 * i for i in range(n)],
        "exact_reward": rewards,
        "main_params_exact_reward": [None] * (n - 1) + [rewards[-1]],
        "sampled_reward": [None] * n,
        "drift_k3": drift or [0.0] * n,
        "unchanged": [None] * n,
        "response_length": [None] * n,
        "unchanged_after_steps": [],
        "optimizer_steps": 4,
        "skipped_steps": 0,
        "final_loss_scale": None,
        "seconds": 1.0,
    }


def arm(name, curves, gain=0.1, format="bf16") -> dict:
    runs = [statistics.finish(raw(curve, seed=seed), gain) for seed, curve in enumerate(curves)]
    return {
        "name": name,
        "label": name,
        "settings": {"format": format},
        "runs": runs,
        "summary": statistics.summarise(runs),
    }


def line(iterations: float, length: int = 5) -> list[float]:
    """A curve that rises by 0.1 in so many iterations."""
    return [0.5 + 0.1 * 10 * i / iterations for i in range(length)]


def test_paired_t_test_against_published_values():
    """Student's sleep data (Biometrika 1908): t = -4.0621, df = 9, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    t, p = statistics.paired_t_test([a - b for a, b in zip(first, second)])
    assert t == pytest.approx(-4.0621, abs=5e-5)
    assert p == pytest.approx(0.002833, abs=5e-7)


@pytest.mark.parametrize(
    "t, freedom, p",
    [
        (12.7062047362, 1, 0.05),
        (4.30265272975, 2, 0.05),
        (2.30600413520, 8, 0.05),
        (3.35538733133, 8, 0.01),
        (0.0, 5, 1.0),
    ],
)
def test_p_values_against_tables(t, freedom, p):
    found = statistics.incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) if t else 1.0
    assert found == pytest.approx(p, rel=1e-8)


def test_the_t_test_has_no_answer_for_one_pair_or_equal_differences():
    assert statistics.paired_t_test([1.0]) is None
    assert statistics.paired_t_test([2.0, 2.0, 2.0]) is None


def test_mean_and_standard_error():
    assert statistics.mean_and_sem([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / 3**0.5))
    assert statistics.mean_and_sem([4.0]) == (4.0, None)
    with pytest.raises(ValueError, match="no values"):
        statistics.mean_and_sem([])


def test_finish_interpolates_iterations_area_and_drift():
    run = statistics.finish(raw([0.5, 0.6, 0.8], drift=[0.0, 1.0, 4.0]), 0.2)
    assert run["target"] == pytest.approx(0.7)
    assert run["iterations_to_target"] == pytest.approx(15)
    assert run["drift_at_target"] == pytest.approx(2.25)  # its root, 1.5, is linear
    assert run["auc"] == pytest.approx((0.55 * 10 + 0.7 * 10) / 20)
    assert run["main_params_reward"] == 0.8


def test_a_run_that_never_reaches_the_target_is_a_lower_bound():
    late, early = arm("late", [line(100), line(20)]), arm("early", [line(20), line(10)])
    assert late["runs"][0]["iterations_to_target"] is None
    assert late["runs"][0]["drift_at_target"] is None
    summary = late["summary"]["iterations_to_target"]
    assert summary == {"mean": 30.0, "sem": 10.0, "n": 2, "censored": 1}
    comparison = statistics.compare(late, early, "iterations_to_target")
    assert (comparison["ratio"], comparison["bound"], comparison["censored"]) == (pytest.approx(2.0), "lower", 1)
    assert comparison["p"] is None
    reverse = statistics.compare(early, late, "iterations_to_target")
    assert (reverse["ratio"], reverse["bound"]) == (pytest.approx(0.5), "upper")
    assert statistics.compare(late, arm("later", [line(100), line(100)]), "iterations_to_target") is None
    drift = statistics.compare(late, early, "drift_at_target")
    assert (drift["n"], drift["censored"]) == (1, 1)


def test_comparisons_are_of_equal_base_and_seed():
    one, other = arm("one", [line(20), line(30)]), arm("other", [line(10), line(15)])
    other["runs"].reverse()
    comparison = statistics.compare(one, other, "iterations_to_target")
    assert (comparison["ratio"], comparison["difference"], comparison["n"]) == (
        pytest.approx(2),
        pytest.approx(12.5),
        2,
    )
    other["runs"][0]["base"] = "b"
    assert statistics.compare(one, other, "iterations_to_target")["n"] == 1


def panel(nearest, stochastic, fp16, settled=None) -> dict:
    arms = [arm("bf16-nearest", nearest), arm("bf16-stochastic", stochastic), arm("fp16", fp16, format="fp16")]
    if settled:
        arms.append(arm("fp16-settled", settled, format="fp16"))
    return {"name": "p", "label": "", "gain": 0.1, "iterations": 40, "arms": arms, "comparisons": []}


@pytest.mark.parametrize(
    "nearest, stochastic, fp16, settled, reason",
    [
        (30, 20, 20, 20, None),
        (30, 20.9, 20, 20, None),
        (30, 21.5, 20, 21.4, "stochastic rounding needs 1.075 x the iterations of fp16, more than 1.05 x"),
        (30, 20, 26, 20, "nearest rounding needs 1.154 x the iterations of fp16, less than 1.2 x"),
        (23, 20, 20, 20, "nearest rounding needs 1.150 x"),
        (1000, 20, 20, 20, None),  # nearest never arrives: 40 is a lower bound and enough
        (1000, 20, 36, 20, "nearest rounding needs 1.111 x"),  # ... and here not enough to say
        (30, 1000, 20, 20, "1 of 1 runs of bf16-stochastic did not reach the target in 40 iterations"),
        (30, 20, 1000, 20, "1 of 1 runs of fp16 did not reach the target"),
    ],
)
def test_verdict(nearest, stochastic, fp16, settled, reason):
    found = verdict(panel([line(nearest)], [line(stochastic)], [line(fp16)], [line(settled)]))
    assert (found is None) if reason is None else (reason in found)


def test_verdict_needs_its_arms():
    without = panel([line(30)], [line(20)], [line(20)])
    without["arms"] = without["arms"][:2]
    assert "lacks an FP16 arm" in verdict(without)
    assert verdict_without_fp16(without) is None
    slow = panel([line(22)], [line(20)], [line(20)])
    assert "needs 1.100 x the iterations of stochastic" in verdict_without_fp16(slow)


@pytest.fixture
def results() -> dict:
    return {
        "version": 1,
        "quick": True,
        "machine": {"processor": "x", "cores": 2, "memory_gb": 24.0, "python": "3", "torch": "2", "megatron_sr": "0"},
        "seconds": 1.0,
        "failure": None,
        "table1": None,
        "experiments": {
            "convergence": {
                "title": "t",
                "question": "q",
                "panels": [panel([line(30)], [line(20)], [line(20)])],
                "notes": [],
                "left_out": None,
            }
        },
    }


def test_results_come_back_from_their_file(results, tmp_path):
    path = tmp_path / "deep" / "results.json"
    results_file.save(results, path)
    assert results_file.load(path) == results
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def _set(results, path, value):
    *way, last = path
    for key in way:
        results = results[key]
    results[last] = value


PANEL = ("experiments", "convergence", "panels", 0)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("version",), 2, "version is 2, this program reads version 1"),
        (("quick",), 1, "results.quick is 1; it must be bool"),
        (("extra",), 1, r"unknown fields \['extra'\]"),
        (("experiments",), {"alchemy": None}, "results.experiments.alchemy is None"),
        ((*PANEL, "arms", 0, "runs", 0, "seed"), "0", r"runs\[0\].seed is '0'; it must be a whole number"),
        ((*PANEL, "arms", 0, "runs", 0, "unchanged"), [], "unchanged has 0 entries for 5 iterations"),
        ((*PANEL, "arms", 1, "name"), "fp16", "arms share a name"),
        ((*PANEL, "gain"), None, None),
    ],
)
def test_damaged_results_are_named(results, path, value, message):
    damaged = copy.deepcopy(results)
    _set(damaged, path, value)
    if message is None:
        results_file.check(damaged)
    else:
        with pytest.raises(ValueError, match=message):
            results_file.check(damaged)


def test_a_file_that_is_no_results_file_is_refused(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        results_file.load(path)
    path.write_text(json.dumps([]))
    with pytest.raises(ValueError, match="version is 'list'"):
        results_file.load(path)
