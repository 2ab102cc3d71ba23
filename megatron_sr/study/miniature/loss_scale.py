"""FP16 gradients under a dynamic loss scale, as Megatron-Core's `DynamicGradScaler` updates it (optimizer/grad_scaler.py, 0.19).

After `hysteresis` overflows since the last growth every further overflow halves the scale, down to `min_scale`; `growth_interval`
steps in a row without overflow double it. A step whose gradients overflow is skipped. Defaults are those of Megatron's flags.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class DynamicLossScale:
    scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2

    def __post_init__(self):
        self._stable, self._tolerated = 0, self.hysteresis

    def update(self, overflow: bool) -> None:
        """After every attempted step."""
        if overflow:
            self._stable = 0
            self._tolerated -= 1
            if self._tolerated <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self._stable += 1
        if self._stable == self.growth_interval:
            self._stable, self._tolerated = 0, self.hysteresis
            self.scale *= self.growth_factor

    def unscale_(self, grad: torch.Tensor) -> bool:
        """FP32 gradients of the scaled loss, in place: cast to FP16 as an FP16 backward pass stores them, then divided by the scale.

        Returns whether one overflowed; the gradients are then not to be used.
        """
        half = grad.half()
        grad.copy_(half).div_(self.scale)
        return not torch.isfinite(half).all().item()
