"""FP32 inputs that reach every branch of rounding, as tensors."""

import numpy as np
import torch


def from_bits(bits) -> torch.Tensor:
    """FP32 tensor of these 32-bit patterns."""
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The storage patterns of a tensor as non-negative int64."""
    width = 8 * x.element_size()
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]
    return x.contiguous().view(integer).to(torch.int64) & ((1 << width) - 1)


def bf16_patterns() -> torch.Tensor:
    """[65536] FP32: every BF16 value, including all NaN payloads."""
    return from_bits(np.arange(65536, dtype=np.uint32) << 16)


def adversarial() -> torch.Tensor:
    """FP32: every sign, exponent and top mantissa bit with low bits at and around ties, ends and single bits."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    top = np.arange(0, 65536, 3, dtype=np.uint32) << 16
    named = [
        *(
            0x7F7FFFFF,
            0x7F7F0000,
            0x7F7F0001,
            0x7F800000,
            0x7F800001,
            0x7FFFFFFF,
            0x7FC00000,
            0x7FFF8C22,
        ),  # FLT_MAX, Inf, NaN
        *(0, 1, 0x7FFFFF, 0x800000, 0x8000, 0x18000),  # zero and subnormals
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x47800000),  # around FP16's 65504 and 65536
        *(0x387FC000, 0x387FFFFF, 0x33800000, 0x33000000, 0x33000001, 0x2F000001),  # FP16 subnormals and below
        *(0x43E00000, 0x43E00001, 0x43E80000, 0x43E80001, 0x43F00000),  # around E4M3's 448
        *(
            0x3C800000,
            0x3C7FFFFF,
            0x3B000000,
            0x3A800000,
            0x3A800001,
            0x36800000,
            0x36000001,
        ),  # E4M3 subnormals and below
    ]
    bits = np.concatenate([(top[:, None] | low).reshape(-1), np.array(named, dtype=np.uint32)])
    return from_bits(np.concatenate([bits, bits | 0x80000000]))


def random_patterns(count: int, seed: int) -> torch.Tensor:
    """FP32 with uniformly random bits: all exponents, subnormals, NaN and Inf included."""
    return from_bits(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32))
