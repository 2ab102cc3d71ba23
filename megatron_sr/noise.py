"""Keyed noise: which random bits belong to which element of which tensor at which step. There is no generator state.

Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    key      (k0, k1)  first 8 bytes of BLAKE2b(tensor key, keyed with seed and stream, 8 little-endian bytes each);
             low word first
    counter  (block low, block high, step low, step high)
    output   four 32-bit words w0 w1 w2 w3

    16 bits per element:  element g uses block g >> 3, lane g & 7; lane j is half j & 1 (0: low) of word j >> 1

        block b:  |      w0       |      w1       |      w2       |      w3       |
                  | lo      hi    | lo      hi    | lo      hi    | lo      hi    |
        element   | 8b      8b+1  | 8b+2    8b+3  | 8b+4    8b+5  | 8b+6    8b+7  |

    32 bits per element:  element g uses block g >> 2, word g & 3

`g` is the element's row-major index in the whole, unsharded tensor. This module is the specification; the kernels
compute the same bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

U32 = 0xFFFFFFFF
U64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclass(frozen=True)
class Noise:
    """The noise of one logical tensor at one optimizer step. Hashable; equal fields give equal bits on every machine.

    seed    0 .. 2**64 - 1.
    step    0 .. 2**64 - 1: successful optimizer steps so far.
    key     canonical name of the whole tensor, for example "decoder.layers.mlp.linear_fc1.weight".
    stream  0 .. 2**64 - 1: 0 forward weights, 1 second rounding (MXFP8), 2 and up studies.

    Raises TypeError or ValueError for a field of the wrong type or out of range.
    """

    seed: int
    step: int
    key: str
    stream: int = 0

    def __post_init__(self):
        for name in ("seed", "step", "stream"):
            check_u64(name, getattr(self, name))
        if not isinstance(self.key, str):
            raise TypeError(f"key must be the tensor's name, a str, not {type(self.key).__name__}")

    def philox_key(self) -> tuple[int, int]:
        """The two 32-bit key words (k0, k1); they do not depend on the step."""
        return philox_key(self.seed, self.key, self.stream)


def check_u64(name: str, value: int) -> int:
    """`value` if it is a whole number from 0 to 2**64 - 1; raises TypeError or ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}: {value!r}")
    if not 0 <= value <= U64:
        raise ValueError(f"{name} is {value}; it must lie in 0 .. 2**64 - 1")
    return value


def philox_key(seed: int, key: str, stream: int = 0) -> tuple[int, int]:
    """The Philox key words of a tensor: BLAKE2b-64 of its name, keyed with the seed and the stream."""
    secret = seed.to_bytes(8, "little") + stream.to_bytes(8, "little")
    digest = hashlib.blake2b(key.encode(), digest_size=8, key=secret).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counter, key: tuple[int, int], rounds: int = 10):
    """Philox4x32 of four int64 tensors (or ints) holding 32-bit words. Returns four of the same shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & U32, (k1 + _WEYL[1]) & U32
    return c0, c1, c2, c3


def _multiply(a: int, b):
    """High and low 32 bits of the 64-bit product a * b, without leaving signed 64-bit arithmetic."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    low = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (low >> 32)) & U32, low & U32


def random_words(key: tuple[int, int], step: int, index: torch.Tensor, bits: int = 16) -> torch.Tensor:
    """The `bits` (16 or 32) random bits of the elements with these global indices.

    key     Philox key words, as `Noise.philox_key` gives them.
    index   int64 tensor of any shape and device; indices from 2**63 up are held as their two's complement.
    returns int64 tensor of the same shape, values 0 .. 2**bits - 1.
    """
    block_shift = {16: 3, 32: 2}[bits]
    block = (index >> block_shift) & (U64 >> block_shift)  # a logical shift
    zero = torch.zeros_like(block)
    words = philox4x32((block & U32, block >> 32, zero + (step & U32), zero + (step >> 32)), key)
    lane = index & ((1 << block_shift) - 1)
    word = torch.stack(words).gather(0, (lane >> 1 if bits == 16 else lane)[None])[0]
    return word if bits == 32 else (word >> ((lane & 1) << 4)) & 0xFFFF


def random_bits(noise: Noise, start: int, count: int, bits: int = 16, device="cpu") -> torch.Tensor:
    """The random bits of elements start .. start + count - 1: the specification made visible.

    bits    16 or 32, as the format's `random_bits` says.
    returns [count] int32 tensor (16 bits) or int64 tensor (32 bits), values 0 .. 2**bits - 1.
    Raises ValueError for another `bits` or for elements outside 0 .. 2**64 - 1.
    """
    if bits not in (16, 32):
        raise ValueError(f"bits is {bits!r}; a draw has 16 or 32 bits")
    check_range(start, count)
    index = torch.arange(count, dtype=torch.int64, device=device) + signed(start)
    drawn = random_words(noise.philox_key(), noise.step, index, bits)
    return drawn.to(torch.int32) if bits == 16 else drawn


def check_range(start: int, count: int, name: str = "start") -> None:
    """Raise unless the elements start .. start + count - 1 have 64-bit indices."""
    check_u64(name, start)
    if count < 0 or start + count > U64 + 1:
        raise ValueError(f"{name} {start} with {count} elements leaves the global indices 0 .. 2**64 - 1")


def signed(u64: int) -> int:
    """The two's complement reading of a 64-bit word, as torch.int64 wants it."""
    return u64 - (1 << 64) if u64 >> 63 else u64
