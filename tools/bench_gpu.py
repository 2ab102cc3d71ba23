"""Measure rounding and the fused AdamW step against memory bandwidth and against torch: `python tools/bench_gpu.py`.

Needs a CUDA GPU; `--device cpu` runs the same cases on the CPU. Every case of a group runs once per round, in turn; figures
are medians over the rounds, ratios medians of the ratios within one round. A GB is 1e9 bytes, counted as the traffic the
case needs: each tensor read once and written once.

    rounding  FP32 -> BF16 and other formats, against a plain copy of FP32 (the bandwidth there is) and torch's nearest cast
    adamw     one optimizer step and the rounding of its result, against torch's fused AdamW and a nearest cast
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_sr import Noise, RoundingPlan, Segment, __version__, formats, round_to_
from megatron_sr.kernels.adamw import AdamWPlan

NOISE = Noise(seed=1, step=2, key="benchmark")
SETTINGS = dict(lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class Case(NamedTuple):
    bytes: int  # of traffic for each element
    run: Callable[[], object]


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one call, on the GPU's own clock if there is one."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(cases: dict[str, Case], base: str, elements: int, rounds: int, device: torch.device) -> dict:
    """Run all cases in turn, `rounds` times after two to warm up. Speeds relative to `base` compare bytes per second if all
    cases differ in their bytes as casts do, and steps per second for AdamW, where the work is the same."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round in range(rounds + 2):
        for name, case in cases.items():
            taken = seconds(case.run, device)
            if round >= 2:
                times[name].append(taken)
    return {
        name: {
            "ns_per_element": round_figure(statistics.median(times[name]) / elements * 1e9),
            "gb_per_s": round_figure(case.bytes * elements / statistics.median(times[name]) / 1e9),
            f"time_over_{base}": round_figure(statistics.median(t / b for t, b in zip(times[name], times[base]))),
            f"bandwidth_over_{base}": round_figure(
                case.bytes / cases[base].bytes * statistics.median(b / t for t, b in zip(times[name], times[base]))
            ),
        }
        for name, case in cases.items()
    }


def round_figure(x: float) -> float:
    return float(f"{x:.4g}")


def bench_rounding(elements: int, rounds: int, device: torch.device) -> dict:
    src = torch.randn(elements, device=device) * 0.02
    copy, dst = torch.empty_like(src), torch.empty(elements, dtype=torch.bfloat16, device=device)
    each = elements // 1000
    where = [(f"layer.{i}.weight", [Segment(0, each, 0)]) for i in range(1000)]
    plan = RoundingPlan(list(dst.split(each)[:1000]), list(src.split(each)[:1000]), where, seed=1)
    cases = {
        "copy": Case(8, lambda: copy.copy_(src)),
        "nearest, torch": Case(6, lambda: dst.copy_(src)),
        "nearest": Case(6, lambda: round_to_(dst, src)),
        "stochastic": Case(6, lambda: round_to_(dst, src, noise=NOISE)),
        "stochastic, 1000 tensors": Case(6, lambda: plan.run_(3)),
    }
    for name in ("fp16", "e4m3"):
        out = torch.empty(elements, dtype=formats.get(name).storage[0], device=device)
        run = lambda out=out, name=name: round_to_(out, src, noise=NOISE, format=name)
        cases[f"stochastic, {name}"] = Case(4 + out.element_size(), run)
    return interleaved(cases, "copy", elements, rounds, device)


def bench_adamw(elements: int, rounds: int, device: torch.device) -> dict:
    main = torch.nn.Parameter(torch.randn(elements, device=device) * 0.02)
    main.grad = torch.randn(elements, device=device) * 1e-3
    param = torch.empty(elements, dtype=torch.bfloat16, device=device)
    optimizer = torch.optim.AdamW([main], fused=True, **SETTINGS)

    def unfused() -> None:
        optimizer.step()
        param.copy_(main.detach())

    optimizer.step()
    moments = [[optimizer.state[main][name]] for name in ("exp_avg", "exp_avg_sq")]
    grad, short_grad, count = main.grad, main.grad.bfloat16(), iter(range(2, 1 << 30))
    where = [("w", [Segment(0, elements, 0)])]
    plan = AdamWPlan([param], [main.detach()], *moments, where, seed=1)
    nearest = AdamWPlan([param], [main.detach()], *moments, where, seed=None)
    held, remainder = param.clone(), torch.zeros(elements, dtype=torch.int16, device=device)
    with_remainders = AdamWPlan([held], [remainder], *moments, where, seed=1)

    last = None

    def step_with_remainders() -> None:
        nonlocal last
        step = next(count)
        with_remainders.step_([grad], step=step, last_noise_step=last, **SETTINGS)
        last = step

    cases = {
        "torch fused AdamW + cast": Case(28 + 6, unfused),
        "fused, stochastic": Case(30, lambda: plan.step_([grad], step=next(count), **SETTINGS)),
        "fused, nearest": Case(30, lambda: nearest.step_([grad], step=next(count), **SETTINGS)),
        "fused, stochastic, bf16 grad": Case(28, lambda: plan.step_([short_grad], step=next(count), **SETTINGS)),
        "fused, stochastic, remainders": Case(28, step_with_remainders),
    }
    return interleaved(cases, "torch fused AdamW + cast", elements, rounds, device)


def targets(groups: dict) -> dict[str, tuple[float, str, float]]:
    """The GPU targets of the project: name -> (measured, at least / at most, bound)."""
    rounding, adamw = groups["rounding"], groups["adamw"]
    return {
        "stochastic rounding: bandwidth over copy": (rounding["stochastic"]["bandwidth_over_copy"], "at least", 0.9),
        "fused AdamW: time over torch's and a nearest cast": (
            adamw["fused, stochastic"]["time_over_torch fused AdamW + cast"],
            "at most",
            1.0,
        ),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1, ... or cpu")
    parser.add_argument("--elements", type=int, default=1 << 28, help="of every tensor (default: 2**28)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    if args.elements < 1000:
        parser.error("--elements must be at least 1000")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "bench_gpu: torch finds no CUDA GPU on this machine, so there is nothing to measure. Run it on one, or "
            "--device cpu; tools/compile_gpu.py tells what can be known without a GPU.",
            file=sys.stderr,
        )
        return 1
    if device.type not in ("cuda", "cpu"):
        parser.error(f"--device {args.device}: the kernels run on cuda and cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    groups = {
        "rounding": bench_rounding(args.elements, args.rounds, device),
        "adamw": bench_adamw(args.elements, args.rounds, device),
    }
    print(f"{name}, {args.elements} elements")
    for group, cases in groups.items():
        print(f"\n{group}")
        for case, figures in cases.items():
            (time_name, time_ratio), (_, bandwidth_ratio) = list(figures.items())[2:]
            print(
                f"  {case:30s} {figures['ns_per_element']:9.4g} ns/element {figures['gb_per_s']:8.4g} GB/s   "
                f"{time_ratio:6.3f} {time_name.replace('_over_', ' over ')}, {bandwidth_ratio:6.3f} bandwidth"
            )
    judged = targets(groups)
    if device.type == "cuda":
        print("\ntargets")
        for target, (measured, relation, bound) in judged.items():
            met = measured >= bound if relation == "at least" else measured <= bound
            print(f"  {'met   ' if met else 'missed'} {target}: {measured:.3f}, {relation} {bound}")
    if args.json:
        report = {
            "device": name,
            "elements": args.elements,
            "versions": {"megatron_sr": __version__, "torch": torch.__version__},
            "groups": groups,
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
