"""Pictures of results.json with their captions and descriptions: what to see, how to read it, what not to read into it."""

from __future__ import annotations

from functools import partial

from megatron_sr.study import result_figures, tables
from megatron_sr.study.report import Picture
from megatron_sr.study.result_figures import value
from megatron_sr.study.results import Experiment, Panel, Table1
from megatron_sr.study.tables import statistic


def table1(table: Table1) -> list[Picture]:
    """Sticking over the steps, and the magnitudes that explain it."""
    pictures = []
    if table["rows"]:
        values = "; ".join(
            f"{tables.sticking_label(r)} {', '.join(f'{v:.2f}' for v in r['unchanged'])}" for r in table["rows"]
        )
        pictures.append(
            Picture(
                "sticking",
                partial(result_figures.sticking, table),
                "Filled circles and thick lines: the paper's Table 1. Hollow marks: measured here; dotted: predicted from the magnitudes "
                "of the weights and Adam's displacements alone.",
                f"Line chart of the percentage of unchanged weights after steps 1 to 4: {values}.",
            )
        )
    if table["histograms"]:
        shares = [
            f"{h['label']}: {result_figures.share_below(h, at):.2f} % below {format.upper()}'s"
            for h in table["histograms"]
            for format, at in table["threshold_log2"].items()
        ]
        pictures.append(
            Picture(
                "magnitudes",
                partial(result_figures.magnitudes, table),
                "Adam's first step has the size of the learning rate, whatever the gradient. It moves a weight only if it exceeds half a "
                "spacing, which is so left of the line. That share is what moves at step 1 in the table. Zeros are left out.",
                f"Histograms of the magnitudes of the weights, and the shares below the thresholds. {'; '.join(shares)}.",
            )
        )
    return pictures


def ends(panel: Panel) -> str:
    """For alt texts: where every arm ends."""
    return "; ".join(f"{arm['label']} {statistic(value(arm, 'final_reward'), 'final_reward')}" for arm in panel["arms"])


def _values(panel: Panel, metric: str) -> str:
    known = [(arm["label"], statistic(value(arm, metric), metric)) for arm in panel["arms"]]
    return "; ".join(f"{label} {text}" for label, text in known if text)


def rewards(panel: Panel, name: str, explain: bool = False) -> Picture:
    """Reward curves; explain: with all that a first-time reader must know."""
    runs = len(panel["arms"][0]["runs"])
    spread = f"mean and standard error over {runs} runs" if runs > 1 else "one run of each arm"
    caption = (
        f"Gain of the policy that generates over the base: {spread}. Hollow marks: the FP32 main params behind it."
    )
    if explain:
        caption += (
            " Where marks lie above their line, a run has learned more than its rounded weights show: readout lag."
        )
    return Picture(
        name,
        partial(result_figures.reward_curves, panel),
        caption,
        f"Line chart of the gain in exact reward over {panel['iterations']} iterations. Gain at the end: {ends(panel)}.",
    )


def _bars(panel: Panel, name: str) -> Picture:
    metric = "auc" if panel["gain"] is None else "iterations_to_target"
    what = result_figures.METRIC_NAMES[metric]
    bound = any(stat["censored"] for arm in panel["arms"] if metric != "auc" and (stat := value(arm, metric)))
    arrow = " An arrow: a lower bound, as some runs never reached it." if bound else ""
    return Picture(
        name,
        partial(result_figures.scalars, panel, metric),
        f"{what[0].upper()}{what[1:]}, mean and standard error; {'fewer' if metric != 'auc' else 'more'} is better.{arrow}",
        f"Dot chart of {what}: {_values(panel, metric)}.",
    )


def panels(experiment: Experiment) -> list[Picture]:
    pictures = []
    for panel in experiment["panels"]:
        pictures += [
            rewards(panel, f"{panel['name']}-reward", panel["name"] == "convergence"),
            _bars(panel, f"{panel['name']}-numbers"),
        ]
    return pictures


def formats(experiment: Experiment) -> list[Picture]:
    pictures = []
    for panel in experiment["panels"]:
        metric = "iterations_to_target" if panel["name"] == "mantissa-1e-6" else "auc"
        pictures.append(rewards(panel, f"{panel['name']}-reward"))
        pictures.append(
            Picture(
                f"{panel['name']}-bits",
                partial(result_figures.mantissa, panel, metric),
                "Rounding to nearest with BF16's exponent and more or fewer mantissa bits; lines across: the arms without that axis.",
                f"Line chart of {result_figures.METRIC_NAMES[metric]} against mantissa bits: {_values(panel, metric)}.",
            )
        )
    return pictures


def learning_rate(experiment: Experiment) -> list[Picture]:
    if len(experiment["panels"]) == 1:
        return panels(experiment)
    text = "; ".join(f"{panel['label']}: {_values(panel, 'iterations_to_target')}" for panel in experiment["panels"])
    return [
        Picture(
            "learning-rate",
            partial(result_figures.learning_rates, experiment),
            "Both axes are logarithmic: parallel lines mean the same factor at every learning rate. Points can be lower bounds, see the "
            "tables.",
            f"Line chart of iterations to the target at each learning rate. {text}.",
        )
    ]


def drift(experiment: Experiment) -> list[Picture]:
    text = "; ".join(f"{panel['label']}: {_values(panel, 'drift_at_target')}" for panel in experiment["panels"])
    return [
        Picture(
            "drift",
            partial(result_figures.drift_against_reward, experiment),
            "Mean over the runs. Where the lines fall together, drift is a function of reward, whatever learning rate and rounding. "
            "The dotted line is the target at which the table compares.",
            f"Line charts of drift against the gain in reward, one for each task. Drift at the target: {text}.",
        )
    ]


def staleness(experiment: Experiment) -> list[Picture]:
    text = "; ".join(f"{panel['label']}: {_values(panel, 'final_reward')}" for panel in experiment["panels"])
    return [
        Picture(
            "staleness",
            partial(result_figures.staleness, experiment),
            "Gain over the base at the last iteration. Rollouts of age k come from the weights k iterations ago.",
            f"Line charts of the gain in exact reward against the age of the rollouts' weights. Gain at the end: {text}.",
        )
    ]
