"""Passes over the bits of 16-bit weights (bits.cpp) through ctypes, for CPU tensors. None of them holds Python's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from megatron_sr.kernels import cpu

_EXPONENT = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

cpu.library.msr_all_finite.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint16]
cpu.library.msr_all_finite.restype = ctypes.c_int
cpu.library.msr_list_strided.argtypes = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
]
cpu.library.msr_list_strided.restype = None


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Any floating-point tensor; BF16 and FP16 on the CPU at the speed of memory."""
    if tensor.device.type != "cpu" or tensor.dtype not in _EXPONENT or not tensor.is_contiguous():
        return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor)) if tensor.numel() else True
    return bool(cpu.library.msr_all_finite(tensor.data_ptr(), tensor.numel(), _EXPONENT[tensor.dtype]))


def list_strided(flat: torch.Tensor, first: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The elements of `flat.as_strided(sizes, strides, first)` one after the other: a new 1-D tensor.

    flat     1-D and contiguous, elements of 2, 4 or 8 bytes
    first    its element that comes first; sizes, strides: in elements, strides not negative

    Raises ValueError when the view would leave `flat`.
    """
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    if min(sizes, default=1) < 1 or min(strides, default=0) < 0 or first < 0 or last >= flat.numel():
        raise ValueError(
            f"a view of sizes {list(sizes)}, strides {list(strides)} from {first} leaves {flat.numel()} elements"
        )
    if flat.device.type != "cpu" or not flat.is_contiguous():
        return flat.as_strided(sizes, strides, flat.storage_offset() + first).reshape(-1)
    out = flat.new_empty(torch.Size(sizes).numel())
    numbers = ctypes.c_int64 * len(sizes)
    cpu.library.msr_list_strided(
        out.data_ptr(),
        flat.data_ptr() + first * flat.element_size(),
        flat.element_size(),
        len(sizes),
        numbers(*sizes),
        numbers(*strides),
    )
    return out
