"""From runs to the parts of results.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_sr.study import findings, statistics, table1
from megatron_sr.study.experiments import FP16_SETTLED, ArmPlan, ExperimentPlan, PanelPlan, table1_runs
from megatron_sr.study.miniature import bases
from megatron_sr.study.miniature.settings import RunSettings
from megatron_sr.study.results import Arm, Comparison, Experiment, Panel, Run, StickingRow, Table1

Progress = Callable[[int, int], None]
Runs = Callable[[Sequence[RunSettings]], list[dict]]
TABLE1_LR = 1e-6


def experiment(plan: ExperimentPlan, run: Runs) -> Experiment:
    """Make all runs of a plan, `run(settings) -> raw runs in order`, and put the experiment together."""
    wanted = [settings for p in plan.panels for _, settings in p.runs()]
    made = iter(run(wanted))
    panels = [make_panel(p, [(arm, settings, next(made)) for arm, settings in p.runs()]) for p in plan.panels]
    return {
        "title": plan.title,
        "question": plan.question,
        "panels": panels,
        "notes": findings.notes(plan.name, panels),
        "left_out": plan.left_out,
    }


def make_panel(plan: PanelPlan, runs: Iterable[tuple[ArmPlan, RunSettings, dict]]) -> Panel:
    """The arms of a panel from their runs, in the order of `plan.runs()`."""
    by_arm: dict[str, list[Run]] = {arm.name: [] for arm in plan.arms}
    settings_of: dict[str, dict] = {}
    for arm, settings, raw in runs:
        by_arm[arm.name].append(statistics.finish(raw, plan.gain))
        shared = {key: value for key, value in settings.to_dict().items() if key not in ("base", "seed")}
        settings_of[arm.name] = {"task": settings.task.name, **shared}
    arms = [make_arm(arm, settings_of[arm.name], by_arm[arm.name]) for arm in plan.arms]
    return {
        "name": plan.name,
        "label": plan.label,
        "gain": plan.gain,
        "iterations": plan.iterations,
        "arms": arms,
        "comparisons": comparisons(arms, plan.comparisons),
    }


def make_arm(plan: ArmPlan, settings: dict, runs: list[Run]) -> Arm:
    return {
        "name": plan.name,
        "label": plan.label,
        "settings": settings,
        "runs": runs,
        "summary": statistics.summarise(runs),
    }


def comparisons(arms: Sequence[Arm], wanted: Iterable[tuple[str, str, str]]) -> list[Comparison]:
    """Those of `wanted` (arm, against, metric) that the runs allow."""
    named = {arm["name"]: arm for arm in arms}
    made = [statistics.compare(named[arm], named[against], metric) for arm, against, metric in wanted]
    return [comparison for comparison in made if comparison is not None]


def table_1(run: Runs) -> Table1:
    """The paper's rows, the miniature's, real weights where they are installed, and the prediction for both."""
    wanted = table1_runs()
    measured: dict[tuple, dict] = {}
    for settings, raw in zip(wanted, run(wanted)):
        arm = (settings.format, settings.rounding)
        measured.setdefault((settings.base, settings.seed), {})[arm] = raw["unchanged_after_steps"][: table1.STEPS]
    rows = [
        *table1.paper_rows(),
        *table1.rows("miniature", "miniature, RL gradients", list(measured.values())),
        *table1.rows("analytic", "prediction for the miniature", [_predict(name) for name in _addition_bases()]),
    ]
    weights = _all_weights()
    histograms = [table1.histogram("miniature", f"miniature, {len(_addition_bases())} bases", weights)]
    notes = [
        f"FP16 rows of the miniature start with a loss scale of {FP16_SETTLED.settings['initial_loss_scale']:.0f}, so that no step "
        "is skipped; steps are optimizer steps that were taken."
    ]
    try:
        real = table1.real_weights()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        notes.append(str(error))
    else:
        label = "MiniLM-L6 weights, simulated Adam"
        rows += table1.rows("minilm", label, [table1.simulate(real, TABLE1_LR, seed) for seed in range(3)])
        rows += table1.rows("analytic", "prediction for MiniLM-L6", [table1.predict(real, TABLE1_LR)])
        histograms.append(table1.histogram("minilm", "MiniLM-L6 blocks", real))
    return {
        "lr": TABLE1_LR,
        "rows": rows,
        "histograms": histograms,
        "threshold_log2": {name: table1.threshold_log2(TABLE1_LR, name) for name in table1.STORAGE},
        "notes": notes,
    }


def megatron_rows(experiment: Experiment) -> list[StickingRow]:
    """Rows of Table 1 from the headline's jobs."""
    by_seed: dict[int, dict] = {}
    for panel in experiment["panels"]:
        for arm in panel["arms"]:
            key = (arm["settings"]["format"], arm["settings"]["rounding"])
            for run in arm["runs"]:
                if len(run["unchanged_after_steps"]) == table1.STEPS and not run["skipped_steps"]:
                    by_seed.setdefault(run["seed"], {})[key] = run["unchanged_after_steps"]
    return table1.rows("megatron", "Megatron-Core + vLLM, RL gradients", list(by_seed.values())) if by_seed else []


def _addition_bases() -> list[str]:
    return sorted({settings.base for settings in table1_runs()})


def _predict(base: str) -> dict:
    return table1.predict(bases.load(base), TABLE1_LR)


def _all_weights():
    import torch

    return torch.cat([bases.load(name) for name in _addition_bases()])
