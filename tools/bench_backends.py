"""Optimizer steps with nearest and stochastic rounding, per backend: `python tools/bench_backends.py [--json FILE]`.

All cases of a backend take their steps in turn, in an order that turns round at every round, so that a busy machine slows them alike;
ratios are medians over the rounds of the ratio within a round. The gradients are there already: only step() is measured. Two times are
shown: the wall's, and the processor's, which other programs disturb less. Memory is counted, not measured: the bytes of params,
gradients, main params and optimizer state after a step, per parameter.

    MasterWeights, AdamW         main params and rounding in one launch (kernels/adamw.py)
    MasterWeights, torch AdamW   torch's own foreach step on the main params, then one launch that rounds
    MasterWeights, SGD           the same with a cheaper step: the overhead is the largest share here
    FusedAdam hooks              a stand-in for Transformer Engine's FusedAdam whose kernel is this project's fused AdamW with a nearest
                                 cast: a fast kernel, so that the pass which the hook adds is as large a share as it can be
    torch AdamW, BF16 only       no main params: what a plain BF16 run does
    torchao _AdamW, stochastic   no main params: rounds FP32 temporaries of single params (needs torchao)

Megatron-Core's own benchmark is tools/bench_megatron.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import megatron_sr as sr

ROOT = Path(__file__).resolve().parents[1]
TARGET = 1.02  # stochastic over nearest, time of a step


class Case(NamedTuple):
    optimizer: torch.optim.Optimizer
    params: list[nn.Parameter]


class Times(NamedTuple):
    wall: float
    processor: float


def model_of(elements: int, device: str) -> nn.Module:
    """Layers as a Transformer has them: square and 4:1 matrices, and norms; at least `elements` parameters."""
    width = 1024
    layer = lambda: nn.ModuleList(
        [nn.Linear(width, width, bias=False), nn.Linear(width, 4 * width, bias=False), nn.LayerNorm(width)]
    )
    count = -(-elements // (5 * width * width + 2 * width))
    return nn.ModuleList(layer() for _ in range(count)).to(device=device, dtype=torch.bfloat16)


def master(optimizer_class, mode: str, **options) -> Callable:
    return lambda model: sr.MasterWeights(
        optimizer_class, model, rounding=sr.ParamRounding(mode=mode), lr=1e-6, **options
    )


def torchao_adamw(model: nn.Module):
    from torchao.optim import _AdamW

    return _AdamW(model.parameters(), lr=1e-6, bf16_stochastic_round=True)


def fused_adam(mode: str, remainders: bool) -> Callable:
    sys.path.insert(0, str(ROOT))
    from megatron_sr.fused_adam.hooks import round_fused_adam
    from megatron_sr.kernels.adamw import fused_adamw_step_
    from tests.backends.fused_adam_stand_in import TransformerEngineStandIn

    class FusedAdam(TransformerEngineStandIn):
        def _kernel(self, param, update, exp_avg, exp_avg_sq, master_param) -> None:
            settings = {name: self.param_groups[0][name] for name in ("step", "lr", "betas", "eps", "weight_decay")}
            fused_adamw_step_(param.detach(), master_param, param.grad, exp_avg, exp_avg_sq, **settings)

    def make(model: nn.Module):
        optimizer = FusedAdam(model.parameters(), lr=1e-6, store_param_remainders=remainders)
        identities = {p: (name, [sr.Segment(0, p.numel(), 0)]) for name, p in model.named_parameters()}
        round_fused_adam(optimizer, identities, sr.ParamRounding(mode=mode))
        return optimizer

    return make


def groups(with_torchao: bool) -> dict[str, dict[str, Callable]]:
    """Backend -> case -> model -> optimizer. The first case of a backend is what the others are compared with."""

    def both(optimizer_class, **options):
        return {mode: master(optimizer_class, mode, **options) for mode in ("nearest", "stochastic")}

    plain = {"torch AdamW, BF16 only": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-6)}
    if with_torchao:
        plain["torchao _AdamW, stochastic"] = torchao_adamw
    plain["MasterWeights, AdamW, stochastic"] = master(torch.optim.AdamW, "stochastic")
    return {
        "MasterWeights, AdamW": both(torch.optim.AdamW),
        "MasterWeights, torch AdamW": both(torch.optim.AdamW, foreach=True),
        "MasterWeights, SGD": both(torch.optim.SGD, momentum=0.9),
        "FusedAdam hooks, FP32 main params": {mode: fused_adam(mode, False) for mode in ("nearest", "stochastic")},
        "FusedAdam hooks, remainders": {mode: fused_adam(mode, True) for mode in ("nearest", "stochastic")},
        "without main params": plain,
    }


def measured(case: Case) -> Times:
    synchronize = torch.cuda.synchronize if case.params[0].is_cuda else lambda: None
    synchronize()
    wall, processor = time.perf_counter(), time.process_time()
    case.optimizer.step()
    synchronize()
    return Times(time.perf_counter() - wall, time.process_time() - processor)


def bytes_per_param(case: Case) -> float:
    """Of params, gradients and everything in the optimizer's state."""
    state = [t for values in case.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    tensors = {t.data_ptr(): t for t in [*case.params, *(p.grad for p in case.params), *state]}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    return total / sum(p.numel() for p in case.params)


def bench(cases: dict[str, Callable], elements: int, device: str, rounds: int) -> dict[str, dict]:
    built = {}
    for name, make in cases.items():
        model = model_of(elements, device)
        params = list(model.parameters())
        for parameter in params:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        built[name] = Case(make(model), params)
        for _ in range(2):
            built[name].optimizer.step()
    base, times = next(iter(built)), {name: [] for name in built}
    for number in range(rounds):
        for name in list(built) if number % 2 else reversed(built):
            times[name].append(measured(built[name]))
    count = sum(p.numel() for p in built[base].params)
    return {
        name: {
            "ns_per_param": round(statistics.median(t.wall for t in times[name]) / count * 1e9, 4),
            "over_first": round(statistics.median(t.wall / b.wall for t, b in zip(times[name], times[base])), 4),
            "processor_over_first": round(
                statistics.median(t.processor / b.processor for t, b in zip(times[name], times[base])), 4
            ),
            "bytes_per_param": round(bytes_per_param(case), 2),
            "params": count,
        }
        for name, case in built.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=int, default=52_000_000, help="parameters of the model (default: 52 million)"
    )
    parser.add_argument(
        "--backends", nargs="+", metavar="WORD", help="only those whose name contains one of these words"
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="a small model, few rounds: shows that it runs, not how fast"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    if args.quick:
        args.elements, args.rounds = 1_000_000, 3
    torch.set_num_threads(args.threads)
    try:
        import torchao
    except ImportError:
        torchao = None
        print("torchao is not installed: its case is left out (pip install torchao)")
    report = {}
    for backend, cases in groups(torchao is not None).items():
        if args.backends and not any(word in backend for word in args.backends):
            continue
        report[backend] = bench(cases, args.elements, args.device, args.rounds)
        print(f"\n{backend}")
        for name, figures in report[backend].items():
            print(
                f"  {name:34s} {figures['ns_per_param']:8.3f} ns/param   {figures['over_first']:7.3f} of the first "
                f"({figures['processor_over_first']:.3f} in processor time)   {figures['bytes_per_param']:5.2f} bytes/param"
            )
        if "stochastic" in report[backend]:
            ratio = report[backend]["stochastic"]["over_first"]
            print(
                f"  {'met' if ratio <= TARGET else 'missed'}: stochastic over nearest {ratio:.3f}, target at most {TARGET}"
            )
    if args.json:
        versions = {
            "megatron_sr": sr.__version__,
            "torch": torch.__version__,
            "torchao": getattr(torchao, "__version__", None),
        }
        settings = {"threads": args.threads, "device": args.device, "rounds": args.rounds, "cpus": os.cpu_count()}
        Path(args.json).write_text(
            json.dumps({"versions": versions, "settings": settings, "backends": report}, indent=1)
        )


if __name__ == "__main__":
    main()
