"""The place of model params: a flat tensor that rounds whatever FP32 main params are copied into it.

DeepSpeed has no callback between its optimizer's step and the all-gather. But all its ZeRO optimizers cast in one way,

    flat_model_params.data.copy_(flat_main_params.data)

in the step, when a checkpoint is loaded, under CPU offload. So the destination decides: `RoundedPlace` shares the memory of the flat
model params and stands in their list; to everything but `copy_` from FP32 it is that tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import Segment
from megatron_sr.rounding import RoundingPlan


class RoundedPlace(torch.Tensor):
    """A view of flat 16-bit model params whose `copy_` from FP32 calls `write(src)` instead of casting to nearest."""

    # Results of operations are plain tensors: only this object is special.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, flat: torch.Tensor, write: Callable[[torch.Tensor], None]) -> RoundedPlace:
        place = flat.as_subclass(cls)
        place._write = write
        return place

    @property
    def data(self) -> RoundedPlace:
        return self

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> RoundedPlace:
        if src.dtype == torch.float32:
            self._write(src)
            return self
        return super().copy_(src, non_blocking)  # saved model params: the same bits


class Rounding:
    """Rounding of main params into model params, one launch each time.

    model, main  equally long lists of contiguous tensors, as `RoundingPlan` takes them; storage that moves (`.data = ...`) is followed.
    pieces       (key, [Segment, ...]) for each pair.
    config       a ParamRounding whose format is settled. Keys that it does not choose are rounded to nearest.
    step         gives the step of the draw.
    """

    def __init__(self, model: list, main: list, pieces: list, config: ParamRounding, step: Callable[[], int]):
        self.config, self._step = config, step
        self.written: int | None = None
        chosen = [config.rounds(key) for key, _ in pieces]
        self._plans = [
            RoundingPlan(
                *(
                    [value for value, mine in zip(values, chosen) if mine == stochastic]
                    for values in (model, main, pieces)
                ),
                seed=config.seed if stochastic else None,
                stream=config.stream,
                format=config.format,
            )
            for stochastic in (True, False)
            if stochastic in chosen
        ]

    @torch.no_grad()
    def run_(self) -> None:
        """Round with the draw of the current step."""
        step = self._step()
        for plan in self._plans:
            plan.run_(0 if self.config.noise == "fixed" else step)
        self.written = step


class PartitionRounding(Rounding):
    """Rounding of one rank's flat partition of main params into its flat partition of model params.

    flat    model params, 1-D.
    main    FP32 main params, 1-D, as long as `flat`. On another device (CPU offload) the kernel of that device rounds, and the
            result is copied.
    pieces  (key, [Segment, ...]) for each parameter that has elements here; local positions count from the partition's start.
            Padding belongs to none and is left as it is.
    staged  None: whether the devices differ.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        main: torch.Tensor,
        pieces: list[tuple[str, list[Segment]]],
        config: ParamRounding,
        step: Callable[[], int],
        staged: bool | None = None,
    ):
        staged = flat.device != main.device if staged is None else staged
        # Zeros: padding is copied as well.
        self._flat, self._main, self._stage = flat, main, torch.zeros_like(flat, device=main.device) if staged else None
        target = self._stage if staged else flat
        super().__init__([target] * len(pieces), [main] * len(pieces), pieces, config, step)

    def write(self, src: torch.Tensor) -> None:
        """What a `RoundedPlace` does with FP32 values. RuntimeError unless they are this partition's main params."""
        if src.data_ptr() != self._main.data_ptr() or src.numel() != self._main.numel():
            raise RuntimeError(
                "param_rounding: DeepSpeed wrote model params from something else than its FP32 main params, so this version or "
                'feature of DeepSpeed is not supported; use "param_rounding": {"mode": "nearest"}'
            )
        self.run_()
        if self._stage is not None:
            self._flat.copy_(self._stage)
