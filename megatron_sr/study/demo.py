"""The main job in small: post-train a 410k-parameter Qwen3 on real Megatron-Core with real vLLM rollouts, with both roundings.

Two torchrun ranks, learning rate 1e-6, the same seeds once with `--param-rounding nearest` and once with `stochastic`. Writes
metrics.jsonl, summary.json, report.html and the pictures to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatron_sr.rl import options
from megatron_sr.rl.metrics import read_metrics
from megatron_sr.study import figures, job_pictures
from megatron_sr.study.report import Picture, Report, Section, Table, write_report
from megatron_sr.study.sticking import PAPER_TABLE_1
from megatron_sr.study.summary import ArmSummary, summarise, verdict

MODES = ("nearest", "stochastic")
FACTOR = 1.2  # stochastic must reach the target in at most 1/FACTOR of nearest's iterations
BASE = Path(__file__).resolve().parents[2] / "examples" / "rlvr_arithmetic" / "base"
CAVEAT = (
    "Readout lag: on this task the FP32 main params of the nearest run learn as well as those of the stochastic run; what sticks is "
    "the rounded copy that generates and is deployed. Damage to learning itself shows only at lower precision."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `megatron-sr demo`."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder of the results (default: runs/demo)"
    )
    parser.add_argument(
        "--model", type=Path, default=BASE, help="base model (default: the one in examples/rlvr_arithmetic)"
    )
    parser.add_argument(
        "--format", choices=("bf16", "mxfp8"), default="bf16", help="number format of the weights (default: bf16)"
    )
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--gain", type=float, default=0.003, help="target = the base's exact reward + this gain")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)


def main(args: argparse.Namespace) -> int:
    """Run both arms, write and print the comparison; returns 0, 1 with the reason printed, or 2 for bad input."""
    started = time.time()
    try:
        _check(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"megatron-sr demo: error: {error}", file=sys.stderr)
        return 2
    (args.out / "metrics.jsonl").unlink(missing_ok=True)  # the runs append; all other files are written anew
    for mode in MODES:
        code = _run_arm(args, mode)
        if code:
            print(
                f"megatron-sr demo: FAILED: the {mode} run ended with exit code {code}; its error is above",
                file=sys.stderr,
            )
            return 1
    records = read_metrics(args.out / "metrics.jsonl")
    arms = {mode: [r for r in records if r["rounding"] == mode] for mode in MODES}
    target = arms["nearest"][0]["exact_reward"] + args.gain
    summaries = {mode: summarise(arms[mode], target) for mode in MODES}
    parity = _total_parity(arms)
    failure = verdict(summaries["nearest"], summaries["stochastic"], target, parity["mismatched_tensors"], FACTOR)
    seconds = time.time() - started
    summary = {"target": target, **{m: asdict(s) for m, s in summaries.items()}, "parity": parity, "seconds": seconds}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    table = comparison_table(summaries, target)
    content = make_report(arms, summaries, target, table, parity, failure, _subtitle(args, seconds))
    _print(table, parity, write_report(args.out, content), seconds)
    if failure:
        print(f"megatron-sr demo: FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError or FileNotFoundError for what cannot work, before anything starts."""
    if args.model == BASE and not BASE.is_dir():
        raise FileNotFoundError(
            "the demo's base model comes with the source, not with the package: run from a clone, or give --model"
        )
    job = options.parser().parse_args(_flags(args, "stochastic"))
    if args.ranks < 1 or job.prompts % (job.mini_batches * args.ranks):
        raise ValueError(
            f"--ranks {args.ranks} cannot share the demo's {job.prompts} prompts evenly; choose 1, 2, 4, 8 or 16"
        )
    options.check(job, args.ranks)


def _run_arm(args: argparse.Namespace, mode: str) -> int:
    """One torchrun job; its progress lines go to the terminal. Returns its exit code."""
    print(f"\n== {mode} ==  (Megatron-Core and vLLM start: about 20 seconds)", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += ["-m", "megatron_sr.rl.train", *_flags(args, mode)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    job = subprocess.Popen(command, env=environment)
    try:
        return job.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches the ranks too: let them end before the terminal is given back
        job.wait()
        return 130


def _flags(args: argparse.Namespace, mode: str) -> list[str]:
    """The job's flags of one arm."""
    flags = ["--model", args.model, "--task", "addition", "--param-rounding", mode, "--lr", "1e-6", "--seed", args.seed]
    flags += ["--param-rounding-format", args.format]
    return [str(flag) for flag in (*flags, "--iterations", args.iterations, "--metrics", args.out / "metrics.jsonl")]


def _total_parity(arms: dict[str, list[dict]]) -> dict:
    """Parity counters over both runs; each run's last record holds its totals."""
    last = [records[-1]["parity"] for records in arms.values()]
    return {key: sum(p[key] for p in last) for key in ("syncs", "tensors", "mismatched_tensors")}


def comparison_table(summaries: dict[str, ArmSummary], target: float) -> list[list[str]]:
    """Header and rows of the closing table, as text."""
    arms = [summaries[mode] for mode in MODES]
    iterations = [
        f"{s.iterations_to_target:.1f}" if s.iterations_to_target is not None else f"> {s.iterations}" for s in arms
    ]
    rows = [
        ["", *MODES, "paper BF16"],
        [f"iterations to {target:.4f}", *iterations, ""],
        ["exact reward, start", *(f"{s.start_reward:.4f}" for s in arms), ""],
        ["exact reward, end (as it generates)", *(f"{s.final_reward:.4f}" for s in arms), ""],
        ["exact reward, end (FP32 main params)", *(f"{s.final_reward_main_params:.4f}" for s in arms), ""],
    ]
    for step, paper in enumerate(PAPER_TABLE_1["BF16"]):
        rows.append(
            [f"unchanged after step {step + 1} [%]", *(f"{s.sticking[step]:.2f}" for s in arms), f"{paper:.2f}"]
        )
    return rows


def _parity_sentence(parity: dict) -> str:
    return (
        f"Weights parity: {parity['syncs']} syncs, {parity['tensors']} tensors read back from the live vLLM engines, "
        f"{parity['mismatched_tensors']} differ from the trainer's bits."
    )


def _subtitle(args: argparse.Namespace, seconds: float) -> str:
    return (
        f"3-digit addition, {args.model.name} model, {args.format} weights, {args.ranks} ranks, LR 1e-6, {args.iterations} iterations, "
        f"seed {args.seed}, {seconds:.0f} s."
    )


def make_report(
    arms: dict[str, list[dict]],
    summaries: dict[str, ArmSummary],
    target: float,
    table: list[list[str]],
    parity: dict,
    failure: str | None,
    subtitle: str,
) -> Report:
    """The report of the comparison; arms: mode -> metrics records."""
    numbers = Section("The comparison", "", [_parity_sentence(parity), CAVEAT], tables=[Table(table[0], table[1:])])
    keys = []
    reached = [summaries[mode].iterations_to_target for mode in MODES]
    if all(reached):
        keys.append((f"{reached[0] / reached[1]:.2f} x", "nearest over stochastic, iterations to the target"))
    keys.append((f"{summaries['nearest'].sticking[0]:.2f} %", "of BF16 weights unchanged by the first step, nearest"))
    keys.append(
        (f"{parity['mismatched_tensors']} of {parity['tensors']:,}", "tensors in vLLM differ from the trainer's")
    )
    return Report(
        title="megatron-sr demo: nearest against stochastic rounding",
        subtitle=subtitle,
        failure=f"Failed: {failure}." if failure else None,
        success=(
            f"Passed: stochastic rounding reached the target in at most 1/{FACTOR} of nearest's iterations, "
            "and every tensor matches."
        ),
        keys=keys,
        sections=[numbers, Section("Pictures", pictures=_pictures(arms, summaries, target))],
    )


def _pictures(arms: dict[str, list[dict]], summaries: dict[str, ArmSummary], target: float) -> list[Picture]:
    runs = {mode: [records] for mode, records in arms.items()}
    ends = "; ".join(f"{mode} {s.start_reward:.4f} to {s.final_reward:.4f}" for mode, s in summaries.items())
    steps = "; ".join(f"{mode} {', '.join(f'{v:.2f}' for v in s.sticking)}" for mode, s in summaries.items())
    last = {mode: records[-1] for mode, records in arms.items()}

    def of(key: str, form: str) -> str:
        return "; ".join(f"{mode} {form.format(r[key])}" for mode, r in last.items() if r.get(key) is not None)

    pictures = [
        Picture(
            "reward",
            partial(figures.reward_curves, runs, target),
            "The policy that generates. Hollow marks: the FP32 main params behind it.",
            f"Line chart of the exact reward: {ends}.",
        ),
        Picture(
            "sticking",
            partial(figures.sticking_bars, {mode: s.sticking for mode, s in summaries.items()}),
            "Weights unchanged after optimizer steps 1 to 4, beside Table 1 of the paper.",
            f"Bar chart of the percentage of unchanged weights after steps 1 to 4: {steps}.",
        ),
        Picture(
            "unchanged",
            partial(figures.unchanged_curve, runs),
            "Weights that still hold the base's bits.",
            f"Line chart of the share of unchanged weights; at the end {of('unchanged', '{:.1%}')}.",
        ),
        Picture(
            "drift",
            partial(figures.drift_curve, runs),
            "Distance from the base that a reward costs: the same for both.",
            f"Line chart of drift against reward; drift at the end {of('drift_k3', '{:.2e}')}.",
        ),
        Picture(
            "sampled",
            partial(figures.sampled_reward, runs),
            "The sampled reward is too noisy to show the gap at this size.",
            f"Line chart of the mean sampled reward; at the end {of('sampled_reward', '{:.3f}')}.",
        ),
        Picture(
            "gap",
            partial(figures.logprob_gap, runs),
            "Equal bits in trainer and engine; what is left comes from different kernels.",
            f"Line chart of the log-probability gap; at the end {of('logprob_gap_mean', '{:.4f}')} nats.",
        ),
    ]
    if figures.has(runs, "sync_seconds"):
        pictures.append(job_pictures.syncs(runs))
    return pictures


def _print(table: list[list[str]], parity: dict, report: Path, seconds: float) -> None:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    print()
    for row in table:
        print(
            "  " + row[0].ljust(widths[0]) + "".join(cell.rjust(width + 3) for cell, width in zip(row[1:], widths[1:]))
        )
    print(f"\n{_parity_sentence(parity)}\n{CAVEAT}\n\n{seconds:.0f} s. Report: {report}", flush=True)
