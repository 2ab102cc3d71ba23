"""Reproduce the paper's study on this machine: Table 1, convergence, formats, learning rates, variants, drift, staleness, the headline.

The study runs the main job's loop in miniature, one process a run (FP32 compute, only the weights are rounded), and the headline also
through real Megatron-Core and vLLM. It writes results.json and report.html to `--out`; finished runs are kept there, so that an
interrupted study goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from pathlib import Path

from megatron_sr.study import results as results_file
from megatron_sr.study.results import EXPERIMENTS, Experiment, Results
from megatron_sr.version import __version__

CHOICES = ("table1", *EXPERIMENTS, "all")
HEADLINE_SEEDS, HEADLINE_ITERATIONS, HEADLINE_GAIN = (0, 1, 2), 40, 0.002
QUICK_SEEDS, QUICK_ITERATIONS, QUICK_GAIN = (0,), 24, 0.001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatron-sr reproduce`."""
    parser.add_argument("experiment", nargs="?", default="all", choices=CHOICES, help="what to run (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="under 5 minutes on two cores; the report names what it leaves out"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/reproduce"), help="folder of the results (default: runs/reproduce)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each (default: 2)")


def main(args: argparse.Namespace) -> int:
    """Returns 0; 1 with the reason printed if the headline or a job fails; 2 for bad input; 130 when interrupted."""
    try:
        check(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"megatron-sr reproduce: error: {error}", file=sys.stderr)
        return 2
    started = time.time()
    try:
        results = run_study(args)
    except KeyboardInterrupt:
        print(
            "\nmegatron-sr reproduce: interrupted. Finished runs are kept: the same command goes on from there.",
            file=sys.stderr,
        )
        return 130
    except RuntimeError as error:
        print(f"megatron-sr reproduce: FAILED: {error}", file=sys.stderr)
        return 1
    results["seconds"] = time.time() - started
    results_file.save(results, args.out / "results.json")
    report = write_report(args.out, results)
    _print_findings(results)
    print(f"\n{results['seconds']:.0f} s. Report: {report}", flush=True)
    if results["failure"]:
        print(f"megatron-sr reproduce: FAILED: {results['failure']}", file=sys.stderr)
        return 1
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise ValueError, OSError or ImportError for what cannot work, before anything runs."""
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs} must be at least 1")
    for module in ("jinja2", "matplotlib", "rich"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"the report needs {module}; pip install 'megatron-sr[report]'")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if not os.access(args.out, os.W_OK):
            raise PermissionError("Permission denied")
    except OSError as error:
        raise ValueError(
            f"--out {args.out} cannot be written ({error.strerror or error}); choose another folder"
        ) from None


def run_study(args: argparse.Namespace) -> Results:
    """Make the runs and put the results together, without `seconds`."""
    from megatron_sr.study import assemble, experiments
    from megatron_sr.study.progress import StudyProgress
    from megatron_sr.study.runner import Runner

    wanted = ("table1", *EXPERIMENTS) if args.experiment == "all" else (args.experiment,)
    results: Results = {
        "version": results_file.VERSION,
        "quick": args.quick,
        "machine": machine(),
        "seconds": 0.0,
        "failure": None,
        "table1": None,
        "experiments": {},
    }
    with StudyProgress() as progress, Runner(args.out / "cache", args.jobs) as runner:
        for name in wanted:
            if name == "headline":
                continue
            run = lambda settings, name=name: runner.run(settings, progress.bar(name)) if settings else []
            if name == "table1":
                results["table1"] = assemble.table_1(run)
            else:
                results["experiments"][name] = assemble.experiment(experiments.PLANS[name](args.quick), run)
        if "headline" in wanted:
            headline = run_headline(args, progress)
            results["experiments"]["headline"] = headline
            if results["table1"]:
                results["table1"]["rows"] += assemble.megatron_rows(headline)
    results["failure"] = failure(results["experiments"])
    return results


def run_headline(args: argparse.Namespace, progress) -> Experiment:
    """The jobs on Megatron-Core and vLLM, one after another (each uses two cores). Raises headline.JobFailed."""
    from megatron_sr.study import assemble, findings, headline, statistics

    experiment: Experiment = {
        "title": "Headline on Megatron-Core and vLLM",
        "question": "Does the miniature's headline hold through the real trainer and the real engine?",
        "panels": [],
        "notes": [],
        "left_out": None,
    }
    reason = headline.missing()
    if reason:
        experiment["left_out"] = f"everything: {reason}"
        return experiment
    arms = [*headline.ARMS]
    left_out = []
    if args.quick:
        left_out.append(
            f"one seed instead of {len(HEADLINE_SEEDS)}; {QUICK_ITERATIONS} iterations and a gain of {QUICK_GAIN} instead of "
            f"{HEADLINE_ITERATIONS} and {HEADLINE_GAIN}"
        )
    if args.quick or not headline.has_fp16():
        left_out.append("FP16" if args.quick else "FP16: the job does not train FP16 model params")
    else:
        arms.append(headline.FP16_ARM)
    seeds, iterations, gain = (
        (QUICK_SEEDS, QUICK_ITERATIONS, QUICK_GAIN)
        if args.quick
        else (HEADLINE_SEEDS, HEADLINE_ITERATIONS, HEADLINE_GAIN)
    )
    bar = progress.bar("headline (Megatron-Core + vLLM, iterations)")
    total, done, runs = len(arms) * len(seeds) * iterations, 0, {arm.name: [] for arm in arms}
    for seed in seeds:
        for arm in arms:
            raw = headline.run_job(arm, seed, iterations, args.out / "cache", lambda n, done=done: bar(done + n, total))
            runs[arm.name].append(statistics.finish(raw, gain))
            done += iterations
            bar(done, total)
    made = [assemble.make_arm(arm, {"task": "addition", "lr": 1e-6, **arm.settings}, runs[arm.name]) for arm in arms]
    names = [arm.name for arm in arms]
    triples = [(a, b, "iterations_to_target") for a in names for b in names if a != b and b != "bf16-nearest"]
    triples += [("bf16-nearest", "bf16-stochastic", metric) for metric in ("final_reward", "main_params_reward")]
    panel = {
        "name": "headline",
        "label": "Exact reward through Megatron-Core and vLLM, learning rate 1e-6",
        "gain": gain,
        "iterations": iterations,
        "arms": made,
        "comparisons": assemble.comparisons(made, triples),
    }
    experiment["panels"] = [panel]
    experiment["notes"] = findings.notes("headline", [panel])
    experiment["left_out"] = "; ".join(left_out) or None
    return experiment


def failure(experiments: dict[str, Experiment]) -> str | None:
    """Why the headline fails, in miniature or on Megatron-Core, or None. What was not run cannot fail."""
    from megatron_sr.study.verdict import verdict, verdict_without_fp16

    reasons = []
    for name in ("convergence", "headline"):
        for panel in experiments.get(name, {"panels": []})["panels"]:
            has_fp16 = any(arm["settings"]["format"] == "fp16" for arm in panel["arms"])
            reason = (verdict if has_fp16 or name == "convergence" else verdict_without_fp16)(panel)
            if reason:
                reasons.append(f"{name}: {reason}")
    return "; ".join(reasons) or None


def machine() -> dict:
    """The processor, cores, memory and versions, for the reader of the figures."""
    import torch

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_sr": __version__,
    }


def write_report(out: Path, results: Results) -> Path:
    """report.html and its pictures."""
    from megatron_sr.study import reproduction_report

    return reproduction_report.write(out, results)


def _print_findings(results: Results) -> None:
    if results["table1"]:
        print("\nTable 1: weights unchanged after optimizer steps 1, 2, 3, 4 [%]")
        for row in results["table1"]["rows"]:
            name = f"{row['format'].upper()} {row['rounding']}".ljust(16)
            print(f"  {name}  {'  '.join(f'{value:6.2f}' for value in row['unchanged'])}   {row['label']}")
        for note in results["table1"]["notes"]:
            print(f"  - {note}")
    for experiment in results["experiments"].values():
        print(f"\n{experiment['title']}: {experiment['question']}")
        for note in experiment["notes"]:
            print(f"  - {note}")
        if experiment["left_out"]:
            print(f"  Left out: {experiment['left_out']}.")
