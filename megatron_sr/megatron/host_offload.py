"""--optimizer-cpu-offload on a machine without CUDA. Part of `host.install()`.

Megatron's HybridDeviceOptimizer tells main params on the device from those on the host by `is_cuda`, which is False for all of
them here. This stand-in for a missing GPU calls everything "on the device" that has not been offloaded; both lie in the same memory.
What steps, copies and saves them stays Megatron's own code.
"""

from __future__ import annotations

import torch


def install() -> None:
    """Replace `HybridDeviceOptimizer._get_sub_optimizer_param_groups`. Once per process."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _sub_optimizer_param_groups


def _sub_optimizer_param_groups(self, offload_fraction: float):
    """Offloaded groups, device groups, param -> offloaded copy, its inverse, param -> FP32 main param: as Megatron's method."""
    numel = sum(param.numel() for group in self.param_groups for param in group["params"])
    offloaded, device, copy_of, param_of, main_of = [], [], {}, {}, {}
    done = 0
    for group in self.param_groups:
        split = {True: [], False: []}
        for param in group["params"]:
            offload = done < numel * offload_fraction
            inner = param
            if self.param_update_in_fp32 and param.dtype != torch.float32:
                inner = main_of[param] = param.detach().clone().float()
            if offload:
                done += param.numel()
                inner = param.detach().clone() if inner is param else inner
                copy_of[param], param_of[inner] = inner, param
            split[offload].append(inner)
        for groups, params in ((offloaded, split[True]), (device, split[False])):
            if params:
                groups.append({**group, "params": params})
    return offloaded, device, copy_of, param_of, main_of
