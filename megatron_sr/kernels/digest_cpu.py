"""The C++ kernel of the digest (digest.cpp) through ctypes. See megatron_sr/rollout/digest.py for what it computes."""

from __future__ import annotations

import ctypes

import torch

from megatron_sr.kernels import cpu

cpu.library.msr_digest.argtypes = [
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
]
cpu.library.msr_digest.restype = None


def add_words_(sums: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Add to `sums` (int64 [2]) what the contiguous int32 `words` contribute, the first of them word `first` of the whole tensor.

    Uses as many threads as torch, and does not hold Python's lock.
    """
    cpu.library.msr_digest(
        words.data_ptr(), words.numel(), first, sums.data_ptr(), cpu.chosen_level(), torch.get_num_threads()
    )
