"""The pictures of a comparison, drawn from metrics records. Each function returns a matplotlib Figure."""

from __future__ import annotations

from megatron_sr.study.sticking import PAPER_TABLE_1

COLOURS = {"nearest": "#c44e52", "stochastic": "#2a78b5"}
MARKERS = {"nearest": ("x", 7), "stochastic": ("o", 7)}  # both visible where they coincide


def _axes(title: str, xlabel: str, ylabel: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _series(records: list[dict], key: str) -> tuple[list, list]:
    points = [(r["iteration"], r[key]) for r in records if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def reward_curves(arms: dict[str, list[dict]], target: float):
    """Exact expected reward of the policy that generates (lines) and of its FP32 main params (marks) against the iteration."""
    figure, axes = _axes("Expected reward of the policy that generates", "iteration", "exact expected reward")
    for mode, records in arms.items():
        axes.plot(*_series(records, "exact_reward"), color=COLOURS[mode], lw=2, label=f"{mode}: rounded weights")
        marker, size = MARKERS[mode]
        axes.plot(
            *_series(records, "exact_reward_main_params"),
            marker,
            ms=size,
            color=COLOURS[mode],
            mfc="none",
            label=f"{mode}: its FP32 main params",
        )
    axes.axhline(target, color="0.4", ls=":", lw=1)
    axes.annotate(
        f"target {target:.4f}", (0, target), xytext=(2, 3), textcoords="offset points", color="0.3", fontsize=9
    )
    axes.legend(frameon=False)
    return figure


def sampled_reward(arms: dict[str, list[dict]]):
    """Mean reward of the sampled completions: what a run without an exact metric would show."""
    figure, axes = _axes("Reward of the sampled completions", "iteration", "mean sampled reward")
    for mode, records in arms.items():
        axes.plot(*_series(records, "sampled_reward"), color=COLOURS[mode], lw=1.5, label=mode)
    axes.legend(frameon=False)
    return figure


def sticking_bars(sticking: dict[str, list[float]]):
    """Percent of weights unchanged since the start after optimizer steps 1 to 4, beside the paper's Table 1."""
    figure, axes = _axes("Weight sticking: unchanged since the start", "optimizer step", "weights unchanged [%]")
    rows = [(f"{mode} (here)", COLOURS[mode], values) for mode, values in sticking.items()]
    rows += [(f"paper {name}", colour, PAPER_TABLE_1[name]) for name, colour in (("BF16", "0.45"), ("FP16", "0.75"))]
    width = 0.8 / len(rows)
    for i, (label, colour, values) in enumerate(rows):
        steps = range(1, len(values) + 1)
        axes.bar([s + (i - (len(rows) - 1) / 2) * width for s in steps], values, width, color=colour, label=label)
    axes.set_ylim(min(min(values) for _, _, values in rows) - 1.5, 101.5)
    axes.set_xticks(range(1, 5))
    axes.legend(frameon=False, ncols=4, loc="upper center", fontsize=8)
    return figure


def unchanged_curve(arms: dict[str, list[dict]]):
    """Percent of weights whose bits equal the base's, against the iteration."""
    figure, axes = _axes("Weights still equal to the base's", "iteration", "weights unchanged [%]")
    for mode, records in arms.items():
        x, y = _series(records, "unchanged")
        axes.plot(x, [100 * v for v in y], color=COLOURS[mode], lw=2, label=mode)
    axes.legend(frameon=False)
    return figure


def drift_curve(arms: dict[str, list[dict]]):
    """Drift from the base against the exact reward: what a gain in reward costs."""
    figure, axes = _axes("Drift against reward", "exact expected reward", "KL(policy || base), k3 [nats a token]")
    for mode, records in arms.items():
        # The drift of iteration i is measured on rollouts of the weights that iteration i - 1 left.
        reward = dict(zip(*_series(records, "exact_reward")))
        points = [(reward[i - 1], d) for i, d in zip(*_series(records, "drift_k3")) if i - 1 in reward]
        axes.plot([p[0] for p in points], [p[1] for p in points], ".-", color=COLOURS[mode], lw=1, label=mode)
    axes.legend(frameon=False)
    return figure


def logprob_gap(arms: dict[str, list[dict]]):
    """Mean |log p(trainer) - log p(engine)| of the sampled tokens: equal weights, different kernels."""
    figure, axes = _axes("Trainer-engine log-probability gap", "iteration", "mean |difference| [nats]")
    for mode, records in arms.items():
        axes.plot(*_series(records, "logprob_gap_mean"), color=COLOURS[mode], lw=1.5, label=mode)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure
