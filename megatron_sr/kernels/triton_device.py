"""Functions that run on the GPU, shared by the Triton kernels. The specification is reference.py, bit for bit.

A program handles one chunk of gpu_chunks.py, BLOCK Philox blocks at a time. Draws are laid out so that a thread which
computes a Philox block also holds that block's elements: 8 floats are two 16-byte loads, their BF16 values one
16-byte store, and no random bits move between threads.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_sr.formats import Format

BLOCK = 128  # Philox blocks that a program computes at a time
NUM_WARPS = 4
INTERPRETED = triton.knobs.runtime.interpret

_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}


class Rounding(NamedTuple):
    """A format's constants for `round_bits`, all known when a kernel is compiled."""

    mantissa_bits: int
    min_field: int
    max_code: int
    infinity_code: int
    nan_code: int
    random_bits: int
    shift: int
    width: int
    stochastic: bool
    cvt_rs: bool


def rounding(format: Format, dtype: torch.dtype, stochastic: bool, cvt_rs: bool = False) -> Rounding:
    """The constants of a format stored in `dtype`. cvt_rs: see `use_cvt_rs`."""
    return Rounding(
        format.mantissa_bits,
        format.min_field,
        format.max_code,
        format.infinity_code,
        format.nan_code,
        format.random_bits,
        format.storage_shift(dtype),
        8 * dtype.itemsize,
        stochastic,
        cvt_rs and stochastic and format.mantissa_bits == 7 and dtype == torch.bfloat16,
    )


def use_cvt_rs(device: torch.device) -> bool:
    """Whether the user asks for the instruction `cvt.rs` (FP32 to BF16 with given random bits) instead of integer
    arithmetic: MEGATRON_SR_CVT_RS=1. Off by default, because no GPU has run it yet.

    Raises RuntimeError if the GPU is neither sm_100 nor sm_103: others do not have it.
    """
    if os.environ.get("MEGATRON_SR_CVT_RS", "0") != "1":
        return False
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability not in ((10, 0), (10, 3)):
        raise RuntimeError(
            f"MEGATRON_SR_CVT_RS=1 needs a GPU of compute capability 10.0 or 10.3, {device} is {capability}; unset it"
        )
    return True


def unsigned(dtype: torch.dtype):
    """The Triton integer type that holds the pattern of a torch dtype."""
    return _UNSIGNED[dtype.itemsize]


def check_device(device: torch.device) -> None:
    """Raise ValueError unless Triton kernels can reach tensors on this device."""
    if device.type != ("cpu" if INTERPRETED else "cuda"):
        raise ValueError(
            f"backend 'triton' works on CUDA tensors, not on {device}"
            + (" (TRITON_INTERPRET is set: only on CPU tensors)" if INTERPRETED else "; pass backend='auto'")
        )


def guard(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` the current one for a launch."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit
def open_chunk(row, program, step, GROUP: tl.constexpr, SCATTERED: tl.constexpr, CHUNK: tl.constexpr):
    """Where a chunk lies in the piece whose row is given (gpu_chunks.Launch.pieces).

    Returns (first, low, high, place): the chunk's elements i, low <= i < high, are elements first + i of the piece,
    0 <= i < CHUNK; `first` may be negative, by less than a group. place is what `draws` needs: (start, offset, run,
    stride, key, step), element i having global index start + q * stride + (offset + i) - q * run with q = (offset + i)
    // run.
    """
    length, start, stride, run = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    key, step = tl.load(row + 6), (step + tl.load(row + 7)).to(tl.uint64)
    first = (program - tl.load(row + 8)) * CHUNK
    if not SCATTERED:
        first -= start & (GROUP - 1)
    low = tl.maximum(-first, 0).to(tl.int32)
    high = tl.minimum(length - first, CHUNK).to(tl.int32)
    jumps = first * 0
    if run < length:
        jumps = first // run
    return first, low, high, (start + jumps * stride, first - jumps * run, run, stride, key, step)


@triton.jit
def draws(first, place, BITS: tl.constexpr, SCATTERED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """The draws of BLOCK groups from the chunk's element `first` on, as 32-bit fractions (16 random bits: shifted up)."""
    start, offset, run, stride, key, step = place
    GROUP: tl.constexpr = 128 // BITS
    if SCATTERED:
        position = offset + first + tl.arange(0, BLOCK * GROUP)
        index = (start + position + position // run * (stride - run)).to(tl.uint64)
        return _draws_one_by_one(key, index, step, BITS)
    else:
        position = offset + first + tl.arange(0, BLOCK) * GROUP
        if run >= CHUNK:  # the chunk meets at most one jump, and no division is needed
            jumps = (position >= run).to(tl.uint32)
        else:
            jumps = position.to(tl.uint32) // run.to(tl.uint32)
        block = (start + position + jumps.to(tl.int64) * (stride - run)).to(tl.uint64) // GROUP
        return _draws_of_groups(key, block, step, BITS)


@triton.jit
def _draws_of_groups(key, block, step, BITS: tl.constexpr):
    w0, w1, w2, w3 = _philox(key, block, step)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [blocks, 2, 2], row-major: w0 w1 w2 w3
    if BITS == 16:
        words = tl.join(words << 16, words & 0xFFFF0000)
        return tl.reshape(words, [8 * block.shape[0]])
    else:
        return tl.reshape(words, [4 * block.shape[0]])


@triton.jit
def _draws_one_by_one(key, index, step, BITS: tl.constexpr):
    if BITS == 16:
        lane = (index & 7).to(tl.uint32)
        w0, w1, w2, w3 = _philox(key, index >> 3, step)
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        return tl.where((lane & 1) == 0, word << 16, word & 0xFFFF0000)
    else:
        lane = (index & 3).to(tl.uint32)
        w0, w1, w2, w3 = _philox(key, index >> 2, step)
        return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def _philox(key, block, step):
    """Four words of each Philox block (uint64 tensor); key and step are 64-bit scalars."""
    zero = tl.zeros_like(block).to(tl.uint32)
    low, high = zero + step.to(tl.uint32), zero + (step >> 32).to(tl.uint32)
    return tl.philox(key, block.to(tl.uint32), (block >> 32).to(tl.uint32), low, high)


@triton.jit
def round_bits(bits, random, F: tl.constexpr):
    """Storage patterns (uint32) of FP32 patterns (uint32); `random` as 32-bit fractions, unused in nearest mode."""
    if F.cvt_rs:
        return _round_bf16_cvt_rs(bits, random)
    elif F.stochastic and F.mantissa_bits == 7 and F.width == 16:
        return _round_bf16(bits, random)
    else:
        return _round_any(bits, random, F)


@triton.jit
def _round_bf16(bits, random):
    """Stochastic rounding to BF16: add the draw below the cut, then cut.

    From the largest BF16 number up nothing is added: finite values saturate there, infinities stay.
    """
    x = bits.to(tl.float32, bitcast=True)
    up = bits + tl.where(tl.abs(x) < 3.3895313892515355e38, random >> 16, 0)
    return tl.where(x != x, up | 0x400000, up) >> 16


@triton.jit
def _round_bf16_cvt_rs(bits, random):
    """The same with the instruction of sm_100a and sm_103a, for what is finite; two neighbours at a time.

    Of its operand `rbits` the low half belongs to the value in the low half of the result. `.satfinite` saturates
    finite values as `_round_bf16` does; infinities and NaN, which it would change, do not come from it. Neighbours
    are split by value: inline assembly with pack=2 would pair the registers of a thread in an order that depends on
    the layout.
    """
    HALF: tl.constexpr = bits.shape[0] // 2
    low, high = tl.split(tl.reshape(bits.to(tl.float32, bitcast=True), [HALF, 2]))
    low_draw, high_draw = tl.split(tl.reshape(random, [HALF, 2]))
    pair = tl.inline_asm_elementwise(
        "cvt.rs.satfinite.bf16x2.f32 $0, $2, $1, $3;",
        "=r,f,f,r",
        [low, high, (low_draw >> 16) | high_draw],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )
    finite = tl.reshape(tl.join(pair & 0xFFFF, pair >> 16), [2 * HALF])
    magnitude = bits & 0x7FFFFFFF
    other = tl.where(magnitude > 0x7F800000, bits | 0x400000, bits) >> 16
    return tl.where(magnitude >= 0x7F800000, other, finite)


@triton.jit
def _round_any(bits, random, F: tl.constexpr):
    """Any format, either mode: reference.py in 32-bit arithmetic."""
    M: tl.constexpr = F.mantissa_bits
    magnitude = bits & 0x7FFFFFFF
    mantissa = magnitude & 0x7FFFFF
    own_field = magnitude >> 23
    significand = tl.where(own_field > 0, mantissa | 0x800000, mantissa)
    exponent = tl.maximum(own_field, 1)
    field = tl.maximum(exponent, F.min_field)
    discarded = field - exponent + (23 - M)  # at least 13
    below = significand >> tl.minimum(discarded, 24)
    # Shifts by 32 and more are undefined; the shift by 32 - discarded drops the bits that `below` keeps.
    deep = significand >> tl.minimum(discarded - 32, 24)
    fraction = tl.where(discarded > 32, deep, significand << ((32 - discarded) & 31))
    if F.stochastic:
        up = fraction + random < fraction
        overflow: tl.constexpr = F.max_code
    else:
        up = (fraction > 0x80000000) | ((fraction == 0x80000000) & ((below & 1) == 1))
        overflow: tl.constexpr = F.infinity_code
    code = tl.minimum(((field - F.min_field) << M) + below + up.to(tl.uint32), overflow)
    code = tl.where(magnitude == 0x7F800000, F.infinity_code, code)
    code = tl.where(magnitude > 0x7F800000, F.nan_code | (mantissa >> (23 - M)), code)
    return (code << F.shift) | ((bits >> 31) << (F.width - 1))
