"""The Triton backend of megatron_sr/rounding.py: one launch over all pieces of all tensors. Equals reference.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_sr.kernels import triton_device as device
from megatron_sr.kernels.gpu_chunks import CHUNK, DeviceTables
from megatron_sr.kernels.table import PieceTable
from megatron_sr.kernels.triton_device import draws, open_chunk, round_bits
from megatron_sr.noise import signed

_tables = DeviceTables()


@triton.jit(do_not_specialize=["step"])
def round_chunks(
    pieces,
    chunks,
    step: tl.int64,
    F: tl.constexpr,
    STORAGE: tl.constexpr,
    SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Round chunk number program_id; see gpu_chunks.Launch for the tables."""
    GROUP: tl.constexpr = 128 // F.random_bits
    TILE: tl.constexpr = BLOCK * GROUP
    program = tl.program_id(0)
    row = pieces + tl.load(chunks + program).to(tl.int64) * 9
    first, low, high, place = open_chunk(row, program, step, GROUP, SCATTERED, CHUNK)
    dst = tl.load(row) + first * (F.width // 8)
    src = tl.load(row + 1) + first * 4
    to = dst.to(tl.pointer_type(STORAGE))
    of = src.to(tl.pointer_type(tl.uint32))
    if (low == 0) & (high == CHUNK) & (((dst | src) & 15) == 0) & (not SCATTERED):
        to, of = tl.multiple_of(to, 16), tl.multiple_of(of, 16)
        for at in range(0, CHUNK, TILE):
            _round_tile(to, of, at, None, place, F, SCATTERED, BLOCK, CHUNK)
    else:
        for at in range(0, high, TILE):
            i = at + tl.arange(0, TILE)
            _round_tile(to, of, at, (i >= low) & (i < high), place, F, SCATTERED, BLOCK, CHUNK)


@triton.jit
def _round_tile(
    to,
    of,
    at,
    inside,
    place,
    F: tl.constexpr,
    SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i = at + tl.arange(0, BLOCK * (128 // F.random_bits))
    bits = tl.load(of + i, mask=inside)
    if F.stochastic:
        random = draws(at, place, F.random_bits, SCATTERED, BLOCK, CHUNK)
    else:
        random = bits
    tl.store(to + i, round_bits(bits, random, F).to(to.dtype.element_ty), mask=inside)


def round_table_(table: PieceTable) -> None:
    """Round every piece of the table."""
    where = table.dst[0].device
    device.check_device(where)
    if not len(table.rows):
        return
    launch = _tables.get(table, where)
    with device.guard(where):
        for (dtype, scattered), chunks in launch.chunks.items():
            rounding = device.rounding(table.format, dtype, table.stochastic, device.use_cvt_rs(where))
            round_chunks[(len(chunks),)](**arguments(launch.pieces, chunks, launch.step, rounding, dtype, scattered))


def arguments(pieces, chunks, step: int, rounding: device.Rounding, dtype: torch.dtype, scattered: bool) -> dict:
    """What `round_chunks` is launched with. pieces, chunks: tensors, or stand-ins (tools/compile_gpu.py)."""
    return dict(
        pieces=pieces,
        chunks=chunks,
        step=signed(step),
        F=rounding,
        STORAGE=device.unsigned(dtype),
        SCATTERED=scattered,
        BLOCK=device.BLOCK,
        CHUNK=CHUNK,
        num_warps=device.NUM_WARPS,
    )
