"""MXFP8: E4M3 elements that share one power-of-two scale (E8M0) per block of 32, along the last or the first axis.

Scales follow Transformer Engine bit for bit (2.20: util/ptx_arch_spec.cuh `float_to_e8m0`,
cast/mxfp8/quantize_mxfp8.cuh):

    amax   = the block's largest magnitude; NaN elements do not count
    scale  = the smallest power of two >= amax * fp32(1/448), stored as its exponent + 127
    data   = E4M3(x * 2**(127 - scale)), nearest or stochastic, never past 448

So |x / scale| <= 448 up to one FP32 rounding, and 448 is on the grid: a block's largest element never rounds away
from it. Stochastic draws have 32 bits and are indexed by the element's row-major position in the whole tensor: a
row-wise and a column-wise copy of one tensor may share a noise, and where their scales agree so do their codes.

With `tile` a scale serves 32 x 32 elements: the row-wise and the column-wise copy then have the same codes everywhere.

Rounding to BF16 first (stream 0) and to MXFP8 later (stream 1) is unbiased as long as both roundings are stochastic
and independent. docs/mxfp8.md has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_sr.coordinates import Segment, check_cover
from megatron_sr.formats import E4M3, MXFP8
from megatron_sr.noise import Noise
from megatron_sr.rounding import round_segments_

BLOCK = MXFP8.block_size
SCALE_TILE = (128, 4)  # scales are padded to whole tiles: rows (or columns) x blocks
# The smallest scale, 2**-124, under which every E4M3 value is a BF16 number: 2**-124 * 2**-9 is BF16's smallest subnormal.
BF16_MIN_SCALE = 3


@dataclass(frozen=True)
class MXFP8Blocks:
    """A quantized tensor.

    data   uint8 of the tensor's shape: E4M3 codes.
    scale  uint8, E8M0: the tensor's shape with the blocked axis divided by 32. Not padded; see `pad_scale`.
    axis   -1 (row-wise) or 0 (column-wise): the axis along which 32 neighbours share a scale.
    """

    data: torch.Tensor
    scale: torch.Tensor
    axis: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, in `dtype`. BF16 holds them exactly unless they are below its smallest normal number."""
        return _scaled(self.data.view(torch.float8_e4m3fn).float(), _exp2(self.scale, 1), self.axis).to(dtype)


def quantize(
    x: torch.Tensor,
    *,
    noise: Noise | None = None,
    axis: int = -1,
    segments: Sequence[Segment] | None = None,
    backend: str = "auto",
    tile: bool = False,
    min_scale: int = 0,
) -> MXFP8Blocks:
    """Quantize to MXFP8.

    x          FP32 or BF16, at least one axis; the blocked axis is divisible by 32.
    noise      None rounds to nearest, ties to even, as Transformer Engine does.
    axis       -1 or 0.
    segments   where x's flat elements lie in their whole tensor, each once; default: x is the whole tensor.
    tile       a scale for 32 x 32 elements, stored for each row (axis -1) or column (axis 0); x is a matrix, both sizes
               divisible by 32.
    min_scale  smaller scales (0 .. 254, as stored) are raised to it; with BF16_MIN_SCALE BF16 holds every value exactly.

    Raises TypeError or ValueError for another dtype, axis or a size not divisible by 32, and as `round_segments_` does.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"x must be a float32 or bfloat16 tensor, not {getattr(x, 'dtype', type(x).__name__)}")
    if axis not in (-1, 0):
        raise ValueError(f"axis is {axis!r}; MXFP8 blocks lie along the last axis (-1) or the first (0)")
    if x.dim() == 0 or x.shape[axis] % BLOCK:
        raise ValueError(f"axis {axis} of shape {tuple(x.shape)} must be divisible by the block size {BLOCK}")
    if tile and (x.dim() != 2 or x.shape[0] % BLOCK or x.shape[1] % BLOCK):
        raise ValueError(f"shape {tuple(x.shape)}: tiles need a matrix with both sizes divisible by {BLOCK}")
    x = x.detach().float()
    magnitude = _blocks(x, axis).abs().nan_to_num(nan=0.0, posinf=torch.inf)
    scale = block_scale(_over_tiles(magnitude.amax(_inner(axis)), axis, tile)).clamp(min=min_scale)
    scaled = _scaled(x, _exp2(scale, -1), axis)
    data = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    where = [Segment(0, x.numel(), 0)] if segments is None else list(segments)
    check_cover(where, x.numel(), "segments of x")  # an element without a segment would stay unwritten
    round_segments_(data, scaled, [(noise, where)], E4M3, backend)
    return MXFP8Blocks(data, scale, axis)


def encode(values: torch.Tensor, scale: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """The codes (uint8, of values' shape) of MXFP8 numbers whose scales are known: the inverse of `dequantize`.

    values  FP32 or BF16, every element an E4M3 number times its block's scale; nothing is rounded.
    scale   uint8, compact, as in `MXFP8Blocks`.

    Raises ValueError when a value is no MXFP8 number under its scale, saying how many.
    """
    codes = _scaled(values.detach().float(), _exp2(scale, -1), axis).to(torch.float8_e4m3fn).view(torch.uint8)
    again = MXFP8Blocks(codes, scale, axis).dequantize()
    if wrong := (again != values).sum().item():
        raise ValueError(f"{wrong} of {values.numel()} values are not MXFP8 numbers under these scales")
    return codes


def block_scale(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 scale of blocks with these largest magnitudes (FP32, any shape): Transformer Engine's `float_to_e8m0(amax
    / 448)`.

    0 gives 0, Inf 0xFE, NaN 0xFF.
    """
    value = amax.float() * torch.tensor(1 / E4M3.max_finite, dtype=torch.float32, device=amax.device)
    bits = value.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    round_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = exponent + round_up.to(torch.int32)
    exponent = torch.where(value.isinf(), 0xFE, exponent)
    return torch.where(value.isnan(), 0xFF, exponent).to(torch.uint8)


def pad_scale(scale: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Transformer Engine's padded scale of a matrix, zeros outside.

    axis -1: [M, K/32] -> [roundup(M, 128), roundup(K/32, 4)]
    axis 0:  [M/32, K] -> [roundup(M/32, 4), roundup(K, 128)]
    """
    tile = SCALE_TILE if axis == -1 else SCALE_TILE[::-1]
    rows, columns = (-(-n // t) * t for n, t in zip(scale.shape, tile))
    padded = scale.new_zeros(rows, columns)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    return padded


def swizzle_scale(padded: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """The order of bytes that cuBLAS and Transformer Engine GEMMs read, from `pad_scale`'s result; shape kept.

    Tiles of 128 x 4 scales, row-major; inside a tile scale (i, j) lies at byte (i % 32) * 16 + (i // 32) * 4 + j. For
    axis 0 the matrix is transposed first. https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout
    """
    matrix = padded if axis == -1 else padded.t()
    rows, blocks = matrix.shape
    tiles = matrix.reshape(rows // 128, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape)


def unswizzle_scale(swizzled: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """The inverse of `swizzle_scale`: the padded scale."""
    rows, blocks = swizzled.shape if axis == -1 else swizzled.shape[::-1]
    tiles = swizzled.reshape(rows // 128, blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    matrix = tiles.reshape(rows, blocks)
    return matrix if axis == -1 else matrix.t().contiguous()


def unpad_scale(padded: torch.Tensor, shape: Sequence[int], axis: int = -1) -> torch.Tensor:
    """The inverse of `pad_scale`: the compact scale of a matrix of this shape."""
    rows, columns = shape
    return padded[:rows, : columns // BLOCK] if axis == -1 else padded[: rows // BLOCK, :columns]


def _over_tiles(amax: torch.Tensor, axis: int, tile: bool) -> torch.Tensor:
    """The blocks' largest magnitudes; with `tile` the largest of 32 neighbouring rows (or columns), for each of them."""
    if not tile:
        return amax
    across = 0 if axis == -1 else 1
    return amax.unflatten(across, (-1, BLOCK)).amax(across + 1).repeat_interleave(BLOCK, across)


def _inner(axis: int) -> int:
    """The axis of a block's 32 elements once the blocked axis is split in two."""
    return -1 if axis == -1 else 1


def _blocks(x: torch.Tensor, axis: int) -> torch.Tensor:
    """x with the blocked axis split into (blocks, 32)."""
    return x.reshape((*x.shape[:-1], -1, BLOCK) if axis == -1 else (-1, BLOCK, *x.shape[1:]))


def _scaled(x: torch.Tensor, factor: torch.Tensor, axis: int) -> torch.Tensor:
    """x with every block multiplied by its own factor; contiguous."""
    return (_blocks(x, axis) * factor.unsqueeze(_inner(axis))).reshape(x.shape).contiguous()


def _exp2(scale: torch.Tensor, sign: int) -> torch.Tensor:
    """2**(sign * (scale - 127)) in FP32, built from bits as Transformer Engine's `exp2f` (1) and `exp2f_rcp` (-1)
    do."""
    exponent = scale.to(torch.int32) if sign == 1 else 254 - scale.to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(scale == 0xFF, 0x7FFFFFFF, bits).to(torch.int32).view(torch.float32)
