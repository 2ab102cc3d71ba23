"""Pictures of RL jobs, drawn from their metrics records. `arms`: arm -> records of its runs, oldest first, one list for each run.

Each function takes a `drawing.Size` last and returns a matplotlib Figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_sr.study.drawing import (
    MUTED,
    Size,
    axes,
    band,
    heading,
    legend,
    looks,
    small_multiples,
)
from megatron_sr.study.statistics import mean_and_sem
from megatron_sr.study.sticking import PAPER_TABLE_1

Arms = Mapping[str, Sequence[Sequence[dict]]]


def curve(runs: Sequence[Sequence[dict]], key: str | Callable[[dict], float | None]) -> tuple[list, list, list]:
    """Iterations, mean and standard error (0 for one run) of a number, at the iterations where every run has it."""
    read = key if callable(key) else lambda record: record.get(key)
    series = [{r["iteration"]: v for r in run if (v := read(r)) is not None} for run in runs]
    common = sorted(set.intersection(*(set(s) for s in series))) if series else []
    pairs = [mean_and_sem([s[i] for s in series]) for i in common]
    return common, [mean for mean, _ in pairs], [sem or 0.0 for _, sem in pairs]


def has(arms: Arms, key: str) -> bool:
    """Whether any record has the number."""
    return any(record.get(key) is not None for runs in arms.values() for run in runs for record in run)


def _lines(ax, arms: Arms, key, scale: float = 1.0) -> None:
    style = looks(list(arms))
    for name, runs in arms.items():
        x, mean, sem = curve(runs, key)
        band(ax, x, [scale * m for m in mean], [scale * s for s in sem], style[name], name)


def _one(title: str, ylabel: str, arms: Arms, key, size: Size, scale: float = 1.0, zero: bool = False):
    figure, ax = axes(size, title, "iteration", ylabel)
    _lines(ax, arms, key, scale)
    if zero:
        ax.set_ylim(bottom=0)
    legend(figure, size, ax)
    return figure


def reward_curves(arms: Arms, target: float, size: Size):
    """Exact expected reward of the policy that generates (lines) and of its FP32 main params (hollow marks)."""
    figure, ax = axes(size, "Expected reward of the policy that generates", "iteration", "exact expected reward")
    _lines(ax, arms, "exact_reward")
    for name, look in looks(list(arms)).items():
        x, mean, _ = curve(arms[name], "exact_reward_main_params")
        size_of_mark = 9.5 if name == "nearest" else 5.5  # visible where marks coincide
        ax.plot(
            x,
            mean,
            look.marker,
            ms=size_of_mark,
            mew=1.4,
            color=look.colour,
            mfc="none",
            label=f"{name}: FP32 main params",
        )
    ax.axhline(target, color=MUTED[0], ls=":", lw=1.2)
    place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    ax.annotate(f"target {target:.4f}", (0.015, target), color=MUTED[0], fontsize=8.5, **place)
    legend(figure, size, ax)
    return figure


def sampled_reward(arms: Arms, size: Size):
    """Mean reward of the sampled completions: what a run without an exact metric would show."""
    return _one("Reward of the sampled completions", "mean sampled reward", arms, "sampled_reward", size)


def sticking_bars(sticking: Mapping[str, Sequence[float]], size: Size):
    """Percent of weights unchanged since the start after optimizer steps 1 to 4, beside the paper's Table 1."""
    figure, ax = axes(size, "Weight sticking: unchanged since the start", "optimizer step", "weights unchanged [%]")
    style = looks([*sticking, "fp16"])
    rows = [(f"{mode} (here)", style[mode].colour, 1.0, values) for mode, values in sticking.items()]
    rows += [("paper, BF16", style["nearest" if "nearest" in style else "fp16"].colour, 0.4, PAPER_TABLE_1["BF16"])]
    rows += [("paper, FP16", style["fp16"].colour, 0.4, PAPER_TABLE_1["FP16"])]
    width = 0.8 / len(rows)
    for i, (label, colour, alpha, values) in enumerate(rows):
        places = [step + (i - (len(rows) - 1) / 2) * width for step in range(1, len(values) + 1)]
        ax.bar(places, values, width * 0.94, color=colour, alpha=alpha, label=label)
    ax.set_ylim(min(min(values) for *_, values in rows) - 1.5, 100.5)
    ax.set_xticks(range(1, 5))
    ax.grid(axis="x", visible=False)
    legend(figure, size, ax, 2)
    return figure


def unchanged_curve(arms: Arms, size: Size):
    """Percent of weights whose bits equal the base's."""
    return _one("Weights still equal to the base's", "weights unchanged [%]", arms, "unchanged", size, 100.0)


def drift_curve(arms: Arms, size: Size):
    """Drift from the base against the exact reward: what a gain in reward costs."""
    figure, ax = axes(size, "Drift against reward", "exact expected reward", "KL(policy || base), k3 [nats a token]")
    for name, look in looks(list(arms)).items():
        # The drift of iteration i is measured on rollouts of the weights that iteration i - 1 left.
        reward = dict(zip(*curve(arms[name], "exact_reward")[:2]))
        points = [(reward[i - 1], d) for i, d in zip(*curve(arms[name], "drift_k3")[:2]) if i - 1 in reward]
        ax.plot([p[0] for p in points], [p[1] for p in points], look.dashes, color=look.colour, lw=1.5, label=name)
    legend(figure, size, ax)
    return figure


def logprob_gap(arms: Arms, size: Size):
    """Mean |log p(trainer) - log p(engine)| of the sampled tokens: equal weights, different kernels."""
    title = "Trainer-engine log-probability gap"
    return _one(title, "mean |difference| [nats]", arms, "logprob_gap_mean", size, zero=True)


def response_length(arms: Arms, size: Size):
    """Tokens of a completion: the mean, and between the 10th and the 90th percentile, averaged over the runs, where records have them."""
    figure, ax = axes(size, "Response length", "iteration", "tokens a completion")
    for name, look in looks(list(arms)).items():
        x, mean, _ = curve(arms[name], "completion_tokens")
        ax.plot(x, mean, look.dashes, color=look.colour, label=name)
        at, low, _ = curve(arms[name], lambda record: record.get("response_length", {}).get("p10"))
        _, high, _ = curve(arms[name], lambda record: record.get("response_length", {}).get("p90"))
        ax.fill_between(at, low, high, color=look.colour, alpha=0.14, lw=0)
    ax.set_ylim(bottom=0)
    legend(figure, size, ax)
    return figure


def syncs(arms: Arms, size: Size):
    """Time and bytes of every weight sync from trainer to engine, the read-back check included."""
    panels = [("sync_seconds", "seconds", 1.0, "Time of a sync")]
    if has(arms, "sync_bytes"):
        panels.append(("sync_bytes", "MB a rank", 1e-6, "Bytes of a sync"))
    figure, grid = small_multiples(size, len(panels), 0.85)
    heading(figure, size, "Weight syncs from trainer to engine")
    for ax, (key, unit, scale, title) in zip(grid, panels):
        _lines(ax, arms, key, scale)
        ax.set(title=title, xlabel="iteration", ylabel=unit)
        ax.set_ylim(bottom=0)
    legend(figure, size, grid[0])
    return figure
