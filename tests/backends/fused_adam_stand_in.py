"""Stand-ins, in plain torch on CPUs, for FusedAdam of Transformer Engine and Apex, whose kernels need a GPU.

They follow the documented interface and the algebra of the kernels: FP32 main params, or a BF16 param with the lower 16
bits of its main param as int16, `if (rem < 0) p--` before the update and `if (rem < 0) p++` after it.
Source: transformer_engine/pytorch/optimizers/fused_adam.py, common/multi_tensor/adam.cu; apex/optimizers/fused_adam.py.
"""

from __future__ import annotations

import torch

from megatron_sr.kernels.adamw import make_update
from megatron_sr.kernels.adamw_reference import update_


class TransformerEngineStandIn(torch.optim.Optimizer):
    """FusedAdam(master_weights=True), with or without `store_param_remainders`."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        master_weights=True,
        master_weight_dtype=torch.float32,
        store_param_remainders=False,
    ):
        super().__init__(params, dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay))
        self.master_weights, self.master_weight_dtype = master_weights, master_weight_dtype
        self.store_param_remainders = store_param_remainders
        self.fail_after = None  # for tests: raise when so many params have been updated

    def _remainders(self, param) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        loss = closure() if closure is not None else None
        done = 0
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            update = make_update(group["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    self._initialize(param)
                if self._gradient(param) is None:
                    continue
                if done == self.fail_after:
                    raise RuntimeError("the kernel failed")
                self._kernel(param, update, **state)
                done += 1
        return loss

    def _gradient(self, param):
        return param.grad

    def _initialize(self, param) -> None:
        state = self.state[param]
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param, dtype=torch.float32) for _ in range(2))
        if self._remainders(param):
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        else:
            state["master_param"] = param.detach().float()

    def _kernel(self, param, update, exp_avg, exp_avg_sq, master_param) -> None:
        main = _join(param, master_param) if self._remainders(param) else master_param
        update_(main.view(-1), self._gradient(param).float().view(-1), exp_avg.view(-1), exp_avg_sq.view(-1), update)
        if self._remainders(param):
            _split(param, master_param, main)
        else:
            param.copy_(main)  # static_cast to nearest, as the kernel does

    def get_unscaled_state(self, param, state_name):
        state = self.state[param][state_name]
        assert state.dtype == (
            torch.int16 if state_name == "master_param" and self._remainders(param) else torch.float32
        )
        return state

    def set_scaled_state(self, param, state_name, unscaled_state):
        assert unscaled_state.dtype == (
            torch.int16 if state_name == "master_param" and self._remainders(param) else torch.float32
        )
        self.state[param].setdefault(state_name, torch.empty_like(unscaled_state)).copy_(unscaled_state)

    def state_dict(self):
        state_dict = super().state_dict()
        params = [p for group in self.param_groups for p in group["params"]]
        state_dict["state"] = {
            number: {name: self.get_unscaled_state(params[number], name) for name in state}
            for number, state in state_dict["state"].items()
        }
        return state_dict

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        # Torch's hooks may hand out another dict; upstream goes on with the caller's own.
        params = [p for group in self.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            param = params[number]
            self.state[param] = {}
            for name, value in state.items():
                if name == "master_param" and self._remainders(param):
                    self.set_scaled_state(param, name, value)
                    assert value.dtype == torch.int16
                else:
                    self.set_scaled_state(param, name, value.float())


class ApexStandIn(torch.optim.Optimizer):
    """FusedAdam(master_weights=True, capturable=True): main params lie in `param_groups_master`; an overflow that the grad
    scaler has found makes the kernel return at once."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, *, master_weights=True):
        super().__init__(params, dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay))
        self.master_weights, self.capturable = master_weights, True
        self.param_groups_master = [
            {"params": [p.detach().float() if master_weights else None for p in group["params"]]}
            for group in self.param_groups
        ]
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        self._dummy_overflow_buf.fill_(0 if grad_scaler is None else grad_scaler.found_inf)
        if self._dummy_overflow_buf.item():
            return
        for group, mains in zip(self.param_groups, self.param_groups_master):
            group["step"] = group.get("step", 0) + 1
            update = make_update(group["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for param, main in zip(group["params"], mains["params"]):
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(main))
                flat = [t.view(-1) for t in (main, param.grad.float(), state["exp_avg"], state["exp_avg_sq"])]
                update_(*flat, update)
                param.copy_(main)


def _join(param, remainder) -> torch.Tensor:
    high, low = (t.view(torch.int16).int() for t in (param, remainder))
    high = high - (low < 0).int()
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def _split(param, remainder, main) -> None:
    bits = main.view(torch.int32)
    remainder.copy_(bits & 0xFFFF)  # keeps the lower 16 bits
    param.view(torch.int16).copy_((bits >> 16) + (remainder < 0).int())
