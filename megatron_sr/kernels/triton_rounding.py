"""The Triton backend of megatron_sr/rounding.py: one launch over all pieces of all tensors. Equals reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_sr.kernels import triton_device as device
from megatron_sr.kernels.gpu_chunks import CHUNK, DeviceChunks
from megatron_sr.kernels.table import DST, SRC, PieceTable
from megatron_sr.kernels.triton_device import (
    draws,
    open_chunk,
    round_bits,
)
from megatron_sr.noise import signed

_chunks = DeviceChunks()


@triton.jit(do_not_specialize=["step"])
def round_chunks(
    chunks,
    step: tl.int64,
    F: tl.constexpr,
    STORAGE: tl.constexpr,
    SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Round chunk number program_id. chunks: [programs, 9] int64, (dst, src) addresses and gpu_chunks.COLUMNS."""
    GROUP: tl.constexpr = 128 // F.random_bits
    TILE: tl.constexpr = BLOCK * GROUP
    row = chunks + tl.program_id(0).to(tl.int64) * 9
    length, skip, place = open_chunk(row + 2, step, GROUP, SCATTERED)
    dst = tl.load(row) - skip * (F.width // 8)
    src = tl.load(row + 1) - skip * 4
    to = dst.to(tl.pointer_type(STORAGE))
    of = src.to(tl.pointer_type(tl.uint32))
    if (length == CHUNK) & (((dst | src) & 15) == 0) & (not SCATTERED):
        to, of = tl.multiple_of(to, 16), tl.multiple_of(of, 16)
        for first in range(0, CHUNK, TILE):
            _round_tile(to, of, first, None, place, F, SCATTERED, BLOCK, CHUNK)
    else:
        for first in range(0, skip + length, TILE):
            i = first + tl.arange(0, TILE)
            inside = (i >= skip) & (i < skip + length)
            _round_tile(to, of, first, inside, place, F, SCATTERED, BLOCK, CHUNK)


@triton.jit
def _round_tile(
    to,
    of,
    first,
    inside,
    place,
    F: tl.constexpr,
    SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = first + tl.arange(0, BLOCK * (128 // F.random_bits))
    bits = tl.load(of + i, mask=inside)
    if F.stochastic:
        random = draws(first, place, F.random_bits, SCATTERED, BLOCK, CHUNK)
    else:
        random = bits
    tl.store(to + i, round_bits(bits, random, F).to(to.dtype.element_ty), mask=inside)


def round_table_(table: PieceTable) -> None:
    """Round every piece of the table."""
    where = table.dst[0].device
    device.check_device(where)
    for dtype in {t.dtype for t in table.dst}:
        chosen = [table.dst[i].dtype == dtype for i in table.tensor]
        _launch(table, table.rows[chosen], dtype, where)


def _launch(table: PieceTable, rows, dtype: torch.dtype, where: torch.device) -> None:
    if not len(rows):
        return
    rounding = device.rounding(table.format, dtype, table.stochastic, device.use_cvt_rs(where))
    grouped, scattered, step = _chunks.get(
        table, rows[:, [DST, SRC]], [dtype.itemsize, 4], rows, 128 // table.format.random_bits, where
    )
    with device.guard(where):
        for chunks, is_scattered in ((grouped, False), (scattered, True)):
            if len(chunks):
                round_chunks[(len(chunks),)](**arguments(chunks, step, rounding, dtype, is_scattered))


def arguments(chunks, step: int, rounding: device.Rounding, dtype: torch.dtype, scattered: bool) -> dict:
    """What `round_chunks` is launched with. chunks: a tensor, or what stands for one in tools/compile_gpu.py."""
    return dict(
        chunks=chunks,
        step=signed(step),
        F=rounding,
        STORAGE=device.unsigned(dtype),
        SCATTERED=scattered,
        BLOCK=device.BLOCK,
        CHUNK=CHUNK,
        num_warps=device.NUM_WARPS,
    )
