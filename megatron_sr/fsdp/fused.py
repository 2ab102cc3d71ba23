"""torch.optim.AdamW's step and the rounding as one launch over all params of a group (kernels/adamw.py).

State and hyperparameters stay where torch.optim.AdamW keeps them, so checkpoints are interchangeable. Results differ from
torch's own by rounding errors of the arithmetic, see docs/numerics.md, section 6; they do not depend on where an element
lies, so a sharded run equals an unsharded one bit for bit.
"""

from __future__ import annotations

import torch

from megatron_sr.fsdp.coordinates import local, same_placement
from megatron_sr.fsdp.pieces import Piece, Rounding
from megatron_sr.kernels.adamw import AdamWPlan

_PLANS = 16  # kept: without gradients for some params (unused experts) every set of the others needs its own


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the fused step computes what this optimizer would: AdamW itself, no option that changes the algorithm or
    chooses an implementation of torch's (`foreach=`, `fused=` leave the step to torch)."""
    options = ("amsgrad", "maximize", "capturable", "differentiable", "foreach", "fused")
    return type(optimizer) is torch.optim.AdamW and not any(
        group.get(name) not in (None, False) or (name in ("foreach", "fused") and group.get(name) is not None)
        for group in optimizer.param_groups
        for name in options
    )


class FusedAdamW:
    """The fused step of the low-precision params of one AdamW over main params."""

    def __init__(self, optimizer: torch.optim.AdamW, rounding: Rounding):
        self._optimizer, self._rounding = optimizer, rounding
        self._plans: dict = {}
        self._generation = 0

    def forget(self) -> None:
        """Tensors have been replaced: plans are made anew."""
        self._plans.clear()

    def step(self, groups: list[list[Piece]], step: int) -> None:
        """One AdamW step of the pieces that have gradients, by param group, rounded with the noise of `step`."""
        self._rounding.refresh()
        if self._rounding.generation != self._generation:
            self._generation = self._rounding.generation
            self.forget()
        missing = False
        for number, (pieces, settings) in enumerate(zip(groups, self._optimizer.param_groups)):
            batches: dict = {}
            for i, piece in enumerate(pieces):
                if piece.param.grad is None:
                    missing = True
                    continue
                state = self._state(piece.main)
                state["step"] += 1
                if local(piece.main).numel():
                    grad = _grad(piece.param)
                    batch = (int(state["step"]), self._rounding.stochastic(piece), grad.dtype)
                    batches.setdefault(batch, []).append((i, grad))
            for (count, stochastic, _), members in batches.items():
                plan = self._plan(number, pieces, [i for i, _ in members], stochastic)
                plan.step_(
                    [grad for _, grad in members],
                    step=count,
                    lr=float(settings["lr"]),
                    betas=tuple(float(beta) for beta in settings["betas"]),
                    eps=settings["eps"],
                    weight_decay=settings["weight_decay"],
                    noise_step=self._rounding.noise_step(step),
                )
        if missing:  # params without gradient are rounded anew too, as every main param at every step; the others stay as they are
            self._rounding.run_(step)
        self._rounding.written()

    def _state(self, main: torch.Tensor) -> dict:
        state = self._optimizer.state[main]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(main), torch.zeros_like(main)
        return state

    def _plan(self, group: int, pieces: list[Piece], chosen: list[int], stochastic: bool) -> AdamWPlan:
        key = (group, tuple(chosen), stochastic)
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.pop(next(iter(self._plans)))
            config, members = self._rounding.config, [pieces[i] for i in chosen]
            states = [self._optimizer.state[piece.main] for piece in members]
            self._plans[key] = AdamWPlan(
                [local(piece.param.detach()) for piece in members],
                [local(piece.main) for piece in members],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [(piece.key, piece.segments) for piece in members],
                seed=config.seed if stochastic else None,
                stream=config.stream,
                format=config.format or "bf16",
            )
        return self._plans[key]


def _grad(param: torch.Tensor) -> torch.Tensor:
    grad = local(same_placement(param.grad, param).detach())
    return (grad if grad.dtype in (torch.float32, torch.bfloat16) else grad.float()).contiguous()
