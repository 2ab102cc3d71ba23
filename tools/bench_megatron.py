"""What stochastic rounding costs a Megatron-Core training job: `python tools/bench_megatron.py [--ranks 1 2] [--json FILE]`.

A real job on the CPU host (GPTModel with experts, DDP, DistributedOptimizer, gloo ranks), twice in each process: one rounds to
nearest, as Megatron does, the other stochastically. They take steps in turn, on the same batches, so that a busy machine slows
both alike. Reported for each number of ranks:

    optimizer step  `optimizer.step()`: Adam, the cast to model params, the parameter all-gather
    cast            the cast alone, inside the optimizer step
    other           everything in the optimizer step but Adam, cast and gather
    iteration       the optimizer step's difference over the time of a whole iteration: forward, backward, gradient reduction and
                    optimizer step over --tokens tokens a rank. Forward and backward are the same code in both jobs; `directly` is
                    the difference of whole iterations, whose noise is larger
    memory          what apply_param_rounding keeps, and what a step allocates at its peak beyond the nearest one's

Overheads are medians of the differences within a round, over the median of the nearest job, with the 95 % interval of that median
(bootstrap); `noise` is the same figure for one round of the nearest job against the next: differences below it mean nothing.
Wall-clock time counts what other programs do; CPU time of the main thread does not, nor does it count waiting for other ranks.
Adam is the host's stand-in for Transformer Engine's FusedAdam in plain torch, several times slower than a fused one: `over fused`
is the cast's extra time over that of this project's fused AdamW kernel on as many elements, a harder measure.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"optimizer step": 2.0, "optimizer step, CPU": 2.0, "iteration": 0.5, "memory": 1.0}  # percent; memory in MB


def worker(args: argparse.Namespace) -> None:
    """One rank: measure, and let rank 0 write its figures."""
    from megatron_sr.megatron import host

    host.install()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    dist.init_process_group()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    jobs = {mode: Job(mode, args) for mode in ("nearest", "stochastic")}
    torch.manual_seed(2 + dist.get_rank())
    for job in jobs.values():  # first steps make states and touch all memory
        job.iteration(batch(args))
        job.optimizer_step()
    iterations = in_turn(jobs, args.iterations, lambda job, tokens: job.iteration(tokens), lambda: batch(args))
    steps = in_turn(jobs, args.steps, lambda job, _: job.optimizer_step(), lambda: None)
    figures = {
        "ranks": dist.get_world_size(),
        "parameters": sum(p.numel() for p in jobs["nearest"].ddp.parameters()),
        "elements rounded by this rank": jobs["stochastic"].elements(),
        "segments": jobs["stochastic"].segments(),
        "optimizer step": overhead(steps, "wall"),
        "optimizer step, CPU": overhead(steps, "cpu"),
        "cast": overhead(steps, "cast"),
        "other": overhead(steps, "rest"),
        "iteration": overhead(steps, "wall", whole=median(iterations["nearest"], "wall")),
        "iteration, directly": overhead(iterations, "wall"),
        "over fused": over_fused(steps, jobs["stochastic"].elements()),
        "memory": {
            "kept MB": jobs["stochastic"].kept / 1e6,
            "peak of a step beyond nearest MB": (jobs["stochastic"].peak() - jobs["nearest"].peak()) / 1e6,
        },
    }
    if dist.get_rank() == 0:
        Path(args.worker).write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


class Job:
    """A model in DDP and its optimizer, rounded in one mode."""

    def __init__(self, mode: str, args: argparse.Namespace):
        import torch
        from transformers import Qwen3MoeConfig

        import megatron_sr as sr
        from megatron_sr.megatron.model import Layout, build_optimizer, gpt_model, transformer_config, wrap_ddp

        hf = Qwen3MoeConfig(
            vocab_size=args.vocabulary, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=8,
            num_key_value_heads=4, head_dim=args.hidden // 8, intermediate_size=args.hidden, num_experts=args.experts,
            num_experts_per_tok=2, moe_intermediate_size=args.hidden, norm_topk_prob=True, rope_theta=1e6,
            max_position_embeddings=args.sequence,
        )  # fmt: skip
        torch.manual_seed(1)
        config = transformer_config(hf, Layout())
        self.ddp = wrap_ddp(gpt_model(hf, config), config)
        self.optimizer = build_optimizer(self.ddp, config, lr=1e-6)
        self.controller, self.kept, _ = allocated(
            lambda: sr.apply_param_rounding(self.optimizer, [self.ddp], sr.ParamRounding(mode=mode, seed=1))
        )
        self.times = {"cast": 0.0, "adam": 0.0, "gather": 0.0}
        self._time_parts()

    def _time_parts(self) -> None:
        """Time the parts of the optimizer step, at the names that Megatron itself calls; alike in both modes."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for part in parts:
            part._copy_main_params_to_model_params = self._timed("cast", part._copy_main_params_to_model_params)
            part.optimizer.step = self._timed("adam", part.optimizer.step)
        self.ddp.start_param_sync = self._timed("gather", self.ddp.start_param_sync)
        for chunk in {id(c): c for part in parts for c in part.model_chunks}.values():
            if chunk is not self.ddp:
                chunk.start_param_sync = self._timed("gather", chunk.start_param_sync)

    def _timed(self, name: str, function):
        def run(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.times[name] += time.perf_counter() - begin
            return result

        return run

    def iteration(self, tokens) -> None:
        """Forward, backward, reduction and step on [sequences, sequence + 1] token numbers."""
        import torch

        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        length = inputs.shape[1]
        positions = torch.arange(length).expand_as(inputs)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        self.ddp.zero_grad_buffer()
        self.ddp(inputs, positions, mask, labels=labels).float().mean().backward()
        self.ddp.finish_grad_sync()
        self.optimizer_step()

    def optimizer_step(self) -> None:
        successful, _, _ = self.optimizer.step()
        if not successful:
            raise RuntimeError("the optimizer step was skipped: its gradients were not finite")

    def elements(self) -> int:
        return sum(piece.main.numel() for site in self.controller.sites for piece in site.pieces)

    def segments(self) -> int:
        return sum(len(piece.identity.segments) for site in self.controller.sites for piece in site.pieces)

    def peak(self) -> int:
        """Bytes that one optimizer step allocates at its peak."""
        return allocated(self.optimizer_step)[2]


def batch(args: argparse.Namespace):
    import torch

    return torch.randint(0, args.vocabulary, (args.tokens // args.sequence, args.sequence + 1))


def allocated(action) -> tuple:
    """(its result, bytes it keeps, bytes at the peak): torch's allocator, from its profiler, and Python's, from tracemalloc."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = action()
        gc.collect()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    now = highest = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    return result, kept + now, peak + highest


def in_turn(jobs: dict[str, Job], rounds: int, run, make) -> dict[str, list[dict[str, float]]]:
    """Seconds of each run: wall, CPU, cast, and the rest outside Adam, cast and gather. The order within a round alternates."""
    import torch.distributed as dist

    seen: dict[str, list] = {mode: [] for mode in jobs}
    for number in range(rounds):
        given = make()
        for mode in list(jobs)[:: 1 if number % 2 == 0 else -1]:
            job = jobs[mode]
            job.times.update(cast=0.0, adam=0.0, gather=0.0)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.thread_time()
            run(job, given)
            spent = {"wall": time.perf_counter() - wall, "cpu": time.thread_time() - cpu, **job.times}
            seen[mode].append({**spent, "rest": spent["wall"] - sum(job.times.values())})
    return seen


def median(runs: list[dict[str, float]], what: str) -> float:
    return statistics.median(run[what] for run in runs)


def overhead(seen: dict[str, list], what: str, whole: float | None = None) -> dict[str, float]:
    """Milliseconds of both, the difference, and it in percent of `whole` seconds with its 95 % interval.

    whole  default: the nearest job's whole runs.
    """
    nearest, stochastic = ([run[what] for run in seen[mode]] for mode in ("nearest", "stochastic"))
    whole = whole or median(seen["nearest"], "cpu" if what == "cpu" else "wall")
    differences = [s - n for n, s in zip(nearest, stochastic)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(differences, k=len(differences))) for _ in range(1000))
    noise = [after - before for before, after in itertools.pairwise(nearest)]
    return {
        "nearest ms": statistics.median(nearest) * 1e3,
        "stochastic ms": statistics.median(stochastic) * 1e3,
        "difference ms": statistics.median(differences) * 1e3,
        "percent": statistics.median(differences) / whole * 100,
        "percent low": medians[25] / whole * 100,
        "percent high": medians[974] / whole * 100,
        "noise percent": statistics.median(map(abs, noise)) / whole * 100,
    }


def over_fused(seen: dict[str, list], elements: int) -> dict[str, float]:
    """The cast's extra time in percent of the fused AdamW kernel with a nearest cast, on as many elements in one thread."""
    import torch

    from megatron_sr.kernels import adamw

    few = min(elements, 1 << 24)
    grad, m, v, main = (torch.full((few,), 1e-3) for _ in range(4))
    param = torch.empty(few, dtype=torch.bfloat16)
    times = []
    for step in range(1, 8):
        begin = time.perf_counter()
        adamw.fused_adamw_step_(param, main, grad, m, v, step=step, lr=1e-6)
        times.append((time.perf_counter() - begin) * elements / few)
    extra = overhead(seen, "cast")["difference ms"] / 1e3
    return {"fused AdamW ms": statistics.median(times) * 1e3, "percent": extra / statistics.median(times) * 100}


def measure(ranks: int, args: argparse.Namespace) -> dict:
    """The figures of one job, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        options = [f"--{name}={getattr(args, name)}" for name in SIZES]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([*command, f"--worker={out}", *options], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the job of {ranks} ranks failed:\n{(done.stdout + done.stderr)[-4000:]}")
        return json.loads(out.read_text())


def show(figures: dict) -> None:
    print(
        f"\n{figures['ranks']} ranks, {figures['parameters'] / 1e6:.1f}M parameters, "
        f"{figures['elements rounded by this rank'] / 1e6:.1f}M of them rounded by a rank in {figures['segments']} segments"
    )
    print(
        f"  {'milliseconds':20s} {'nearest':>9s} {'stochastic':>10s} {'difference':>10s} {'percent':>8s} {'interval':>16s} {'noise':>7s}"
    )
    for name, row in figures.items():
        if isinstance(row, dict) and "difference ms" in row:
            interval = f"[{row['percent low']:.2f}, {row['percent high']:.2f}]"
            print(
                f"  {name:20s} {row['nearest ms']:9.2f} {row['stochastic ms']:10.2f} {row['difference ms']:10.3f} {row['percent']:8.2f} "
                f"{interval:>16s} {row['noise percent']:7.2f}"
            )
    fused, memory = figures["over fused"], figures["memory"]
    print(
        f"  over fused           fused AdamW {fused['fused AdamW ms']:.2f} ms; the cast's extra time is {fused['percent']:.2f} % of it"
    )
    print(f"  memory               {', '.join(f'{name[:-3]} {value:.3f} MB' for name, value in memory.items())}")


def judge(figures: dict) -> dict[str, dict]:
    """The targets: met or missed if the whole interval is, otherwise undecided."""
    verdicts = {}
    for name, target in TARGETS.items():
        if name == "memory":
            value = low = high = max(figures["memory"].values())
        else:
            value, low, high = (figures[name][key] for key in ("percent", "percent low", "percent high"))
        verdict = "met" if high < target else "missed" if low >= target else "undecided"
        verdicts[name] = {"measured": value, "target": target, "verdict": verdict}
    return verdicts


SIZES = {
    "layers": (6, "transformer layers"),
    "hidden": (512, "width of the residual stream and of the experts"),
    "experts": (16, "experts in each layer"),
    "vocabulary": (16384, "tokens in the vocabulary"),
    "sequence": (256, "tokens in a sequence"),
    "tokens": (2048, "tokens in the batch of a rank"),
    "steps": (40, "rounds of optimizer steps"),
    "iterations": (10, "rounds of whole iterations"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)")
    for name, (default, what) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, few rounds: shows that it runs, not what it costs"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        vars(args).update(
            layers=1, hidden=128, experts=2, vocabulary=512, sequence=32, tokens=64, steps=3, iterations=2
        )
    if args.worker:
        worker(args)
        return
    report = {
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "load before": os.getloadavg()[0]},
        "sizes": {name: getattr(args, name) for name in SIZES},
        "jobs": [measure(ranks, args) for ranks in args.ranks],
    }
    report["targets"] = [judge(figures) for figures in report["jobs"]]
    for figures, judged in zip(report["jobs"], report["targets"]):
        show(figures)
        for name, verdict in judged.items():
            unit = "MB" if name == "memory" else "%"
            measured = f"{verdict['measured']:.3f} {unit}, target below {verdict['target']} {unit}"
            print(f"  {verdict['verdict']:9s} {name}: {measured}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
