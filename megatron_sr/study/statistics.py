"""From runs to summaries: iterations to a target, standard errors, paired comparisons; what censoring does to each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from megatron_sr.study.results import SERIES, Arm, Comparison, Run, Statistic, Summary
from megatron_sr.study.summary import iterations_to_target

DIGITS = 6


def mean_and_sem(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error (sample standard deviation / sqrt n; None for one value). Raises ValueError for none."""
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def paired_t_test(differences: Sequence[float]) -> tuple[float, float] | None:
    """(t, two-sided p) of Student's paired test with n - 1 degrees of freedom.

    None with fewer than two pairs, or when all differences are equal: the test has no answer then.
    """
    if len(differences) < 2:
        return None
    mean, sem = mean_and_sem(differences)
    if not sem:
        return None
    t, freedom = mean / sem, len(differences) - 1
    return t, incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22; modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny, c, d = 1e-300, 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d or tiny)
    fraction = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or tiny)
            c = (1.0 + term / c) or tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def finish(run: dict, gain: float | None) -> Run:
    """A measured run with its scalars: target = start_reward + gain, iterations to it, drift there, area under the curve.

    Numbers of the series keep DIGITS significant digits: files stay small, and what is computed here equals what is computed from them.
    """
    run = {**run, **{name: [_short(value) for value in run[name]] for name in SERIES}}
    iterations, rewards = run["iteration"], run["exact_reward"]
    target = None if gain is None else run["start_reward"] + gain
    reached = None
    if target is not None:
        points = [{"iteration": i, "exact_reward": r} for i, r in zip(iterations, rewards)]
        reached = iterations_to_target(points, target)
    pairs = list(zip(iterations, rewards))
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(pairs))
    scored = [r for r in run["main_params_exact_reward"] if r is not None]
    return {
        **run,
        "target": target,
        "iterations_to_target": reached,
        "final_reward": rewards[-1],
        "main_params_reward": scored[-1] if scored else None,
        "auc": area / (iterations[-1] - iterations[0]) if iterations[-1] > iterations[0] else rewards[-1],
        "drift_at_target": None if reached is None else _drift_at(reached, iterations, run["drift_k3"]),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _drift_at(iteration: float, iterations: Sequence[int], drift: Sequence[float | None]) -> float | None:
    """Drift between two measurements: its root is interpolated linearly, as drift grows with the square of the displacement."""
    points = [(i, math.sqrt(max(d, 0.0))) for i, d in zip(iterations, drift) if d is not None]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= iteration <= x1:
            return (y0 + (y1 - y0) * (iteration - x0) / (x1 - x0)) ** 2
    return None


def summarise(runs: Sequence[Run]) -> Summary:
    """Means and standard errors over the runs of an arm."""
    return {name: statistic(runs, name) for name in Summary.__annotations__}


def statistic(runs: Sequence[Run], metric: str) -> Statistic | None:
    """Over the runs that have the metric; None if none has it. A censored iterations_to_target counts as the last iteration.

    `censored` of drift_at_target counts the runs that are left out because they never reached the target.
    """
    if metric == "iterations_to_target":
        if all(run["target"] is None for run in runs):
            return None
        values, censored = [_bounded(run) for run in runs], sum(run[metric] is None for run in runs)
    else:
        values = [run[metric] for run in runs if run[metric] is not None]
        censored = len(runs) - len(values) if metric == "drift_at_target" and runs[0]["target"] is not None else 0
    if not values:
        return None
    mean, sem = mean_and_sem(values)
    return {"mean": mean, "sem": sem, "n": len(values), "censored": censored}


def _bounded(run: Run) -> float:
    """Iterations to the target; the last iteration, a lower bound, where it was never reached."""
    reached = run["iterations_to_target"]
    return float(run["iteration"][-1]) if reached is None else reached


def compare(arm: Arm, against: Arm, metric: str) -> Comparison | None:
    """Paired over equal (base, seed); see `results.Comparison`. None where there is nothing to compare.

    iterations_to_target: a censored run enters as a bound; with censored runs on both sides there is no comparison. Other metrics:
    pairs in which either value is missing are left out and counted in `censored`.
    """
    others = {(run["base"], run["seed"]): run for run in against["runs"]}
    pairs = [(run, others[key]) for run in arm["runs"] if (key := (run["base"], run["seed"])) in others]
    bound, censored = "none", 0
    if metric == "iterations_to_target":
        if any(run["target"] is None for pair in pairs for run in pair):
            return None
        mine, theirs = (sum(pair[side][metric] is None for pair in pairs) for side in (0, 1))
        if mine and theirs:
            return None
        censored, bound = mine + theirs, "lower" if mine else "upper" if theirs else "none"
        values = [(_bounded(a), _bounded(b)) for a, b in pairs]
    else:
        values = [(a[metric], b[metric]) for a, b in pairs if a[metric] is not None and b[metric] is not None]
        censored = len(pairs) - len(values)
    if not values:
        return None
    differences = [a - b for a, b in values]
    mean, sem = mean_and_sem(differences)
    denominator = math.fsum(b for _, b in values)
    test = paired_t_test(differences) if bound == "none" else None
    return {
        "arm": arm["name"],
        "against": against["name"],
        "metric": metric,
        "ratio": math.fsum(a for a, _ in values) / denominator if denominator else None,
        "difference": mean,
        "sem": sem,
        "t": test[0] if test else None,
        "p": test[1] if test else None,
        "n": len(values),
        "censored": censored,
        "bound": bound,
    }
