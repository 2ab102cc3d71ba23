"""Measure the rounding kernels on this machine's CPU: `python tools/bench_rounding.py [--threads 1 2] [--json FILE]`.

Every case of a group is run once per round, in turn, so that a busy machine slows all of them alike; the figures are medians over the
rounds, the ratios medians of the ratios within one round. A GB is 1e9 bytes, counted as the traffic the cast needs: 4 bytes
read and those of the format written for each element. Groups:

    cast      FP32 -> BF16 at sizes from L2 to main memory: torch's own casts, the nearest and the stochastic kernel at every
              instruction set, eager randint + add, and torchao's rounding where installed
    formats   the stochastic kernel for the other formats
    segments  RoundingPlan over many tensors against one call over the same elements in one tensor
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_sr import Noise, RoundingPlan, Segment, __version__, formats, round_to_
from megatron_sr.kernels import cpu

NOISE = Noise(seed=1, step=2, key="benchmark")
SLOW = 1 << 22  # elements given to cases that need a temporary of the tensor's size per operation


class Case(NamedTuple):
    elements: int
    bytes: int  # of traffic for each element
    run: Callable[[], object]


def seconds(function: Callable[[], object], least: float) -> float:
    """Time of one call: the mean of as many as take `least` seconds together."""
    calls, total = 0, 0.0
    while not calls or total < least:
        begin = time.perf_counter()
        function()
        total += time.perf_counter() - begin
        calls += 1
    return total / calls


def interleaved(cases: dict[str, Case], base: str, rounds: int, least: float) -> dict[str, dict]:
    """Run all cases in turn, `rounds` times. Ratios are speeds per element relative to `base`."""
    for case in cases.values():
        case.run()
    per_element: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            per_element[name].append(seconds(case.run, least) / case.elements)
    return {
        name: {
            "ns_per_element": round(statistics.median(times) * 1e9, 4),
            "gb_per_s": round(cases[name].bytes / statistics.median(times) / 1e9, 3),
            f"speed_over_{base}": round(statistics.median(b / t for b, t in zip(per_element[base], times)), 3),
        }
        for name, times in per_element.items()
    }


def at_level(level: str, dst: torch.Tensor, src: torch.Tensor, noise: Noise | None) -> Callable:
    def run():
        os.environ["MEGATRON_SR_CPU_LEVEL"] = level
        round_to_(dst, src, noise=noise)
        del os.environ["MEGATRON_SR_CPU_LEVEL"]

    return run


def eager_stochastic(dst: torch.Tensor, src: torch.Tensor) -> None:
    """What one writes without a kernel: 16 random bits added to the FP32 pattern, the upper half kept."""
    bits = src.view(torch.int32)
    dst.view(torch.int16).copy_((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) >> 16)


def torchao_cast() -> Callable | None:
    """torchao's FP32 -> BF16 stochastic rounding, if it is installed."""
    try:
        from torchao.optim.quant_utils import _fp32_to_bf16_sr
    except ImportError:
        return None
    return _fp32_to_bf16_sr


def bench_cast(elements: int, rounds: int, least: float) -> dict:
    src, dst = torch.randn(elements) * 0.02, torch.empty(elements, dtype=torch.bfloat16)
    few = min(elements, SLOW)
    cases = {
        "copy_": Case(elements, 6, lambda: dst.copy_(src)),
        "to(bfloat16)": Case(elements, 6, lambda: src.to(torch.bfloat16)),
    }
    for level in cpu.LEVELS[: cpu.LEVELS.index(cpu.best_level()) + 1]:
        cases[f"nearest {level}"] = Case(elements, 6, at_level(level, dst, src, None))
        cases[f"stochastic {level}"] = Case(elements, 6, at_level(level, dst, src, NOISE))
    cases["eager randint + add"] = Case(few, 6, lambda: eager_stochastic(dst[:few], src[:few]))
    if cast := torchao_cast():
        cases["torchao"] = Case(few, 6, lambda: cast(src[:few]))
    return interleaved(cases, "copy_", rounds, least)


def bench_formats(elements: int, rounds: int, least: float) -> dict:
    src = torch.randn(elements) * 0.02
    cases = {}
    for name in ("bf16", "fp16", "e4m3", "e8m4", "e8m8"):
        dst = torch.empty(elements, dtype=formats.get(name).storage[0])
        run = partial(round_to_, dst, src, noise=NOISE, format=name)
        cases[name] = Case(elements, 4 + dst.element_size(), run)
    return interleaved(cases, "bf16", rounds, least)


def bench_segments(count: int, each: int, rounds: int) -> dict:
    """Many tensors, views of one buffer, against one call over the whole buffer."""
    src, dst = torch.randn(count * each), torch.empty(count * each, dtype=torch.bfloat16)
    keyed = [(f"layer.{i}.weight", [Segment(0, each, 0)]) for i in range(count)]
    plan = RoundingPlan(list(dst.split(each)), list(src.split(each)), keyed, seed=1)
    elements = count * each
    cases = {
        "one call": Case(elements, 6, lambda: round_to_(dst, src, noise=NOISE)),
        "plan": Case(elements, 6, lambda: plan.run_(3)),
        "copy_": Case(elements, 6, lambda: dst.copy_(src)),
    }
    return interleaved(cases, "one call", rounds, 0)


def targets(groups: dict) -> dict[str, tuple[float, str, float]]:
    """The CPU targets of the project that this run can judge: name -> (measured, at least / at most, bound)."""
    best = cpu.best_level()
    out = {}
    for threads, bound in ((1, 0.8), (2, 0.95)):
        group = groups.get(f"cast, {threads} threads, memory")
        if group is None:
            continue
        speed = {name: case["speed_over_copy_"] for name, case in group.items()}
        stochastic = speed[f"stochastic {best}"]
        out[f"{threads} threads: speed over copy_"] = stochastic, "at least", bound
        out[f"{threads} threads: time over the nearest kernel"] = speed[f"nearest {best}"] / stochastic, "at most", 1.6
        out[f"{threads} threads: speed over eager"] = stochastic / speed["eager randint + add"], "at least", 10
    for name, group in groups.items():
        if name.startswith("segments"):
            out[f"{name}: plan's speed over one call"] = group["plan"]["speed_over_one call"], "at least", 0.95
    return out


def show(name: str, group: dict) -> None:
    print(f"\n{name}")
    for case, figures in group.items():
        ratio, value = next((k, v) for k, v in figures.items() if k.startswith("speed"))
        print(
            f"  {case:22s} {figures['ns_per_element']:9.3f} ns/element {figures['gb_per_s']:8.2f} GB/s"
            f"   {value:7.3f} {ratio.replace('_over_', ' over ')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each group (default: 15)")
    parser.add_argument("--segments", type=int, default=10_000, help="tensors in the segments group (default: 10000)")
    parser.add_argument("--segment-size", type=int, default=100_000, help="elements of each (default: 100000)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds: shows that it runs, not how fast"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()

    sizes = {"L2": 1 << 16, "L3": 1 << 20, "memory": 166_000_000}  # the last: 1 GB of traffic
    least = 0.02
    if args.quick:
        sizes, least, args.rounds, args.segments = {"L2": 1 << 14, "memory": 1 << 20}, 0, 3, min(args.segments, 20)
    groups = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        for size, elements in sizes.items():
            groups[f"cast, {threads} threads, {size}"] = bench_cast(elements, args.rounds, least)
        groups[f"formats, {threads} threads"] = bench_formats(sizes["memory"] // 8, args.rounds, least)
        name = f"segments, {threads} threads, {args.segments} x {args.segment_size}"
        groups[name] = bench_segments(args.segments, args.segment_size, max(3, args.rounds // 3))
    for name, group in groups.items():
        show(name, group)
    print("\ntargets")
    judged = targets(groups)
    for name, (measured, relation, bound) in judged.items():
        met = measured >= bound if relation == "at least" else measured <= bound
        print(f"  {'met   ' if met else 'missed'} {name}: {measured:.3f}, {relation} {bound}")
    if args.json:
        report = {
            "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "level": cpu.best_level()},
            "versions": {"megatron_sr": __version__, "torch": torch.__version__},
            "quick": args.quick,
            "groups": groups,
            "targets": {n: {"measured": m, "relation": rel, "bound": b} for n, (m, rel, b) in judged.items()},
        }
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
