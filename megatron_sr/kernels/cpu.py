"""The C++ kernel (cpu.cpp) through ctypes. See megatron_sr/rounding.py for the interface that users call."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from megatron_sr.formats import Format
from megatron_sr.kernels.table import PieceTable

ABI = 4  # equals MSR_ABI of cpu.cpp
LEVELS = ("plain", "avx2", "avx512")
LIBRARY = Path(__file__).with_name("_cpu.so")


class FormatParams(ctypes.Structure):
    """`struct Format` of cpu_core.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "mantissa_bits",
            "min_field",
            "max_code",
            "infinity_code",
            "nan_code",
            "random_bits",
            "storage_shift",
            "storage_bytes",
        )
    ]


def format_params(format: Format, dtype: torch.dtype) -> FormatParams:
    """The constants of a format, stored in `dtype`, as the C++ kernels take them."""
    return FormatParams(
        format.mantissa_bits,
        format.min_field,
        format.max_code,
        format.infinity_code,
        format.nan_code,
        format.random_bits,
        format.storage_shift(dtype),
        dtype.itemsize,
    )


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """The compiled kernel. Raises RuntimeError if it has not been built or is of another version."""
    how = "build it with: pip install -e . (needs a C++17 compiler), or pass backend='reference'"
    if not path.exists():
        raise RuntimeError(f"the CPU kernel {path} has not been built; {how}")
    library = ctypes.CDLL(str(path))
    if library.msr_abi() != ABI:
        raise RuntimeError(f"the CPU kernel {path} is of another version ({library.msr_abi()}, not {ABI}); {how}")
    library.msr_round.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.POINTER(FormatParams),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    ]
    library.msr_round.restype = None
    return library


library = load_library()


def best_level() -> str:
    """The fastest instruction set that this machine has."""
    return LEVELS[library.msr_best_level()]


def chosen_level() -> int:
    """Index into LEVELS: the best, or what the environment variable MEGATRON_SR_CPU_LEVEL names (for tests)."""
    name = os.environ.get("MEGATRON_SR_CPU_LEVEL", best_level())
    if name not in LEVELS or LEVELS.index(name) > library.msr_best_level():
        raise ValueError(
            f"MEGATRON_SR_CPU_LEVEL={name!r}; this machine offers: {', '.join(LEVELS[: library.msr_best_level() + 1])}"
        )
    return LEVELS.index(name)


def round_table_(table: PieceTable) -> None:
    """Round every piece of the table, with as many threads as torch uses."""
    for dtype in table.dtypes:
        rows = table.rows
        if len(table.dtypes) > 1:
            rows = rows[[table.dst[i].dtype == dtype for i in table.tensor]]
        params = format_params(table.format, dtype)
        library.msr_round(
            rows.ctypes.data, len(rows), ctypes.byref(params), table.stochastic, chosen_level(), torch.get_num_threads()
        )
