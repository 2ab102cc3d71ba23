"""One sentence for each finding, made from the numbers of the runs at hand: what holds, and what does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_sr.study.results import Arm, Comparison, Panel

SIGNIFICANT = 0.05
ITERATION_PAIRS = (
    ("bf16-nearest", "fp16"),
    ("bf16-nearest", "fp16-settled"),
    ("bf16-stochastic", "fp16"),
    ("bf16-stochastic", "fp16-settled"),
    ("bf16-nearest", "bf16-stochastic"),
)


def notes(experiment: str, panels: Sequence[Panel]) -> list[str]:
    """The findings of an experiment; [] without panels."""
    write = {
        "convergence": _convergence,
        "headline": _convergence,
        "formats": _formats,
        "learning-rate": _learning_rate,
        "variants": _variants,
        "drift": _drift,
        "staleness": _staleness,
    }[experiment]
    return write(panels) if panels else []


def _arm(panel: Panel, name: str) -> Arm | None:
    return next((arm for arm in panel["arms"] if arm["name"] == name), None)


def _find(panel: Panel, arm: str, against: str, metric: str) -> Comparison | None:
    return next(
        (c for c in panel["comparisons"] if (c["arm"], c["against"], c["metric"]) == (arm, against, metric)), None
    )


def p_text(comparison: Comparison) -> str:
    """ "p = 0.012, 9 pairs", "bound, 2 of 9 censored" or "9 pairs"."""
    pairs = f"{comparison['n']} pair{'s' * (comparison['n'] != 1)}"
    if comparison["bound"] != "none":
        side = "first" if comparison["bound"] == "lower" else "second"
        return f"a bound: of {pairs} the {side} never reached the target in {comparison['censored']}"
    if comparison["p"] is None:
        return pairs
    return f"p {'< 1e-6' if comparison['p'] < 1e-6 else f'= {comparison["p"]:.2g}'}, {pairs}"


def _times(comparison: Comparison) -> str:
    least = {"lower": "at least ", "upper": "at most ", "none": ""}[comparison["bound"]]
    return f"{least}{comparison['ratio']:.2f} x"


def _convergence(panels: Sequence[Panel]) -> list[str]:
    [panel] = panels
    found = []
    for arm, against in ITERATION_PAIRS:
        c = _find(panel, arm, against, "iterations_to_target")
        if c:
            labels = _arm(panel, arm)["label"], _arm(panel, against)["label"]
            found.append(f"{labels[0]} needs {_times(c)} the iterations of {labels[1]} ({p_text(c)}).")
    lag = _find(panel, "bf16-nearest", "bf16-stochastic", "main_params_reward")
    gap = _find(panel, "bf16-nearest", "bf16-stochastic", "final_reward")
    if lag and gap:
        found.append(
            f"Readout lag: the rounded weights of the nearest runs end {-gap['difference']:.4f} below stochastic's, their FP32 main "
            f"params {_below(lag['difference'])}. What nearest rounding loses here is in the copy that generates and is deployed."
        )
    fp16 = _arm(panel, "fp16")
    if fp16:
        skipped = fp16["summary"]["skipped_steps"]["mean"]
        found.append(f"FP16 skipped {skipped:.1f} optimizer steps a run while its loss scale came down.")
    return found


def _below(difference: float) -> str:
    return f"{abs(difference):.4f} {'below' if difference < 0 else 'above'}"


def _formats(panels: Sequence[Panel]) -> list[str]:
    found = []
    for panel in panels:
        metric = "iterations_to_target" if panel["name"] == "mantissa-1e-6" else "auc"
        names = [
            name
            for name in ("e8m4", "e8m5", "e8m6", "e8m7", "bf16-nearest", "e8m8", "e8m9", "e8m10")
            if _arm(panel, name)
        ]
        values = [(_arm(panel, name)["label"], _arm(panel, name)["summary"][metric]["mean"]) for name in names]
        better = [
            b <= a if metric == "iterations_to_target" else b >= a for (_, a), (_, b) in itertools.pairwise(values)
        ]
        listed = ", ".join(
            f"{label} {value:.{1 if metric == 'iterations_to_target' else 4}f}" for label, value in values
        )
        words = "every mantissa bit helps" if all(better) else "the order is not monotone"
        found.append(
            f"{panel['label']}: {words} ({'iterations' if metric == 'iterations_to_target' else 'mean reward'}: {listed})."
        )
    return found


def _learning_rate(panels: Sequence[Panel]) -> list[str]:
    found = []
    for panel in panels:
        nearest = _find(panel, "bf16-nearest", "fp16-settled", "iterations_to_target")
        stochastic = _find(panel, "bf16-stochastic", "fp16-settled", "iterations_to_target")
        if nearest and stochastic:
            found.append(
                f"{panel['label']}: nearest needs {_times(nearest)} FP16's iterations ({p_text(nearest)}), "
                f"stochastic {_times(stochastic)} ({p_text(stochastic)})."
            )
    return found


def _variants(panels: Sequence[Panel]) -> list[str]:
    found = []
    for panel in panels:
        # Over the run, not at its end: one draw's noise must not decide
        recommended, metric = "once" if _arm(panel, "once") else "bf16-stochastic", "auc"
        for c in panel["comparisons"]:
            if c["against"] == recommended and c["metric"] == metric and c["arm"] not in ("bf16-nearest", "fp32"):
                better = "no different from" if _same(c) else "better than" if c["difference"] > 0 else "worse than"
                found.append(
                    f"{_arm(panel, c['arm'])['label']}: {better} the recommended scheme "
                    f"(mean reward over the run {c['difference']:+.4f}, {p_text(c)})."
                )
    return found


def _same(comparison: Comparison) -> bool:
    return comparison["p"] is None or comparison["p"] > SIGNIFICANT


def _drift(panels: Sequence[Panel]) -> list[str]:
    found, costly = [], []
    for panel in panels:
        c = _find(panel, "bf16-nearest-8e-6", "bf16-stochastic", "drift_at_target")
        fp32 = _find(panel, "bf16-nearest-8e-6", "fp32", "drift_at_target")
        if not c or not fp32:
            found.append(f"{panel['label']}: the target was not reached by enough runs to compare.")
            continue
        if c["difference"] > 0 and not _same(c):
            costly.append(panel["label"])
        found.append(
            f"{panel['label']}: nearest at 8e-6 has {c['ratio']:.2f} x the drift of stochastic at 1e-6 at equal reward ({p_text(c)}), "
            f"and {fp32['ratio']:.2f} x that of FP32 at 1e-6 ({p_text(fp32)})."
        )
    words = f"it does on {len(costly)} ({'; '.join(costly)})" if costly else "it does on none"
    return [f"Of {len(panels)} tasks on which a higher learning rate could cost drift, {words}.", *found]


def _staleness(panels: Sequence[Panel]) -> list[str]:
    found = []
    for panel in panels:
        for c in panel["comparisons"]:
            if c["metric"] == "final_reward" and c["arm"].startswith("nearest"):
                age = c["arm"].rsplit("-", 1)[1]
                found.append(
                    f"{panel['label']}, {age} old: nearest ends {_below(c['difference'])} stochastic in exact reward ({p_text(c)})."
                )
    return found
