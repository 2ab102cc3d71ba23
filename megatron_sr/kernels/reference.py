"""The specification of rounding, in plain torch, for every format and device. The other kernels equal it bit for bit.

A finite FP32 magnitude is sig * 2**E with a 24-bit integer sig. The format's grid around it has the spacing
2**(E + d), d bits are discarded:

    code      = (field - min_field) << mantissa_bits  +  (sig >> d)        the grid point below, see formats.py
    fraction  = the discarded bits as a binary fraction, cut to 32 bits    (nothing is cut while d <= 32)
    stochastic: code + 1  if  fraction + random >= 1, so P(up) = fraction; random is the draw as a fraction
    nearest:    code + 1  if  fraction > 1/2, or fraction = 1/2 and code is odd

Then:
    overflow    stochastic saturates at the largest finite number; nearest gives Inf, as torch does (E4M3: the largest
                finite number)
    +-Inf       unchanged (E4M3, which has none: the largest finite number, as torch's cast)
    NaN         stays NaN: sign kept, payload truncated, quiet bit set, in both modes
    sign        always kept: -0.0 stays -0.0, and negative values round to -0.0 at the smallest
"""

from __future__ import annotations

import torch

from megatron_sr.formats import Format
from megatron_sr.kernels.table import GLOBAL_START, KEY, LENGTH, RUN, STEP, STRIDE, PieceTable
from megatron_sr.noise import U32, random_words, signed

CHUNK = 1 << 18  # elements at a time: the integer arithmetic below needs about twenty 8-byte temporaries each


def round_codes(src: torch.Tensor, format: Format, random: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round FP32 values to codes of a format.

    src     FP32 tensor.
    random  int64 tensor of the same shape with draws of `format.random_bits` bits; None rounds to nearest, ties to
            even.
    returns (negative, code): int64 tensors, the sign bit and the magnitude's code.
    """
    m = format.mantissa_bits
    bits = src.view(torch.int32).to(torch.int64)
    negative, magnitude = (bits >> 31) & 1, bits & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp(min=1)
    significand = (magnitude & 0x7FFFFF) | ((magnitude >> 23 > 0).to(torch.int64) << 23)
    field = exponent.clamp(min=format.min_field)
    discarded = field - exponent + 23 - m
    below = significand >> discarded.clamp(max=24)
    # Past 56 discarded bits the fraction's first 32 bits are all zero.
    fraction = torch.where(
        discarded <= 32, significand << (32 - discarded).clamp(min=0), significand >> (discarded - 32).clamp(0, 24)
    )
    fraction &= U32
    if random is None:
        half = 1 << 31
        up = (fraction > half) | ((fraction == half) & (below & 1 == 1))
        overflow = format.infinity_code
    else:
        up = fraction + (random << (32 - format.random_bits)) > U32
        overflow = format.max_code
    code = ((field - format.min_field) << m) + below + up.to(torch.int64)
    code = code.clamp(max=overflow)
    code = torch.where(magnitude == 0x7F800000, format.infinity_code, code)
    payload = (magnitude & 0x7FFFFF) >> (23 - m)
    return negative, torch.where(magnitude > 0x7F800000, format.nan_code | payload, code)


def store_codes_(dst: torch.Tensor, negative: torch.Tensor, code: torch.Tensor, format: Format) -> None:
    """Write codes into a storage tensor of the same shape, bit for bit."""
    width = 8 * dst.element_size()
    pattern = code << format.storage_shift(dst.dtype) | negative << (width - 1)
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]
    dst.view(integer).copy_(pattern)


def round_table_(table: PieceTable) -> None:
    """Round every piece of the table: the launch interface that all backends share."""
    for row, tensor, offset in zip(table.rows.tolist(), table.tensor.tolist(), table.offset.tolist()):
        dst, src = (t.detach().view(-1) for t in (table.dst[tensor], table.src[tensor]))
        key = row[KEY] & U32, row[KEY] >> 32
        for at in range(0, row[LENGTH], CHUNK):
            i = torch.arange(at, min(at + CHUNK, row[LENGTH]), device=src.device)
            here = slice(offset + at, offset + at + len(i))
            random = None
            if table.stochastic:
                index = (i // row[RUN]) * row[STRIDE] + i % row[RUN] + signed(row[GLOBAL_START])
                random = random_words(key, row[STEP], index, table.format.random_bits)
            store_codes_(dst[here], *round_codes(src[here], table.format, random), table.format)
