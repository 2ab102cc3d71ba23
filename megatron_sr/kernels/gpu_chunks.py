"""The work of one GPU launch: pieces of tensors cut into chunks, one for each program.

A program handles CHUNK consecutive elements of a piece. Within a chunk, elements that share a Philox block form a group
(8 elements with 16 random bits, 4 with 32), so every thread computes one block for a whole group and moves it with
16-byte accesses. Chunks are cut at a group's end: a piece that begins inside a group has a shorter first chunk.

A piece whose groups do not lie together in memory (a column-parallel shard whose rows are not made of whole groups) is
`scattered`: its elements look up their block one by one.

Two tables lie on the device: which piece each chunk belongs to, made once; and the pieces themselves, with their
addresses, copied again only when a tensor has moved. Nothing here waits for the GPU.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import torch

from megatron_sr.kernels.table import GLOBAL_START, LENGTH, RUN, STEP, STRIDE, PieceTable

CHUNK = 8192
FIRST_CHUNK = 8  # column of a piece's row on the device, after those of PieceTable.rows: its first chunk's number
EXTRA = 9  # and then addresses of further tensors
WHOLE = 2**62  # the run of a piece without a jump in its global indices


class Launch(NamedTuple):
    """What the kernels of one launch read.

    pieces  [pieces, 9 + extra] int64: PieceTable.rows with steps relative to `step`, the first chunk, extra addresses.
    chunks  {(storage dtype, scattered): [chunks] int32, each chunk's piece}; one kernel launch each.
    step    0 .. 2**64 - 1.
    """

    pieces: torch.Tensor
    chunks: dict[tuple[torch.dtype, bool], torch.Tensor]
    step: int


def cut(table: PieceTable) -> tuple[dict, np.ndarray]:
    """Cut the pieces of a table into chunks.

    Returns ({(dtype, scattered): [chunks] int32, the piece of each}, [pieces] int64, the number of each one's first
    chunk within its list).
    """
    group = 128 // table.format.random_bits
    length, start, stride, run = (table.rows[:, c] for c in (LENGTH, GLOBAL_START, STRIDE, RUN))
    contiguous = (run == stride) | (run >= length)
    scattered = ~contiguous & ((start % group != 0) | (stride % group != 0) | (run % group != 0))
    skip = np.where(contiguous, start % group, 0)
    count = ((length + skip + CHUNK - 1) // CHUNK).astype(np.int64)
    dtypes = np.array([str(t.dtype) for t in table.dst])[table.tensor]
    lists, first = {}, np.zeros(len(count), np.int64)
    for dtype in {t.dtype for t in table.dst}:
        for kind in (False, True):
            pieces = np.flatnonzero((dtypes == str(dtype)) & (scattered == kind))
            if len(pieces):
                first[pieces] = np.cumsum(count[pieces]) - count[pieces]
                lists[dtype, kind] = np.repeat(pieces, count[pieces]).astype(np.int32)
    return lists, first


def device_rows(table: PieceTable, first_chunk: np.ndarray, extra: np.ndarray) -> np.ndarray:
    """The rows of `Launch.pieces`. extra: [pieces, any] uint64 addresses."""
    rows = np.column_stack([table.rows, first_chunk.astype(np.uint64), extra])
    rows[:, STEP] -= table.rows[0, STEP]
    rows[:, RUN] = np.where((rows[:, RUN] == rows[:, STRIDE]) | (rows[:, RUN] >= rows[:, LENGTH]), WHOLE, rows[:, RUN])
    return rows.view(np.int64)


class DeviceTables:
    """The device's tables of every PieceTable that is alive, kept from launch to launch."""

    def __init__(self):
        self._kept = weakref.WeakKeyDictionary()

    def get(self, table: PieceTable, device: torch.device, extra: np.ndarray | None = None) -> Launch:
        """Tables for one launch on the current stream of `device`. extra: [pieces, any] uint64, more addresses.

        Steps are held relative to the first piece's: a plan whose pieces all move to the next step copies nothing.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        kept = self._kept.get(table)
        if kept is None or kept["stream"] != stream:
            lists, first = cut(table)
            chunks = {kind: _to_device(pieces, device) for kind, pieces in lists.items()}
            kept = self._kept[table] = dict(stream=stream, chunks=chunks, first=first, rows=None)
        rows = device_rows(table, kept["first"], np.empty((len(table.rows), 0), np.uint64) if extra is None else extra)
        if kept["rows"] is None or not np.array_equal(rows, kept["rows"]):
            kept |= dict(rows=rows, pieces=_to_device(rows, device))
        return Launch(kept["pieces"], kept["chunks"], int(table.rows[0, STEP]))


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
