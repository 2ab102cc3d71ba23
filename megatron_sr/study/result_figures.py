"""Pictures of `results.Results`. Each function takes a `drawing.Size` last and returns a matplotlib Figure.

Bands and bars show mean +- standard error over an arm's runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_sr.study.drawing import (
    AMBER,
    BLUE,
    INK,
    MUTED,
    RED,
    Size,
    axes,
    band,
    heading,
    is_narrow,
    legend,
    looks,
    power_of_two,
    rate,
    small_multiples,
    wrapped,
)
from megatron_sr.study.results import Arm, Experiment, Panel, Run, Statistic, Table1
from megatron_sr.study.statistics import mean_and_sem

METRIC_NAMES = {
    "iterations_to_target": "iterations to the target",
    "final_reward": "gain in exact reward at the end",
    "auc": "mean gain over the run",
    "main_params_reward": "gain of the FP32 main params",
    "drift_at_target": "drift at the target",
    "skipped_steps": "skipped steps",
}
FORMAT_COLOURS = {("bf16", "nearest"): RED[0], ("bf16", "stochastic"): BLUE[0], ("fp16", "nearest"): AMBER[0]}
FORMAT_NAMES = {("bf16", "nearest"): "BF16", ("bf16", "stochastic"): "BF16 stochastic", ("fp16", "nearest"): "FP16"}
MARKS = ("s", "^", "D", "v", "P", "X")


def mean_curve(runs: Sequence[Run], field: str, gain: bool = False) -> tuple[list[int], list[float], list[float]]:
    """Iterations, mean and standard error (0 for one run) of a series of `runs`, where all of them have it.

    gain: less each run's own start_reward, so that bases that start from different rewards can be averaged.
    """
    series = [
        {
            i: value - (run["start_reward"] if gain else 0.0)
            for i, value in zip(run["iteration"], run[field])
            if value is not None
        }
        for run in runs
    ]
    common = sorted(set.intersection(*(set(s) for s in series))) if series else []
    pairs = [mean_and_sem([s[i] for s in series]) for i in common]
    return common, [mean for mean, _ in pairs], [sem or 0.0 for _, sem in pairs]


REWARDS = ("final_reward", "auc", "main_params_reward")


def value(arm: Arm, metric: str) -> Statistic | None:
    """An arm's number as it is shown. Rewards are gains over each run's own start: bases start from different rewards, whose spread
    says nothing about the arm.
    """
    if metric not in REWARDS:
        return arm["summary"][metric]
    gains = [run[metric] - run["start_reward"] for run in arm["runs"] if run[metric] is not None]
    if not gains:
        return None
    mean, sem = mean_and_sem(gains)
    return {"mean": mean, "sem": sem, "n": len(gains), "censored": 0}


def reward_curves(panel: Panel, size: Size):
    """Gain in exact reward of the policy that generates (lines), of its FP32 main params (hollow marks), against the iteration."""
    figure, ax = axes(size, panel["label"], "iteration", "gain in exact reward")
    style = looks([arm["name"] for arm in panel["arms"]])
    for arm in panel["arms"]:
        look = style[arm["name"]]
        band(ax, *mean_curve(arm["runs"], "exact_reward", gain=True), look, arm["label"])
        x, y, _ = mean_curve(arm["runs"], "main_params_exact_reward", gain=True)
        if arm["settings"].get("format") != "fp32":
            lagging = arm["settings"].get("rounding", "nearest") == "nearest"  # visible where marks coincide
            ax.plot(x, y, look.marker, color=look.colour, mfc="none", ms=10 if lagging else 6, mew=1.4)
    if panel["gain"] is not None:
        ax.axhline(panel["gain"], color=MUTED[0], ls=":", lw=1.2)
        ax.annotate(
            f"target +{panel['gain']:g}",
            xy=(0.015, panel["gain"]),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=MUTED[0],
            fontsize=8.5,
        )
    legend(figure, size, ax)
    return figure


def scalars(panel: Panel, metric: str, size: Size):
    """One number of every arm, mean +- standard error; an arrow where the mean is only a lower bound."""
    rows = [(arm, stat) for arm in panel["arms"] if (stat := value(arm, metric)) is not None]
    height = (0.75 + 0.31 * len(rows)) / size.height * (1.25 if is_narrow(size) else 1)
    figure, ax = axes(size, panel["label"], METRIC_NAMES[metric], "", height)
    style = looks([arm["name"] for arm in panel["arms"]])
    shown = [stat["mean"] for _, stat in rows]
    low, high = min(shown), max(shown)
    room = (high - low) or high or 1.0
    for y, (arm, stat) in enumerate(reversed(rows)):
        look = style[arm["name"]]
        ax.errorbar(stat["mean"], y, xerr=stat["sem"] or 0.0, fmt=look.marker, color=look.colour, ms=7, capsize=3)
        if stat["censored"] and metric == "iterations_to_target":
            ax.annotate(
                "",
                (stat["mean"] + 0.07 * room, y),
                (stat["mean"], y),
                arrowprops={"arrowstyle": "->", "color": look.colour},
            )
    wrap = 30 if is_narrow(size) else 60
    ax.set_yticks(range(len(rows)), [wrapped(arm["label"], wrap) for arm, _ in reversed(rows)])
    ax.tick_params(axis="y", labelcolor=INK[0], length=0)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.set_xlim(max(0.0, low - 0.12 * room) if low >= 0 else None, high + 0.16 * room)
    ax.grid(axis="y", visible=False)
    return figure


def sticking(table: Table1, size: Size):
    """Percent of weights unchanged after optimizer steps 1-4: colour is the format, the mark is where the number comes from."""
    figure, ax = axes(
        size,
        f"Weights unchanged since the start, learning rate {rate(table['lr'])}",
        "optimizer step",
        "unchanged [%]",
        1.15,
    )
    labels = list(dict.fromkeys(row["label"] for row in table["rows"] if row["source"] != "paper"))
    for row in table["rows"]:
        colour, paper = FORMAT_COLOURS[row["format"], row["rounding"]], row["source"] == "paper"
        place = 0 if paper else labels.index(row["label"])
        shift = 0.0 if paper else 0.06 * (place - (len(labels) - 1) / 2)
        steps = [step + shift for step in range(1, len(row["unchanged"]) + 1)]
        look = _source_look(row["source"], place)
        ax.plot(steps, row["unchanged"], color=colour, mfc=colour if paper else "none", **look)
    ax.plot([], [], color=MUTED[0], mfc=MUTED[0], label="the paper's Table 1", **_source_look("paper", 0))
    for place, label in enumerate(labels):
        source = next(row["source"] for row in table["rows"] if row["label"] == label)
        ax.plot([], [], color=MUTED[0], mfc="none", label=label, **_source_look(source, place))
    for key, colour in FORMAT_COLOURS.items():
        ends = [row["unchanged"][-1] for row in table["rows"] if (row["format"], row["rounding"]) == key]
        if ends:
            at = (4.2, sum(ends) / len(ends))
            ax.annotate(
                FORMAT_NAMES[key].replace(" ", "\n"), at, color=colour, va="center", fontweight="bold", fontsize=9
            )
    ax.set_xticks(range(1, 5))
    ax.set_xlim(0.75, 5.15 if is_narrow(size) else 4.8)
    ax.set_ylim(top=100.2)
    legend(figure, size, ax, 1 if is_narrow(size) else 2)
    return figure


def _source_look(source: str, place: int) -> dict:
    """The paper's own numbers stand out; predictions are dotted."""
    if source == "paper":
        return {"marker": "o", "ms": 8.0, "lw": 2.6, "ls": "-", "alpha": 1.0}
    line = ":" if source == "analytic" else "--"
    return {"marker": MARKS[place % len(MARKS)], "ms": 5.5, "lw": 1.0, "ls": line, "alpha": 0.8, "mew": 1.3}


def share_below(histogram: dict, threshold_log2: float) -> float:
    """Percent of the (nonzero) weights whose magnitude is below 2**threshold_log2, which is an edge of the bins."""
    edges, counts = histogram["log2_edges"], histogram["counts"]
    below = sum(count for high, count in zip(edges[1:], counts) if high <= threshold_log2 + 1e-9)
    return 100.0 * below / sum(counts)


def magnitudes(table: Table1, size: Size):
    """Histogram of log2 |w|; the weights left of a format's threshold are those that a first Adam step moves."""
    figure, grid = small_multiples(size, len(table["histograms"]), 0.85)
    heading(
        figure, size, f"Magnitudes of the weights; below a line, a first Adam step of {rate(table['lr'])} moves them"
    )
    for ax, histogram in zip(grid, table["histograms"]):
        edges, total = histogram["log2_edges"], sum(histogram["counts"])
        shares = [100.0 * count / total for count in histogram["counts"]]
        ax.stairs(shares, edges, fill=True, color=MUTED[0], alpha=0.3)
        ax.stairs(shares, edges, color=MUTED[0], lw=1)
        ax.set(title=wrapped(histogram["label"], 30), xlabel="magnitude |w|", ylabel="weights per half binade [%]")
        top = max(shares)
        for format, name, colour, side in (("bf16", "BF16", RED[0], "right"), ("fp16", "FP16", AMBER[0], "left")):
            if format not in table["threshold_log2"]:
                continue
            at = table["threshold_log2"][format]
            inside = [share if high <= at + 1e-9 else 0.0 for share, high in zip(shares, edges[1:])]
            ax.stairs(inside, edges, fill=True, color=colour, alpha=0.4)
            ax.axvline(at, color=colour, lw=1.6)
            text = f"{name}: {share_below(histogram, at):.2f} %\nbelow {power_of_two(at)}"
            place = {
                "xytext": (-5 if side == "right" else 5, 0),
                "textcoords": "offset points",
                "ha": side,
                "va": "top",
            }
            ax.annotate(text, (at, 1.36 * top), color=colour, fontsize=8.5, **place)
        ticks = list(range(-20, 3, 4))
        ax.set_xticks(ticks, [power_of_two(t) for t in ticks])
        ax.set_xlim(-20.5, 1.0)
        ax.set_ylim(0, 1.4 * top)
    return figure


def drift_against_reward(experiment: Experiment, size: Size):
    """Drift from the base (k3) that a gain in reward costs, one field for each task."""
    figure, grid = small_multiples(size, len(experiment["panels"]))
    heading(figure, size, "Drift from the base against the gain in reward")
    for ax, panel in zip(grid, experiment["panels"]):
        style = looks([arm["name"] for arm in panel["arms"]])
        for arm in panel["arms"]:
            x, reward, _ = mean_curve(arm["runs"], "exact_reward", gain=True)
            at, drift, _ = mean_curve(arm["runs"], "drift_k3")
            reward_at, look = dict(zip(x, reward)), style[arm["name"]]
            points = [(reward_at[i], d) for i, d in zip(at, drift) if i in reward_at]
            ax.plot(
                [p[0] for p in points],
                [p[1] for p in points],
                look.dashes,
                color=look.colour,
                lw=1.8,
                label=arm["label"],
            )
        ax.set(title=wrapped(panel["label"], 30), xlabel="gain in exact reward", ylabel="drift, k3 [nats a token]")
        ax.ticklabel_format(axis="y", scilimits=(-3, 3), useMathText=False)
        if panel["gain"] is not None:
            ax.axvline(panel["gain"], color=MUTED[0], ls=":", lw=1.2)
    legend(figure, size, grid[0], 1 if is_narrow(size) else 2)
    return figure


def learning_rates(experiment: Experiment, size: Size):
    """Iterations to the target against the learning rate: a line for every arm, a point for every panel."""
    figure, ax = axes(size, "Iterations to the target at each learning rate", "learning rate", "iterations")
    names = list(dict.fromkeys(arm["name"] for panel in experiment["panels"] for arm in panel["arms"]))
    for name in names:
        points = [
            (arm["settings"]["lr"], arm)
            for panel in experiment["panels"]
            for arm in panel["arms"]
            if arm["name"] == name
        ]
        _points(ax, [p[0] for p in points], [p[1] for p in points], "iterations_to_target", looks(names)[name])
    rates = sorted({arm["settings"]["lr"] for panel in experiment["panels"] for arm in panel["arms"]})
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(rates, [rate(lr) for lr in rates])
    ax.minorticks_off()
    _plain_ticks(
        ax, [arm["summary"]["iterations_to_target"] for panel in experiment["panels"] for arm in panel["arms"]]
    )
    legend(figure, size, ax)
    return figure


def _plain_ticks(ax, statistics: Sequence[Statistic | None]) -> None:
    means = [s["mean"] for s in statistics if s is not None and s["mean"] > 0]
    if not means:
        return
    low, high = math.floor(math.log2(min(means))), math.ceil(math.log2(max(means)))
    ticks = [2.0**e for e in range(low, high + 1)]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])


def _points(ax, x: list, arms: list[Arm], metric: str, look, label: str | None = None) -> None:
    """Mean +- standard error of `metric` of `arms` at `x`, as a line with marks."""
    known = [(at, stat, arm) for at, arm in zip(x, arms) if (stat := value(arm, metric)) is not None]
    if known:
        ax.errorbar(
            [at for at, _, _ in known], [stat["mean"] for _, stat, _ in known], yerr=[stat["sem"] or 0.0 for _, stat, _ in known],
            fmt=look.marker + look.dashes, color=look.colour, ms=6, capsize=3, label=label or known[0][2]["label"],
        )  # fmt: skip


def staleness(experiment: Experiment, size: Size):
    """Gain in exact reward at the end against the age of the rollouts' weights, one field for each format."""
    figure, grid = small_multiples(size, len(experiment["panels"]), 0.85)
    heading(figure, size, "Reward at the end, by the age of the weights that made the rollouts")
    for ax, panel in zip(grid, experiment["panels"]):
        for rounding in ("nearest", "stochastic"):
            arms = [arm for arm in panel["arms"] if arm["settings"]["rounding"] == rounding]
            look = looks([rounding])[rounding]
            ages = [arm["settings"].get("staleness", 0) for arm in arms]
            _points(ax, ages, arms, "final_reward", look, rounding)
        ax.set(
            title=wrapped(panel["label"], 30),
            xlabel="age of the rollouts' weights [iterations]",
            ylabel="gain in exact reward",
        )
        ax.set_xticks(sorted({arm["settings"].get("staleness", 0) for arm in panel["arms"]}))
        ax.set_ylim(bottom=0)
    legend(figure, size, grid[0])
    return figure


def mantissa(panel: Panel, metric: str, size: Size):
    """One number of the nearest arms against their mantissa bits, beside the arms without that axis as lines across."""
    figure, ax = axes(size, panel["label"], "mantissa bits (nearest rounding)", METRIC_NAMES[metric])
    nearest = {mantissa_bits(arm): arm for arm in panel["arms"] if mantissa_bits(arm) is not None}
    bits = sorted(nearest)
    _points(ax, bits, [nearest[b] for b in bits], metric, looks(["nearest"])["nearest"], "nearest, 8 exponent bits")
    style = looks([arm["name"] for arm in panel["arms"]])
    for arm in panel["arms"]:
        stat, look = value(arm, metric), style[arm["name"]]
        if mantissa_bits(arm) is None and stat is not None:
            ax.axhline(stat["mean"], ls=look.dashes, color=look.colour, lw=1.6, label=arm["label"])
    ax.set_xticks(bits)
    legend(figure, size, ax, 1 if is_narrow(size) else 2)
    return figure


def mantissa_bits(arm: Arm) -> int | None:
    """Of an arm that rounds to nearest with BF16's exponent; else None."""
    format, rounding = arm["settings"].get("format", "bf16"), arm["settings"].get("rounding", "nearest")
    if rounding != "nearest" or arm["settings"].get("scheme", "once") != "once":
        return None
    return 7 if format == "bf16" else int(format[3:]) if format.startswith("e8m") else None
