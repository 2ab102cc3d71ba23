"""From the FP32 main params to the weights that compute, by the project's own rounding (`RoundingPlan`, `mxfp8.quantize`)."""

from __future__ import annotations

import torch

from megatron_sr import mxfp8
from megatron_sr.coordinates import Segment
from megatron_sr.formats import BF16
from megatron_sr.noise import Noise
from megatron_sr.rounding import RoundingPlan
from megatron_sr.study.miniature.model import ModelConfig, views
from megatron_sr.study.miniature.settings import number_format

MXFP8_SUFFIXES = ("qkv", "proj", "fc1", "fc2")  # linear layers; embeddings, norms and the output layer stay BF16


class WeightRounder:
    """Rounds flat FP32 buffers of a model's tensors, each under its own key.

    main    [numel] FP32, read at every call.
    format  as in RunSettings; fp32 copies.
    seed    of the noise; None rounds to nearest.
    stream  of the noise; MXFP8's second rounding uses stream + 1.
    """

    def __init__(self, main: torch.Tensor, config: ModelConfig, format: str, seed: int | None, stream: int = 0):
        self._main, self._config, self._seed, self._stream = main, config, seed, stream
        self._format = number_format(format)
        self._is_mxfp8 = format == "mxfp8"
        if self._format is None:
            return
        first = BF16 if self._is_mxfp8 else self._format
        self._buffer = torch.empty(config.numel, dtype=first.storage[-1])  # simulated formats: FP32 holds all of them
        destinations = views(self._buffer, config)
        self._plan = RoundingPlan(
            [tensor.flatten() for tensor in destinations.values()],
            [tensor.flatten() for tensor in views(main, config).values()],
            [(name, [Segment(0, tensor.numel(), 0)]) for name, tensor in destinations.items()],
            seed=seed,
            stream=stream,
            format=first,
        )

    def round_(self, flat: torch.Tensor, step: int) -> None:
        """Write the weights of this step, as FP32 numbers, into `flat` [numel]."""
        if self._format is None:
            flat.copy_(self._main)
            return
        self._plan.run_(step)
        flat.copy_(self._buffer)
        if not self._is_mxfp8:
            return
        source = views(self._buffer, self._config)
        for name, weight in views(flat, self._config).items():
            if name.endswith(MXFP8_SUFFIXES):
                noise = None if self._seed is None else Noise(self._seed, step, name, self._stream + 1)
                weight.copy_(mxfp8.quantize(source[name], noise=noise).dequantize())


def on_grid(flat: torch.Tensor, config: ModelConfig, format: str) -> torch.Tensor:
    """`flat` rounded to nearest in `format`, as FP32."""
    rounded = torch.empty_like(flat)
    WeightRounder(flat, config, format, None).round_(rounded, 0)
    return rounded
