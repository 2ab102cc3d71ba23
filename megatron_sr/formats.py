"""What a number format is: one table of numbers from which every rounding kernel takes its constants.

    name        exponent  mantissa  bias  largest finite   random bits  P(round up) exact for
    bf16        8         7         127   3.3895e38        16           every FP32 value
    fp16        5         10        15    65504            32           |x| >= 2**-33, and 0
    e4m3        4         3         7     448              32           |x| >= 2**-18, and 0
    e8m4..e8m6  8         4..6      127                    32           every FP32 value
    e8m7..e8m10 8         7..10     127                    16           every FP32 value
    mxfp8       e4m3 elements with one power-of-two scale (E8M0) per block of 32: see `megatron_sr.mxfp8`

`e8m7` has the numbers of `bf16`. The `e8mM` formats are the paper's simulated ones: BF16's exponent with M mantissa
bits, stored in BF16 (M <= 7) or FP32 buffers. `e4m3` is OCP FP8 E4M3 ("fn": no infinity, one NaN per sign).

**Codes.** A finite magnitude of a format is the integer `code = biased exponent << mantissa_bits | mantissa`; codes
are ordered as the magnitudes are, so "the next larger number" is `code + 1`. Every kernel rounds by computing the
code below and adding 0 or 1.

**Why 16 or 32 random bits.** A value `sig * 2**E` (24-bit `sig`) on a grid of spacing `2**(E + d)` discards `d` bits.
With `random_bits >= d` the probability to round up is the discarded fraction exactly. BF16 always discards 16. FP16
and E4M3 discard more the deeper a value lies among their subnormals; once `d > 32` the fraction is cut to 32 bits, so
P(round up) falls short of it by less than 2**-32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with gradual underflow.

    name            as users write it.
    exponent_bits   width of the exponent field.
    mantissa_bits   width of the mantissa field, without the hidden bit.
    bias            of the exponent field.
    max_finite      the largest finite number.
    infinity        whether the format has infinities (E4M3 has none).
    random_bits     16 or 32: the width of one random draw.
    storage         torch dtypes that a destination may have; the first is the default.
    block_size      elements that share a scale; 1 without.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: float
    infinity: bool
    random_bits: int
    storage: tuple[torch.dtype, ...] = field(hash=False)
    block_size: int = 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, 2**min_exponent."""
        return 1 - self.bias

    @property
    def min_field(self) -> int:
        """FP32 exponent field of the smallest normal number."""
        return self.min_exponent + 127

    @property
    def smallest_subnormal(self) -> float:
        """The spacing of the grid at zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def exact_from(self) -> float:
        """P(round up) equals the discarded fraction exactly for all |x| >= exact_from (0.0: for every FP32 value)."""
        exponent = self.min_exponent - self.mantissa_bits + 23 - self.random_bits
        return 2.0**exponent if exponent > -126 else 0.0

    @cached_property
    def max_code(self) -> int:
        """Code of `max_finite`."""
        mantissa, exponent = _split(self.max_finite)
        return ((exponent + self.bias) << self.mantissa_bits) + int((mantissa - 1) * 2**self.mantissa_bits)

    @property
    def infinity_code(self) -> int:
        """Code of +-Inf and of what overflows in nearest rounding; `max_code` where there is no infinity."""
        return self.max_code + 1 if self.infinity else self.max_code

    @property
    def nan_code(self) -> int:
        """Code of the quiet NaN without payload; the payload's top `mantissa_bits` bits are or-ed into it."""
        return self.infinity_code | 1 << (self.mantissa_bits - 1) if self.infinity else self.max_code + 1

    def check_storage(self, dtype: torch.dtype, name: str = "dst") -> None:
        """Raise TypeError unless a tensor of `dtype` can hold the format."""
        if self.block_size != 1:
            raise TypeError(
                f"format {self.name!r} shares scales between elements: use megatron_sr.{self.name}.quantize"
            )
        if dtype not in self.storage:
            allowed = " or ".join(str(d) for d in self.storage)
            raise TypeError(f"{name} has dtype {dtype}, but format {self.name!r} is stored as {allowed}")

    def storage_shift(self, dtype: torch.dtype) -> int:
        """Bits by which a code moves left in its storage: > 0 only for a simulated format in a wider dtype."""
        if self.exponent_bits != 8:
            return 0
        return {torch.bfloat16: 7, torch.float32: 23}[dtype] - self.mantissa_bits


def _split(x: float) -> tuple[float, int]:
    """x = mantissa * 2**exponent with 1 <= mantissa < 2."""
    numerator, denominator = x.as_integer_ratio()
    exponent = numerator.bit_length() - denominator.bit_length()
    if numerator < denominator << exponent if exponent >= 0 else numerator << -exponent < denominator:
        exponent -= 1
    return x / 2.0**exponent, exponent


def _e8(mantissa_bits: int) -> Format:
    return Format(
        name=f"e8m{mantissa_bits}",
        exponent_bits=8,
        mantissa_bits=mantissa_bits,
        bias=127,
        max_finite=(2 - 2.0**-mantissa_bits) * 2.0**127,
        infinity=True,
        random_bits=16 if mantissa_bits >= 7 else 32,
        storage=(torch.bfloat16, torch.float32) if mantissa_bits <= 7 else (torch.float32,),
    )


BF16 = Format("bf16", 8, 7, 127, (2 - 2.0**-7) * 2.0**127, True, 16, (torch.bfloat16,))
FP16 = Format("fp16", 5, 10, 15, 65504.0, True, 32, (torch.float16,))
E4M3 = Format("e4m3", 4, 3, 7, 448.0, False, 32, (torch.float8_e4m3fn, torch.uint8))
MXFP8 = Format("mxfp8", 4, 3, 7, 448.0, False, 32, (torch.uint8,), block_size=32)
E8M4, E8M5, E8M6, E8M7, E8M8, E8M9, E8M10 = (_e8(m) for m in range(4, 11))

FORMATS = {f.name: f for f in (BF16, FP16, E4M3, MXFP8, E8M4, E8M5, E8M6, E8M7, E8M8, E8M9, E8M10)}


def get(name: str | Format) -> Format:
    """The format of that name; a `Format` is returned as it is. Raises ValueError for an unknown name."""
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known; choose one of: {', '.join(FORMATS)}")
    return FORMATS[name]
