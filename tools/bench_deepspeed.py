"""DeepSpeed's optimizer step with nearest and stochastic rounding: `python tools/bench_deepspeed.py [--json FILE]`.

One process, one rank. Two engines of a kind, one for each mode, take their steps in turn, in an order that turns round at every
round; ratios are medians over the rounds of the ratio within a round. Only the DeepSpeed optimizer's step() is timed: norm, AdamW, cast,
the all-gather of one rank. Without a GPU everything runs on the CPU. `bench` is also called by tools/bench_backends.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

TARGET = 1.02  # stochastic over nearest, time of a step
KINDS = {
    "no ZeRO": {"stage": 0},
    "ZeRO 1": {"stage": 1},
    "ZeRO 2, CPU offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "ZeRO 3": {"stage": 3},
}


class Layers(nn.Module):
    """Matrices and norms as in a Transformer, at least `elements` parameters, and little to compute."""

    def __init__(self, elements: int, width: int = 1024):
        super().__init__()
        count = -(-elements // (5 * width * width + 2 * width))
        self.square = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(count))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(count))

    def forward(self, x):
        for square, wide, norm in zip(self.square, self.wide, self.norm):
            x = norm(x + square(x) + wide(x).unflatten(-1, (4, -1)).sum(-2))
        return x.float().pow(2).mean()


class Arm:
    """An engine and the times of its optimizer's steps: (wall, processor) [s]."""

    def __init__(self, kind: str, mode: str, elements: int):
        import deepspeed

        from megatron_sr.config import ParamRounding
        from megatron_sr.deepspeed import enable

        torch.manual_seed(0)
        model = Layers(elements)
        self.params, self.times = sum(p.numel() for p in model.parameters()), []
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"overlap_comm": False, **KINDS[kind]},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        enable(self.engine, ParamRounding(mode=mode, seed=1))
        self._step, self.engine.optimizer.step = self.engine.optimizer.step, self._timed

    def _timed(self, *args):
        synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        synchronize()
        began, processor = time.perf_counter(), time.process_time()
        self._step(*args)
        synchronize()
        self.times.append((time.perf_counter() - began, time.process_time() - processor))

    def step(self) -> None:
        self.engine.backward(self.engine(torch.ones(1, 1024, dtype=torch.bfloat16, device=self.engine.device)))
        self.engine.step()


def bench(elements: int, rounds: int, kinds=tuple(KINDS)) -> dict[str, dict]:
    """Kind -> ns per parameter of both modes, stochastic over nearest in wall and in processor time, parameters.

    Starts a process group of one rank if there is none."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a C++ build of minutes, of no use to one rank
    deepspeed.logger.setLevel("ERROR")
    if not torch.distributed.is_initialized():
        os.environ.update(
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        )
        store = torch.distributed.HashStore()
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(verbose=False)
    results = {}
    for kind in kinds:
        arms = {mode: Arm(kind, mode, elements) for mode in ("nearest", "stochastic")}
        for number in range(rounds + 2):  # two to warm up
            for mode in list(arms) if number % 2 else reversed(arms):
                arms[mode].step()
        times = {mode: arm.times[2:] for mode, arm in arms.items()}
        count = arms["nearest"].params
        wall, processor = ({mode: [t[i] for t in times[mode]] for mode in times} for i in (0, 1))
        over = lambda of: statistics.median(s / n for s, n in zip(of["stochastic"], of["nearest"]))
        results[kind] = {
            **{f"{mode}_ns_per_param": round(statistics.median(wall[mode]) / count * 1e9, 4) for mode in wall},
            "stochastic_over_nearest": round(over(wall), 4),
            "stochastic_over_nearest_processor": round(over(processor), 4),
            "params": count,
        }
        print(f"{kind:22s} " + "  ".join(f"{name} {value}" for name, value in results[kind].items()), flush=True)
        del arms
        gc.collect()  # engines are in reference cycles
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=int, default=52_000_000, help="parameters of the model (default: 52 million)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = bench(args.elements, args.rounds, args.kinds)
    print(f"target: stochastic_over_nearest at most {TARGET}")
    if args.json:
        args.json.write_text(
            json.dumps({"threads": args.threads, "target": TARGET, "results": results}, indent=2) + "\n"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
