"""Scalar oracles, written from the definitions and not from the kernels: exact rational rounding, and Philox one word at a time."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction

from megatron_sr.formats import Format


def float_of(bits: int) -> float:
    """The FP32 value of a 32-bit pattern, as a Python float."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def neighbours(x: float, format: Format) -> tuple[Fraction, Fraction]:
    """The largest number of the format's unbounded grid that is <= |x|, and the spacing above it."""
    magnitude = Fraction(abs(x))
    exponent = format.min_exponent
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - format.mantissa_bits)
    return magnitude // spacing * spacing, spacing


def round_value(x: float, format: Format, draw: int | None) -> float:
    """x rounded to the format; `draw` is the random integer, None rounds to nearest. NaN gives NaN."""
    if math.isnan(x):
        return x
    largest = Fraction(format.max_finite)
    if math.isinf(x):
        return x if format.infinity else math.copysign(format.max_finite, x)
    below, spacing = neighbours(x, format)
    fraction = (Fraction(abs(x)) - below) / spacing
    if draw is None:
        odd = below // spacing % 2
        up = fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and odd)
    else:
        # The documented rule: the fraction is cut to 32 bits.
        cut = Fraction(fraction * 2**32 // 1, 2**32)
        up = cut + Fraction(draw, 2**format.random_bits) >= 1
    result = below + spacing if up else below
    if result > largest:
        result = math.inf if draw is None and format.infinity else largest
    return math.copysign(float(result), x)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 as in the paper's pseudo code."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def draw(seed: int, stream: int, step: int, key: str, element: int, bits: int) -> int:
    """The random integer of one element, from the layout in design.md."""
    secret = struct.pack("<QQ", seed, stream)
    k0, k1 = struct.unpack("<II", hashlib.blake2b(key.encode(), digest_size=8, key=secret).digest())
    per_block = 128 // bits
    block, lane = divmod(element, per_block)
    words = philox((block % 2**32, block >> 32, step % 2**32, step >> 32), (k0, k1))
    if bits == 32:
        return words[lane]
    return words[lane // 2] >> 16 if lane % 2 else words[lane // 2] % 2**16
