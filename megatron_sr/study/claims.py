"""The paper's claims beside what the runs at hand show, each judged by a rule that is written here and shown to the reader.

Of the paper's numbers only Table 1 is used; its other claims are compared in words.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from megatron_sr.study import verdict as headline
from megatron_sr.study.findings import SIGNIFICANT
from megatron_sr.study.report import Table
from megatron_sr.study.result_figures import mantissa_bits, value
from megatron_sr.study.results import Comparison, Panel, Results, StickingRow
from megatron_sr.study.sticking import PAPER_TABLE_1
from megatron_sr.study.tables import evidence, find, ratio, signed, statistic

Verdict = Literal["holds", "partly", "does not show", "not run"]


@dataclass(frozen=True)
class Claim:
    """paper: what it says; here: what the runs show; rule: when the verdict is "holds"; meaning: what follows from this verdict."""

    paper: str
    here: str
    verdict: Verdict
    rule: str
    meaning: str


def claims(results: Results) -> list[Claim]:
    """All claims, in reading order; what was not run says so."""
    judge = (
        _bf16_sticks, _fp16_sticks_less, _nearest_lags, _stochastic_keeps_up, _through_megatron, _mantissa, _learning_rate, _fresh,
        _rollout_only, _drift, _staleness, _readout_lag,
    )  # fmt: skip
    return [claim(results) for claim in judge]


def table(results: Results) -> Table:
    """The claims, for people."""
    rows = [[c.paper, c.here, c.verdict, c.rule, c.meaning] for c in claims(results)]
    header = ("the paper", "this run", "verdict", "holds if", "what it means")
    return Table(header, rows, stacked=True)


def _panel(results: Results, experiment: str, name: str | None = None) -> Panel | None:
    panels = results["experiments"].get(experiment, {"panels": []})["panels"]
    return next((p for p in panels if name in (None, p["name"])), None)


def _rows(results: Results, format: str) -> list[StickingRow]:
    table = results["table1"] or {"rows": []}
    measured = [r for r in table["rows"] if r["source"] not in ("paper", "analytic") and len(r["unchanged"]) == 4]
    return [r for r in measured if (r["format"], r["rounding"]) == (format, "nearest")]


def _judged(good: list[bool]) -> Verdict:
    return "not run" if not good else "holds" if all(good) else "partly" if any(good) else "does not show"


def _claim(paper: str, here: str, good: list[bool], rule: str, holds: str, otherwise: str) -> Claim:
    """good: whether each comparison that was run is as the paper says."""
    verdict = _judged(good)
    return Claim(paper, here, verdict, rule, {"holds": holds, "not run": ""}.get(verdict, otherwise))


def _significant(comparison: Comparison) -> bool:
    return comparison["p"] is not None and comparison["p"] < SIGNIFICANT


def _listed(values) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


NOT_RUN = "not run"


def _bf16_sticks(results: Results) -> Claim:
    rows = _rows(results, "bf16")
    here = "; ".join(f"{row['label']}: {_listed(row['unchanged'])} %" for row in rows)
    return _claim(
        f"Table 1, BF16: after optimizer steps 1 to 4, {_listed(PAPER_TABLE_1['BF16'])} % of the weights are where they were",
        here or NOT_RUN,
        [abs(a - b) <= 1.0 for row in rows for a, b in zip(row["unchanged"], PAPER_TABLE_1["BF16"])],
        "every number is within 1 point of the paper's",
        "At learning rates near 1e-6 almost no BF16 weight moves: an update is far below half a spacing.",
        "These weights stick more or less than the paper's: their magnitudes decide.",
    )


def _fp16_sticks_less(results: Results) -> Claim:
    pairs = [(f, b) for f in _rows(results, "fp16") for b in _rows(results, "bf16") if f["label"] == b["label"]]
    times = [
        (f["label"], (100 - f["unchanged"][0]) / (100 - b["unchanged"][0]), f["unchanged"])
        for f, b in pairs
        if b["unchanged"][0] < 100
    ]
    paper = (100 - PAPER_TABLE_1["FP16"][0]) / (100 - PAPER_TABLE_1["BF16"][0])
    here = "; ".join(f"{label}: {_listed(unchanged)} %, {factor:.1f} x" for label, factor, unchanged in times)
    return _claim(
        f"Table 1, FP16: {_listed(PAPER_TABLE_1['FP16'])} %; at step 1 it moves {paper:.1f} x as many weights as BF16",
        here or NOT_RUN,
        [6.0 <= factor <= 10.0 for _, factor, _ in times],
        "FP16 moves 6 to 10 x as many at step 1",
        "FP16 has three mantissa bits more, so weights up to 8 x as large still move.",
        "The factor of 8 expected from three mantissa bits more is not what these weights give.",
    )


def _ratios(panel: Panel | None, arm: str, against: tuple[str, ...]) -> list[Comparison]:
    found = [] if panel is None else [find(panel, arm, other, "iterations_to_target") for other in against]
    return [c for c in found if c is not None]


def _versus(panel: Panel, found: list[Comparison]) -> str:
    labels = {arm["name"]: arm["label"] for arm in panel["arms"]}
    return "; ".join(f"{ratio(c)} the iterations of {labels[c['against']]} ({evidence(c)})" for c in found)


def _nearest_lags(results: Results) -> Claim:
    panel = _panel(results, "convergence")
    found = _ratios(panel, "bf16-nearest", ("fp16", "fp16-settled"))
    return _claim(
        "BF16 rounded to nearest converges slower than FP16",
        _versus(panel, found) if found else NOT_RUN,
        [c["ratio"] >= headline.LAGS and c["bound"] != "upper" for c in found],
        f"it needs at least {headline.LAGS:g} x the iterations",
        "The gap that stochastic rounding is meant to close is there.",
        "The gap that stochastic rounding is meant to close is smaller here than the headline asks for.",
    )


def _stochastic_keeps_up(results: Results) -> Claim:
    panel = _panel(results, "convergence")
    found = _ratios(panel, "bf16-stochastic", ("fp16", "fp16-settled"))
    return _claim(
        "BF16 rounded stochastically converges as fast as FP16",
        _versus(panel, found) if found else NOT_RUN,
        [c["ratio"] <= headline.KEEPS_UP and c["bound"] != "lower" for c in found],
        f"it needs at most {headline.KEEPS_UP:g} x the iterations",
        "BF16 keeps its range, needs no loss scale, and loses nothing to FP16.",
        "Here stochastic rounding does not close the whole gap.",
    )


def _through_megatron(results: Results) -> Claim:
    panel = _panel(results, "headline")
    found = _ratios(panel, "bf16-nearest", ("bf16-stochastic",))
    if panel is not None and not found:  # the reverse comparison says the same
        found = _ratios(panel, "bf16-stochastic", ("bf16-nearest",))
    good = [
        c["ratio"] >= headline.LAGS if c["arm"] == "bf16-nearest" else c["ratio"] <= 1 / headline.LAGS for c in found
    ]
    return _claim(
        "(our question) The gap is there in Megatron-Core and vLLM too, not only in the miniature",
        f"nearest: {_versus(panel, found)}" if found else NOT_RUN,
        good,
        f"nearest needs at least {headline.LAGS:g} x the iterations of stochastic",
        "The miniature's effect survives Megatron-Core's optimizer, BF16 compute and vLLM's kernels.",
        "The miniature's effect does not survive the real trainer and engine at this size.",
    )


def _mantissa(results: Results) -> Claim:
    here, good = [], []
    for name, metric, sign in (("mantissa-1e-6", "iterations_to_target", -1), ("mantissa-1e-5", "auc", 1)):
        panel = _panel(results, "formats", name)
        if panel is None:
            continue
        arms = sorted((bits, arm) for arm in panel["arms"] if (bits := mantissa_bits(arm)) is not None)
        values = [(bits, value(arm, metric)) for bits, arm in arms]
        good += [sign * (b["mean"] - a["mean"]) > 0 for (_, a), (_, b) in itertools.pairwise(values)]
        unit = "iterations" if metric == "iterations_to_target" else "mean gain"
        here.append(f"{unit} with {', '.join(f'{bits} bits {statistic(stat, metric)}' for bits, stat in values)}")
    return _claim(
        "More mantissa bits, faster convergence",
        "; ".join(here) or NOT_RUN,
        good,
        "every bit more is faster, in the mean",
        "What slows BF16 down is its precision and nothing else about the format.",
        "At some number of bits another one made no difference that these runs can show.",
    )


def _learning_rate(results: Results) -> Claim:
    panels = results["experiments"].get("learning-rate", {"panels": []})["panels"]
    found = [(panel, c) for panel in panels for c in _ratios(panel, "bf16-nearest", ("fp16-settled",))]
    return _claim(
        "FP16 is ahead of BF16 at every learning rate",
        "; ".join(f"{panel['label'].lower()}: {ratio(c)} ({evidence(c)})" for panel, c in found) or NOT_RUN,
        [c["ratio"] > 1 and (c["bound"] == "lower" or _significant(c)) for _, c in found],
        f"nearest needs more iterations at each that was run, p < {SIGNIFICANT}",
        "A higher learning rate shortens the lag but does not remove it.",
        "At some learning rate the difference is too small for these runs.",
    )


def _fresh(results: Results) -> Claim:
    panel = _panel(results, "variants", "variants")
    found = _ratios(panel, "fresh", ("bf16-stochastic",))
    return _claim(
        "New noise for every forward pass does as well as one draw a step",
        _versus(panel, found) if found else NOT_RUN,
        [abs(c["ratio"] - 1) <= 0.05 for c in found],
        "the iterations differ by at most 5 %",
        "One draw a step is enough, and only with it can trainer and rollouts hold the same bits.",
        "When the noise is drawn matters here.",
    )


def _rollout_only(results: Results) -> Claim:
    low, bf16 = _panel(results, "variants", "variants-e8m2"), _panel(results, "variants", "variants")
    here, good = [], []
    for panel, against, metric, name in (
        (low, "once", "auc", "E8M2, mean gain"),
        (bf16, "bf16-stochastic", "final_reward", "BF16, reward at the end"),
    ):
        c = find(panel, "rollout-only", against, metric) if panel is not None else None
        if c is not None:
            here.append(f"{name}: {signed(c['difference'])} ({evidence(c)})")
            good.append(c["difference"] < 0 and _significant(c))
    return _claim(
        "Stochastic rounding of the rollouts alone is not enough",
        "; ".join(here) or NOT_RUN,
        good,
        f"it ends below rounding both, p < {SIGNIFICANT}",
        "The trainer's forward pass must use the rounded weights too.",
        "Whether the trainer's forward pass must use the rounded weights too shows here, if at all, only at very low precision.",
    )


def _drift(results: Results) -> Claim:
    panels = results["experiments"].get("drift", {"panels": []})["panels"]
    here, good = [], []
    for panel in panels:
        raised = [
            c
            for c in panel["comparisons"]
            if c["metric"] == "drift_at_target"
            and c["against"] == "bf16-stochastic"
            and c["arm"].startswith("bf16-nearest")
        ]
        if raised:
            most = raised[-1]
            here.append(f"{panel['label']}: {ratio(most)} ({evidence(most)})")
            good.append(most["difference"] > 0 and _significant(most))
    return _claim(
        "Raising the learning rate instead costs drift from the base",
        "; ".join(here) or NOT_RUN,
        good,
        f"nearest at the highest rate drifts further than stochastic at 1e-6, at equal reward, on every task, p < {SIGNIFICANT}",
        "A higher learning rate is no substitute for stochastic rounding.",
        "On these tasks drift is nearly a function of reward, so that this cost of a higher learning rate does not show.",
    )


def _staleness(results: Results) -> Claim:
    panels = results["experiments"].get("staleness", {"panels": []})["panels"]
    here, good = [], []
    for panel in panels:
        found = [c for c in panel["comparisons"] if c["metric"] == "final_reward" and c["arm"].startswith("nearest")]
        if found:
            low, high = min(c["difference"] for c in found), max(c["difference"] for c in found)
            ages = f"{len(found)} age{'s' * (len(found) != 1)} of the rollouts' weights"
            here.append(
                f"{panel['label']}: nearest ends {signed(low)} to {signed(high)} against stochastic, over {ages}"
            )
            good += [c["difference"] < 0 and _significant(c) for c in found]
    return _claim(
        "Stochastic rounding helps in an asynchronous loop and in MXFP8 too (preliminary there)",
        "; ".join(here) or NOT_RUN,
        good,
        f"nearest ends below stochastic at every age and format that was run, p < {SIGNIFICANT}",
        "The advantage does not depend on rollouts that are in step with the trainer.",
        "At some age or format these runs cannot tell the two apart.",
    )


def _readout_lag(results: Results) -> Claim:
    panel = _panel(results, "convergence") or _panel(results, "headline")
    lag = find(panel, "bf16-nearest", "bf16-stochastic", "main_params_reward") if panel is not None else None
    gap = find(panel, "bf16-nearest", "bf16-stochastic", "final_reward") if panel is not None else None
    here, good = NOT_RUN, []
    if lag is not None and gap is not None:
        here = (
            f"nearest against stochastic at the end: rounded weights {signed(gap['difference'])}, "
            f"FP32 main params {signed(lag['difference'])} ({evidence(lag)})"
        )
        good = [lag["difference"] < 0.5 * gap["difference"]]
    return _claim(
        "(our question) Sticking harms learning itself, not only the weights that are read out",
        here,
        good,
        "the FP32 main params of the nearest runs lag by at least half as much as their rounded weights",
        "Nearest rounding harms the FP32 main params too.",
        "Readout lag: nearest rounding loses in the copy that generates and is deployed, while the FP32 main params behind it learn almost "
        "as well. Once their updates add up to half a spacing, the copy catches up.",
    )
