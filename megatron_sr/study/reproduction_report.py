"""The report of `megatron-sr reproduce`: from results.json, and the records of the headline's jobs, to sections and report.html."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from megatron_sr.rl.metrics import read_metrics
from megatron_sr.study import claims, figures, job_pictures, result_pictures, tables
from megatron_sr.study.report import Report, Section, write_report
from megatron_sr.study.results import EXPERIMENTS, Experiment, Results
from megatron_sr.study.tables import find, ratio

TITLES = {
    "table1": "Weight sticking",
    "convergence": "Convergence",
    "formats": "Simulated formats",
    "learning-rate": "Learning rate",
    "variants": "Variants",
    "drift": "Drift",
    "staleness": "Staleness",
    "headline": "Headline on Megatron-Core and vLLM",
}


def write(out: Path, results: Results) -> Path:
    """Write report.html and its pictures into `out`, where the headline's jobs left their metrics; returns the HTML's path."""
    return write_report(out, build(results, job_records(out, results)))


def job_records(out: Path, results: Results) -> dict[str, list[list[dict]]]:
    """Label of a headline arm -> metrics records of its runs, as far as their files are under `out`.

    A file belongs to a run if it has that run's rewards: files of jobs with other settings or code may lie beside them.
    """
    files = [read_metrics(path) for path in sorted(out.glob("**/*.metrics.jsonl"))]
    files = [[r for r in records if "exact_reward" in r] for records in files]
    found: dict[str, list[list[dict]]] = {}
    for panel in results["experiments"].get("headline", {"panels": []})["panels"]:
        for arm in panel["arms"]:
            for run in arm["runs"]:
                same = [f for f in files if _same([r["exact_reward"] for r in f], run["exact_reward"])]
                if same:
                    found.setdefault(arm["label"], []).append(same[0])
    return found


def _same(rewards: list[float], others: list[float]) -> bool:
    """Equal up to the digits that results.json keeps."""
    return len(rewards) == len(others) and all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(rewards, others))


def build(results: Results, jobs: figures.Arms) -> Report:
    """The report. jobs: as `job_records` gives them; without, it has no pictures of syncs."""
    sections = [Section("What the paper says, and what this run shows", tables=[claims.table(results)])]
    sections.append(_table1(results) if results["table1"] else _not_run("table1"))
    makers: dict[str, Callable] = {
        "formats": result_pictures.formats,
        "learning-rate": result_pictures.learning_rate,
        "drift": result_pictures.drift,
        "staleness": result_pictures.staleness,
    }
    for name in EXPERIMENTS:
        experiment = results["experiments"].get(name)
        if experiment is None:
            sections.append(_not_run(name))
            continue
        if name == "headline":
            sections.append(_headline(experiment, jobs))
        else:
            pictures = makers.get(name, result_pictures.panels)(experiment) if experiment["panels"] else []
            sections.append(_section(name, experiment, pictures))
    sections.append(_method())
    return Report(
        title="Stochastic rounding in RL post-training: the paper in miniature",
        subtitle=f"{_run(results)} Paper: Closing the BF16-FP16 Convergence Speed Gap in RL Post-Training with Stochastic Rounding.",
        failure=f"The headline failed. {results['failure']}." if results["failure"] else None,
        success=_success(results),
        keys=_keys(results),
        sections=sections,
    )


def _run(results: Results) -> str:
    machine, kind = results["machine"], "quick" if results["quick"] else "full"
    return (
        f"megatron-sr {machine['megatron_sr']}, {kind} run of {_duration(results['seconds'])} on {machine['cores']} cores "
        f"({machine['processor']}, {machine['memory_gb']:g} GB), Python {machine['python']}, torch {machine['torch']}."
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _success(results: Results) -> str | None:
    if not any(results["experiments"].get(name, {"panels": []})["panels"] for name in ("convergence", "headline")):
        return None
    return (
        "The headline holds: BF16 with stochastic rounding reaches the reward target in at most 1.05 x FP16's iterations, "
        "rounding to nearest needs at least 1.2 x."
    )


def _keys(results: Results) -> list[tuple[str, str]]:
    """The numbers worth a first look, as far as they were measured."""
    keys = []
    for panel in results["experiments"].get("convergence", {"panels": []})["panels"]:
        for arm, words in (("bf16-stochastic", "BF16 stochastic"), ("bf16-nearest", "BF16 nearest")):
            c = find(panel, arm, "fp16-settled", "iterations_to_target")
            if c:
                keys.append(
                    (
                        ratio(c),
                        f"the iterations of FP16 (loss scale from 2^16) to the reward target: {words}, {_runs(c['n'])}",
                    )
                )
    for panel in results["experiments"].get("headline", {"panels": []})["panels"]:
        c = find(panel, "bf16-nearest", "bf16-stochastic", "iterations_to_target")
        if c:
            keys.append((ratio(c), f"nearest over stochastic, iterations, in Megatron-Core and vLLM, {_runs(c['n'])}"))
    for row in (results["table1"] or {"rows": []})["rows"]:
        if (row["source"], row["format"], row["rounding"]) == ("miniature", "bf16", "nearest"):
            keys.append(
                (f"{row['unchanged'][0]:.2f} %", "of BF16 weights unchanged after the first step (the paper: 99.42 %)")
            )
    return keys


def _runs(pairs: int) -> str:
    return f"{pairs} paired runs" if pairs > 1 else "one pair of runs"


def _not_run(name: str) -> Section:
    return Section(TITLES[name], left_out=f"not run; megatron-sr reproduce {name} makes it, reproduce all everything")


def _section(name: str, experiment: Experiment, pictures: list) -> Section:
    return Section(
        TITLES[name],
        experiment["question"],
        experiment["notes"],
        pictures,
        tables.arms(experiment["panels"]),
        tables.comparisons(experiment["panels"]),
        experiment["left_out"],
    )


def _table1(results: Results) -> Section:
    table = results["table1"]
    return Section(
        TITLES["table1"],
        "How many weights does an optimizer step leave exactly where they were?",
        [f"{note.rstrip('.')}." for note in table["notes"]],
        result_pictures.table1(table),
        [tables.sticking(table)],
    )


def _headline(experiment: Experiment, jobs: figures.Arms) -> Section:
    pictures = [result_pictures.rewards(panel, "headline-reward", True) for panel in experiment["panels"]]
    findings = list(experiment["notes"])
    parity = [run[-1]["parity"] for runs in jobs.values() for run in runs if "parity" in run[-1]]
    if parity:
        total = {key: sum(p[key] for p in parity) for key in ("syncs", "tensors", "mismatched_tensors")}
        findings.append(
            f"Weights parity: {total['syncs']} syncs, {total['tensors']:,} tensors read back from the live vLLM engines, "
            f"{total['mismatched_tensors']} differ from the trainer's bits."
        )
    if figures.has(jobs, "sync_seconds"):
        pictures.append(job_pictures.syncs(jobs))
    if figures.has(jobs, "completion_tokens"):
        pictures.append(job_pictures.response_length(jobs))
    section = _section("headline", experiment, pictures)
    return Section(section.title, section.lead, findings, pictures, section.tables, section.details, section.left_out)


def _method() -> Section:
    return Section("How this was measured", "What to know before trusting a difference.", METHOD)


METHOD = (
    "Miniature: a transformer of about 100,000 parameters, FP32 compute, only the weights are rounded. The loop is the main job's: "
    "Dr. GRPO, 64 prompts x 8 completions (drift: 16 x 8), 4 optimizer steps an iteration, Adam without weight decay.",
    "Reward curves show the exact expected reward: the probability of a right answer, over fixed prompts. The sampled reward is too "
    "noisy at this size.",
    "Runs of different arms with one base and seed see the same prompts and the same random numbers. Tests are paired, two-sided "
    "t-tests; p is not corrected for the number of comparisons.",
    "A run that never reaches its target counts as its last iteration: such means and ratios are bounds, marked > or at least.",
    "The models are many orders of magnitude smaller than the paper's, and the gains in reward are small. Directions and ratios can be "
    "compared with it; absolute numbers cannot, save for Table 1.",
)
