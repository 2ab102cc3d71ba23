"""Rank-side helpers of the DeepSpeed tests: a small model of awkward sizes, engines of every kind, and what they must hold."""

from __future__ import annotations

import hashlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param

import megatron_sr as sr
from megatron_sr.deepspeed import enable

SEED = 77
CONFIG = sr.ParamRounding(seed=SEED)

_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
KINDS = {
    "none": {},
    "none, fused": {},
    "ZeRO 1": {"stage": 1},
    "ZeRO 1, BF16_Optimizer": {"stage": 1},
    "ZeRO 1, offload": {"stage": 1, **_OFFLOAD},
    "ZeRO 2": {"stage": 2},
    "ZeRO 2, round robin": {"stage": 2, "round_robin_gradients": True},
    "ZeRO 2, offload": {"stage": 2, **_OFFLOAD},
    "ZeRO 3": {"stage": 3},
    "ZeRO 3, persistent params": {"stage": 3, "stage3_param_persistence_threshold": 10**6},
    "ZeRO 3, sub-groups": {"stage": 3, "sub_group_size": 200},
    "ZeRO 3, offload": {"stage": 3, **_OFFLOAD},
    "ZeRO 3, offload of params": {"stage": 3, **_OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": False}},
}
"""Name -> the config's "zero_optimization"."""


def start_ranks() -> None:
    torch.set_num_threads(1)
    deepspeed.logger.setLevel("ERROR")
    # A C++ build of minutes; gloo alone gives the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    # DeepSpeed asks whether this CPU is fast in FP16; torch computes it on any.
    get_accelerator().is_fp16_supported = lambda: True


class Model(torch.nn.Module):
    """Three tensors whose sizes no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 33)
        self.norm = torch.nn.LayerNorm(33)
        self.second = torch.nn.Linear(33, 7, bias=False)

    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x))))


class Growth(torch.optim.Optimizer):
    """Main params grow by 1e-4: below half a BF16 ulp, and the same for every number of ranks.

    Not without gradients: DeepSpeed steps once on zeros to make the optimizer's state.
    """

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.grad.any():
                    param.data.mul_(1 + 1e-4)
                self.state[param]["step"] = torch.tensor(1.0)


def adamw(params):
    return torch.optim.AdamW(params, lr=3e-5, weight_decay=0.1)


def make_engine(
    kind: str,
    optimizer=Growth,
    rounding: sr.ParamRounding | None = CONFIG,
    model: torch.nn.Module | None = None,
    identities: dict | None = None,
    zero: dict | None = None,
    **settings,
):
    """An engine of this kind and its rounding (None for `rounding` leaves DeepSpeed alone).

    zero, settings  more of "zero_optimization" and of the whole config.
    """
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"overlap_comm": False, "stage3_param_persistence_threshold": 0}
        | KINDS[kind]
        | (zero or {}),
    } | settings
    if "BF16_Optimizer" in kind:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    model = model or Model()
    inner = optimizer(model.parameters())
    fused = deepspeed.runtime.engine.FusedAdam
    if (
        "fused" in kind
    ):  # a stand-in: only its class decides that DeepSpeed takes FP16_Optimizer; the real one needs a GPU
        deepspeed.runtime.engine.FusedAdam = type(inner)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=settings)
    finally:
        deepspeed.runtime.engine.FusedAdam = fused
    return engine, enable(engine, rounding, identities) if rounding else None


def train(engine, *numbers: int, scale: float = 1.0) -> None:
    """One micro-batch for each number; all ranks have the same data, so sums over ranks are exact."""
    dtype = torch.float16 if engine.fp16_enabled() else torch.bfloat16
    for number in numbers:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).to(dtype)
        engine.backward(engine(x).float().pow(2).mean() * scale)
        engine.step()


def weights(engine) -> dict[str, torch.Tensor]:
    """The whole model params, as the next forward pass uses them. Collective."""
    whole = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            whole[name] = param.detach().clone()
    return whole


def main_params(engine) -> dict[str, torch.Tensor]:
    """The whole FP32 main params. Collective."""
    if engine.zero_optimization():
        return {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}
    optimizer, mains = engine.optimizer, {}
    for group, params in enumerate(optimizer.fp16_groups):
        if hasattr(optimizer, "fp32_groups_flat"):
            flat = optimizer.fp32_groups_flat[group].detach().split([param.numel() for param in params])
        else:
            flat = optimizer.fp32_groups[group]
        mains |= {engine.param_names[p]: m.detach().clone().view(p.shape) for p, m in zip(params, flat)}
    return mains


def rounded(
    mains: dict[str, torch.Tensor], step: int, format: str = "bf16", stochastic=lambda name: True, seed: int = SEED
) -> dict[str, torch.Tensor]:
    """What C1 says the weights must be: the reference kernel on whole tensors."""
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    return {
        name: sr.round_to_(
            torch.empty(main.shape, dtype=dtype),
            main.contiguous(),
            noise=sr.Noise(seed, step, name) if stochastic(name) else None,
            format=format,
            backend="reference",
        )
        for name, main in mains.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Equal on all ranks, or 'ranks differ'. Collective."""
    mine = hashlib.sha256()
    for name in sorted(tensors):
        mine.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.int16).numpy().tobytes())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine.hexdigest())
    return everyone[0] if len(set(everyone)) == 1 else "ranks differ"


def share_changed_by_rounding(weights: dict, mains: dict) -> float:
    """The share of elements that are not the nearest BF16 value of their main param."""
    total = sum(w.numel() for w in weights.values())
    return sum((weights[n] != mains[n].to(weights[n].dtype)).sum().item() for n in weights) / total


def refusal(attempt) -> str | None:
    """The message with which `attempt` is refused, or None."""
    try:
        attempt()
    except Exception as error:
        return str(error)
    return None
