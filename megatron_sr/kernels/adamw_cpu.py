"""The C++ kernel of the fused step (adamw.cpp) through ctypes."""

from __future__ import annotations

import ctypes

import torch

from megatron_sr.kernels import cpu
from megatron_sr.kernels.adamw import AdamWTable, Update
from megatron_sr.kernels.table import PieceTable


class UpdateParams(ctypes.Structure):
    """`struct Update` of adamw_core.h."""

    _fields_ = [(name, ctypes.c_float) for name in Update._fields[:-1]] + [("average_from_grad", ctypes.c_int32)]


class AdamWLaunch(ctypes.Structure):
    """`struct AdamWLaunch` of adamw.cpp."""

    _fields_ = [
        ("format", cpu.FormatParams),
        ("update", UpdateParams),
        ("bf16_grad", ctypes.c_int32),
        ("remainders", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("last_stochastic", ctypes.c_int32),
        ("last_step", ctypes.c_uint64),
    ]


cpu.library.msr_adamw.argtypes = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.POINTER(AdamWLaunch),
    ctypes.c_int,
    ctypes.c_int,
]
cpu.library.msr_adamw.restype = None


def step_table_(table: AdamWTable, update: Update, last_step: int | None) -> None:
    """AdamW and rounding of every piece."""
    _launch(table, table.state_addresses(), UpdateParams(*update), table.grads[0].dtype == torch.bfloat16, last_step)


def recode_table_(table: PieceTable, last_step: int | None) -> None:
    """Round main params held as (params, remainders) again."""
    _launch(table, None, UpdateParams(), False, last_step)


def _launch(table: PieceTable, state, update: UpdateParams, bf16_grad: bool, last_step: int | None) -> None:
    dtypes = {t.dtype for t in table.dst}
    for dtype in dtypes:
        rows, addresses = table.rows, state
        if len(dtypes) > 1:
            chosen = [table.dst[i].dtype == dtype for i in table.tensor]
            rows, addresses = rows[chosen], None if state is None else state[chosen]
        launch = AdamWLaunch(
            cpu.format_params(table.format, dtype),
            update,
            bf16_grad,
            table.src[0].dtype == torch.int16,
            table.stochastic,
            last_step is not None,
            last_step or 0,
        )
        cpu.library.msr_adamw(
            rows.ctypes.data,
            None if addresses is None else addresses.ctypes.data,
            len(rows),
            ctypes.byref(launch),
            cpu.chosen_level(),
            torch.get_num_threads(),
        )
