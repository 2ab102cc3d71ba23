"""The second rounding of an MXFP8 weight, BF16 to MXFP8, wherever its codes are kept."""

from __future__ import annotations

import torch

from megatron_sr import mxfp8
from megatron_sr.config import ParamRounding
from megatron_sr.megatron.identity import Identity
from megatron_sr.mxfp8 import MXFP8Blocks
from megatron_sr.noise import Noise

STREAM = 1  # of the second rounding; the first one has `ParamRounding.stream`, 0


class SecondRounding:
    """The rounding of one gathered BF16 weight to MXFP8, as a pure function of (weight, seed, step, tensor, element).

    config  mode nearest, `exclude` and `include` decide whether it draws; noise, seed, mxfp8_columnwise, mxfp8_scaling how.
    """

    def __init__(self, config: ParamRounding):
        self.config = config

    def quantize(self, weight: torch.Tensor, identity: Identity, step: int, axis: int = -1) -> MXFP8Blocks:
        """Codes and scales of the row-wise (axis -1) or column-wise (axis 0) copy of a matrix.

        weight    BF16, the whole local weight, [out, in].
        identity  where its elements lie in the logical tensor.
        """
        return mxfp8.quantize(
            weight,
            noise=self.noise(identity.key, step, axis),
            axis=axis,
            segments=identity.segments,
            tile=self.config.mxfp8_scaling == "2d",
            min_scale=mxfp8.BF16_MIN_SCALE,
        )

    def noise(self, key: str, step: int, axis: int = -1) -> Noise | None:
        """None rounds to nearest."""
        config = self.config
        if config.mode == "nearest" or not config.rounds(key) or (axis == 0 and config.mxfp8_columnwise == "nearest"):
            return None
        return Noise(config.seed, 0 if config.noise == "fixed" else step, key, config.stream + STREAM)
