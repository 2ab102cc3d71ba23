"""What defines one run of the miniature loop: equal settings and equal code give equal results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_sr import formats
from megatron_sr.formats import Format
from megatron_sr.study.miniature import bases, tasks

SCHEMES = ("once", "fixed", "fresh", "backward", "gradients", "rollout-only", "trainer-only")
"""Where and when stochastic noise is drawn.

once          once per optimizer step; trainer and rollouts hold the same bits (the paper's scheme, this project's).
fixed         as once, with the same threshold per element at every step.
fresh         a new draw for every forward pass: each mini-batch, and the rollouts.
backward      as once; the gradient of activations uses weights from a second, independent draw.
gradients     as once; weight gradients are rounded stochastically to BF16 before Adam.
rollout-only  the trainer holds the nearest weights, the rollouts a stochastic draw.
trainer-only  the reverse.
"""
ROUNDINGS = ("nearest", "stochastic")
MEGATRON_LOSS_SCALE = 2.0**32  # Megatron's default of --initial-loss-scale


@dataclass(frozen=True)
class RunSettings:
    """One run.

    base       a name in bases.BASES; it decides the task.
    grid       format to which the base is first rounded (nearest), so that every arm of a panel starts from numbers it can hold.
    format     of the weights: fp32, bf16, fp16, e8m2 .. e8m10, mxfp8 (linear layers only, behind BF16, as in Megatron).
    rounding   nearest | stochastic; scheme: see SCHEMES, for stochastic only.
    lr         of Adam (0.9, 0.999, 1e-8), constant.
    iterations, prompts, completions, mini_batches   as in the main job: mini_batches optimizer steps an iteration.
    staleness  rollouts come from the weights that many iterations ago.
    seed       of prompts, sampling, shuffling and rounding noise.
    initial_loss_scale   fp16 only: where Megatron's dynamic loss scale starts.
    evaluate_every       iterations between evaluations of the exact reward; score_main_params_every: of the FP32 main params' own.

    Raises ValueError for what cannot run.
    """

    base: str = "addition-0"
    grid: str = "bf16"
    format: str = "bf16"
    rounding: str = "nearest"
    scheme: str = "once"
    lr: float = 1e-6
    iterations: int = 40
    seed: int = 0
    staleness: int = 0
    prompts: int = 64
    completions: int = 8
    mini_batches: int = 4
    initial_loss_scale: float = MEGATRON_LOSS_SCALE
    evaluate_every: int = 2
    score_main_params_every: int = 10

    def __post_init__(self):
        if self.base not in bases.BASES:
            raise ValueError(f"base {self.base!r} is not known; choose one of: {', '.join(bases.BASES)}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding {self.rounding!r} is not known; choose one of: {', '.join(ROUNDINGS)}")
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme {self.scheme!r} is not known; choose one of: {', '.join(SCHEMES)}")
        if self.rounding == "nearest" and self.scheme != "once":
            raise ValueError(f"scheme {self.scheme!r} is about stochastic noise; with rounding nearest leave it out")
        for name in (self.grid, self.format):
            number_format(name)
        if self.format == "fp32" and self.rounding == "stochastic":
            raise ValueError("format fp32: FP32 main params are not rounded; use rounding nearest")
        if self.prompts % self.mini_batches:
            raise ValueError(f"{self.prompts} prompts cannot be shared by {self.mini_batches} mini-batches")
        if (
            self.completions < 2
            or min(self.iterations, self.mini_batches, self.evaluate_every) < 1
            or self.staleness < 0
        ):
            raise ValueError(f"{self}: completions must be at least 2, counts at least 1, staleness at least 0")

    @property
    def task(self):
        return tasks.get(bases.BASES[self.base][0])

    def to_dict(self) -> dict:
        """Plain values for JSON; `RunSettings(**dict)` takes them back."""
        return dataclasses.asdict(self)


def number_format(name: str) -> Format | None:
    """The Format of that name; None for fp32. e8m2 and e8m3, coarser than what the product offers, exist for this study alone.

    Raises ValueError for an unknown name.
    """
    if name == "fp32":
        return None
    if name in ("e8m2", "e8m3"):
        bits = int(name[-1])
        return dataclasses.replace(formats.E8M4, name=name, mantissa_bits=bits, max_finite=(2 - 2.0**-bits) * 2.0**127)
    return formats.get(name)
