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


_Sums = ctypes.c_uint64 * 2


def whole_sums(tensor: torch.Tensor) -> list[int] | None:
    """S_0 and S_1 (unsigned) of a whole tensor on the CPU that is contiguous and made of aligned 32-bit words; None for any other.

    The same as `add_words_` to zeros, without making tensors for it: weights have thousands of small ones.
    """
    nbytes, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or nbytes % 4 or address % 4:
        return None
    sums = _Sums()
    cpu.library.msr_digest(address, nbytes // 4, 0, sums, cpu.chosen_level(), torch.get_num_threads())
    return list(sums)


def add_words_(sums: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Add to `sums` (int64 [2]) what the contiguous int32 `words` contribute, the first of them word `first` of the whole tensor.

    Uses as many threads as torch, and does not hold Python's lock.
    """
    cpu.library.msr_digest(
        words.data_ptr(), words.numel(), first, sums.data_ptr(), cpu.chosen_level(), torch.get_num_threads()
    )
