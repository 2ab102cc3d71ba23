"""Where a FusedAdam keeps the main params of its 16-bit params, and which of them cannot be rounded stochastically.

    Transformer Engine   `state[param]["master_param"]`: FP32, or int16 remainders (`store_param_remainders`)
    Apex                 `param_groups_master`: FP32

Both make or replace these tensors as they please (first step, loading), so they are asked for anew at each step.
Source: transformer_engine/pytorch/optimizers/fused_adam.py (2.x), apex/optimizers/fused_adam.py.
"""

from __future__ import annotations

import torch

_NEAREST = "or use mode 'nearest'"


def low_precision_params(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The optimizer's params that its kernel casts to: those in BF16 or FP16, in the order of the param groups."""
    return [
        p for group in optimizer.param_groups for p in group["params"] if p.dtype in (torch.bfloat16, torch.float16)
    ]


def main_params(optimizer: torch.optim.Optimizer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Param -> its FP32 main param or int16 remainder, for those that exist already. No copies."""
    if hasattr(optimizer, "param_groups_master"):
        pairs = zip(optimizer.param_groups, optimizer.param_groups_master)
        return {p: m for group, main in pairs for p, m in zip(group["params"], main["params"]) if m is not None}
    return {p: state["master_param"] for p, state in optimizer.state.items() if "master_param" in state}


def stores_remainders(optimizer: torch.optim.Optimizer) -> bool:
    """Whether BF16 params are the upper halves of their main params."""
    return bool(getattr(optimizer, "store_param_remainders", False))


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError, with the reason and the way out, for an optimizer whose casts hooks around `step` cannot reach."""
    name = type(optimizer).__name__
    if "DistributedFusedAdam" in {cls.__name__ for cls in type(optimizer).__mro__}:
        raise ValueError(
            "param rounding: Apex's DistributedFusedAdam starts its param all-gathers within step(), before a hook could round; "
            f"use Megatron-Core's DistributedOptimizer, or FSDP2 with megatron_sr.MasterWeights, {_NEAREST}"
        )
    if not hasattr(optimizer, "master_weights"):
        raise ValueError(
            f"param rounding: {name} is no FusedAdam with main params of its own; wrap a torch optimizer in megatron_sr.MasterWeights"
        )
    if not optimizer.master_weights:
        raise ValueError(
            f"param rounding: this {name} keeps no FP32 main params, so there is nothing to round from; "
            f"pass master_weights=True, {_NEAREST}"
        )
    dtype = getattr(optimizer, "master_weight_dtype", torch.float32)
    if dtype != torch.float32:
        raise ValueError(
            f"param rounding: this {name} keeps its main params in {dtype}, scaled; pass master_weight_dtype=torch.float32, {_NEAREST}"
        )
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        if type(param) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(
                f"param rounding: {name} holds a {type(param).__name__}; only plain BF16 and FP16 params are rounded "
                f"(DTensor: megatron_sr.MasterWeights; FP8 params: keep BF16 params), {_NEAREST}"
            )


def skipped(optimizer: torch.optim.Optimizer, step_kwargs: dict) -> bool:
    """Whether the step that just ended left the params alone: a capturable FusedAdam that met an overflow.

    Only steps that were given a grad scaler can do so; only these wait for the device.
    """
    return (
        bool(getattr(optimizer, "capturable", False))
        and step_kwargs.get("grad_scaler") is not None
        and bool(optimizer._dummy_overflow_buf.item() == 1)
    )
