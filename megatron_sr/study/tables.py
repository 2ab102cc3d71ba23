"""Tables of `results.Results` as text: the same for the HTML report and for docs/reproduction.md."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_sr.study.report import Table
from megatron_sr.study.result_figures import METRIC_NAMES, REWARDS, value
from megatron_sr.study.results import Arm, Comparison, Panel, Statistic, StickingRow, Table1

DIGITS = {"iterations_to_target": 1, "final_reward": 4, "auc": 4, "main_params_reward": 4, "skipped_steps": 1}
MANY = 2  # panels of an experiment with a table each; more share one
COLUMNS = ("iterations_to_target", "final_reward", "main_params_reward", "auc", "drift_at_target", "skipped_steps")


def number(value: float, metric: str) -> str:
    """With the digits that suit the metric."""
    if metric == "drift_at_target":
        return f"{value:.2e}"
    text = f"{value:.{DIGITS[metric]}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def signed(difference: float) -> str:
    """Of rewards: "+0.0021"; "-3.1e-05" where four digits would show none."""
    return f"{difference:+.4f}" if abs(difference) >= 5e-5 or difference == 0 else f"{difference:+.1e}"


def statistic(stat: Statistic | None, metric: str) -> str:
    """ "12.4 ± 0.3", "> 23.3 ± 0.5" where runs never reached the target, "" where there is no number."""
    if stat is None:
        return ""
    text = number(stat["mean"], metric)
    if stat["sem"] is not None:
        text += f" ± {number(stat['sem'], metric)}"
    return f"> {text}" if stat["censored"] and metric == "iterations_to_target" else text


def p_value(comparison: Comparison) -> str:
    if comparison["p"] is None:
        return "bound" if comparison["bound"] != "none" else ""
    return "< 1e-6" if comparison["p"] < 1e-6 else f"{comparison['p']:.2g}"


def evidence(comparison: Comparison) -> str:
    """ "p = 0.012, 9 pairs"; "in 2 of 9 pairs the target was never reached"."""
    pairs = f"{comparison['n']} pair{'s' * (comparison['n'] != 1)}"
    if comparison["bound"] != "none":
        return f"in {comparison['censored']} of {pairs} the target was never reached"
    p = p_value(comparison)
    return f"p {p if p.startswith('<') else '= ' + p}, {pairs}" if p else pairs


def find(panel: Panel, arm: str, against: str, metric: str) -> Comparison | None:
    """The comparison, if the panel has it."""
    wanted = (arm, against, metric)
    return next((c for c in panel["comparisons"] if (c["arm"], c["against"], c["metric"]) == wanted), None)


def ratio(comparison: Comparison) -> str:
    """ "1.42 x", "at least 1.42 x"; nothing for rewards, of which gains are shown: their ratio is not that of the rewards."""
    if comparison["ratio"] is None or comparison["metric"] in REWARDS:
        return ""
    return {"lower": "at least ", "upper": "at most ", "none": ""}[comparison["bound"]] + f"{comparison['ratio']:.2f} x"


def sticking(table: Table1) -> Table:
    """Table 1 of the paper, and ours below it."""
    rows = [
        [
            _source(row),
            _format(row),
            *(_percent(row, step) for step in range(4)),
            str(row["runs"]) if row["sem"] else "",
        ]
        for row in sorted(table["rows"], key=lambda row: (row["rounding"] == "stochastic", row["format"] == "fp16"))
    ]
    return Table(
        ("where", "weights", "step 1", "step 2", "step 3", "step 4", "runs"),
        rows,
        "Weights unchanged since the start after optimizer steps 1 to 4 [%], mean ± standard error.",
        text_columns=2,
    )


def sticking_label(row: StickingRow) -> str:
    """Where a row comes from and of which weights."""
    return f"{_source(row)}, {_format(row)}:"


def _source(row: StickingRow) -> str:
    return "the paper, Table 1" if row["source"] == "paper" else row["label"]


def _format(row: StickingRow) -> str:
    return row["format"].upper() + (" stochastic" if row["rounding"] == "stochastic" else "")


def _percent(row: StickingRow, step: int) -> str:
    if step >= len(row["unchanged"]):
        return ""
    sem = f" ± {row['sem'][step]:.2f}" if row["sem"] else ""
    return f"{row['unchanged'][step]:.2f}{sem}"


def arms(panels: Sequence[Panel]) -> list[Table]:
    """A row for every arm: a table for each panel, or one for all where they are many. Columns that no arm has are left out."""
    if len(panels) > MANY:
        return [_arms(panels, "")]
    return [_arms([panel], f"{panel['label']}. ") for panel in panels]


def _arms(panels: Sequence[Panel], caption: str) -> Table:
    every = [arm for panel in panels for arm in panel["arms"]]
    shown = [metric for metric in COLUMNS if any(_worth(arm, metric) for arm in every)]
    if all(len({arm["settings"].get("lr") for arm in panel["arms"]}) == 1 for panel in panels):
        shown = [metric for metric in shown if metric != "drift_at_target"]  # of interest where learning rates compete
    where = ("where",) if len(panels) > 1 else ()
    rows = []
    for panel in panels:
        for arm in panel["arms"]:
            numbers = [statistic(value(arm, metric), metric) for metric in shown]
            rows.append([*(panel["label"] for _ in where), arm["label"], *numbers, str(len(arm["runs"]))])
    gains = sorted({panel["gain"] for panel in panels if panel["gain"] is not None})
    target = f"Target: a gain of {', '.join(f'{gain:g}' for gain in gains)}. " if gains else ""
    caption += f"{target}Gains are over the base's exact reward. Mean ± standard error; >: some runs never got there."
    return Table(
        (*where, "arm", *(METRIC_NAMES[metric] for metric in shown), "runs"), rows, caption, text_columns=1 + len(where)
    )


def _worth(arm: Arm, metric: str) -> bool:
    stat = value(arm, metric)
    return stat is not None and not (metric == "skipped_steps" and stat["mean"] == 0)


def comparisons(panels: Sequence[Panel]) -> list[Table]:
    """Paired comparisons on equal bases and seeds; tables as in `arms`."""
    panels = [panel for panel in panels if panel["comparisons"]]
    if len(panels) > MANY:
        return [_comparisons(panels, "")]
    return [_comparisons([panel], f"{panel['label']}. ") for panel in panels]


def _comparisons(panels: Sequence[Panel], caption: str) -> Table:
    where, rows = ("where",) if len(panels) > 1 else (), []
    for panel in panels:
        labels = {arm["name"]: arm["label"] for arm in panel["arms"]}
        for c in panel["comparisons"]:
            names = [
                *(panel["label"] for _ in where),
                labels[c["arm"]],
                labels[c["against"]],
                METRIC_NAMES[c["metric"]],
            ]
            rows.append([*names, ratio(c), _difference(c), p_value(c), str(c["n"])])
    header = (*where, "arm", "against", "number", "ratio", "difference", "p (paired t)", "pairs")
    caption += "Pairs have equal base and seed; p is not corrected for the number of comparisons."
    return Table(header, rows, caption, text_columns=3 + len(where))


def _difference(c: Comparison) -> str:
    rewards = c["metric"] in REWARDS
    text = signed(c["difference"]) if rewards else number(c["difference"], c["metric"])
    if c["sem"] is None:
        return text
    return (
        f"{text} ± {c['sem']:.1e}" if rewards and 0 < c["sem"] < 5e-5 else f"{text} ± {number(c['sem'], c['metric'])}"
    )
