"""Transformer Engine's / Apex's FusedAdam in plain torch: the same interface, state and param-group keys, FP32 arithmetic."""

from __future__ import annotations

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam(W) with one step count per param group, as Megatron's distributed checkpoints expect it.

    Source: transformer_engine/pytorch/optimizers/fused_adam.py (state `exp_avg`, `exp_avg_sq`; group key `step`).
    params: FP32 shards; each parameter's `grad` has its shape. Keyword arguments that only steer CUDA kernels are accepted.

    Every operation rounds once (no fused multiply-add), so an element's result does not depend on where in a vector register
    it lies: data-, tensor- and pipeline-parallel layouts give equal main params from equal gradients.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        **cuda_only,
    ):
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:  # an empty group's count stays behind, as Transformer Engine's does
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict) -> None:
        beta1, beta2 = group["betas"]
        correction1 = correction2 = 1.0
        if group["bias_correction"]:
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        state, grad = self.state[param], param.grad.float()
        if not state:
            state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
        if not self.adam_w_mode:
            grad = grad + param * group["weight_decay"]
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.mul_(beta1).add_(grad * (1 - beta1))
        exp_avg_sq.mul_(beta2).add_(grad.square().mul_(1 - beta2))
        update = (exp_avg / correction1).div_((exp_avg_sq / correction2).sqrt_().add_(group["eps"]))
        if self.adam_w_mode:
            update.add_(param * group["weight_decay"])
        param.sub_(update.mul_(group["lr"]))
