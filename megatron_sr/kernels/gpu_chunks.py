"""The work of one GPU launch: pieces of tensors cut into chunks, one for each program.

A program handles CHUNK consecutive elements. Within a chunk, elements that share a Philox block form a group (8
elements with 16 random bits, 4 with 32), so every thread computes one block for a whole group and moves it with
16-byte accesses. Chunks end at a group's end: only the first chunk of a piece may begin inside a group.

    global element of the chunk's element i:  global + q * stride + (offset + i) - q * run,  q = (offset + i) // run

A piece whose groups do not lie together in memory (a column-parallel shard whose rows are not made of whole groups) is
`scattered`: its elements look up their block one by one.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from megatron_sr.kernels.table import DST, GLOBAL_START, KEY, LENGTH, RUN, SRC, STEP, STRIDE

CHUNK = 8192
COLUMNS = ("length", "global", "offset", "run", "stride", "key", "step")  # after the addresses, one for each tensor
WHOLE = np.uint64(2**62)  # the run of a chunk without a jump in its global indices


def cut(addresses: np.ndarray, sizes: list[int], rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut pieces into chunks.

    addresses  [pieces, tensors] uint64: byte address of each piece's first element in each of the launch's tensors.
    sizes      bytes per element of those tensors.
    rows       [pieces, 8] uint64, as `PieceTable.rows` (its address columns are not read).
    group      elements that share a Philox block: 8 or 4.
    returns    (grouped, scattered): [chunks, tensors + 7] int64 each, the addresses and COLUMNS; the step as it is.
    """
    length, start, stride, run = (rows[:, c] for c in (LENGTH, GLOBAL_START, STRIDE, RUN))
    contiguous = (run == stride) | (run >= length)
    scattered = ~contiguous & ((start % group != 0) | (stride % group != 0) | (run % group != 0))
    skip = np.where(contiguous, start % group, 0)
    count = (length + skip + CHUNK - 1) // CHUNK
    piece = np.repeat(np.arange(len(rows)), count.astype(np.int64))
    chunk = np.arange(len(piece), dtype=np.uint64) - np.repeat(np.cumsum(count) - count, count.astype(np.int64))
    first = np.where(chunk == 0, 0, chunk * CHUNK - skip[piece])
    stop = np.minimum((chunk + 1) * CHUNK - skip[piece], length[piece])
    run = np.where(contiguous, WHOLE, run)[piece]
    row_start = np.where(contiguous[piece], start[piece] + first, start[piece] + first // run * stride[piece])
    offset = np.where(contiguous[piece], 0, first % run)
    at = addresses[piece] + first[:, None] * np.array(sizes, dtype=np.uint64)
    columns = [stop - first, row_start, offset, run, stride[piece], rows[piece, KEY], rows[piece, STEP]]
    chunks = np.column_stack([at, *columns]).astype(np.uint64).view(np.int64)
    return chunks[~scattered[piece]], chunks[scattered[piece]]


class DeviceChunks:
    """Chunks of a table on its device, kept from launch to launch.

    Steps are held relative to the first piece's, which is a kernel argument: a plan whose pieces all move to the next
    step needs no new copy. Nothing here waits for the GPU.
    """

    def __init__(self):
        self._kept = weakref.WeakKeyDictionary()  # owner -> (what the chunks were made from, the chunks)

    def get(self, owner, addresses: np.ndarray, sizes: list[int], rows: np.ndarray, group: int, device: torch.device):
        """(grouped, scattered, base step): the chunks as int64 tensors on `device`, for the current stream.

        owner  any weakly referable object that stands for the table; the other arguments as in `cut`.
        """
        base = rows[0, STEP]
        rows = rows.copy()
        rows[:, STEP] -= base
        rows[:, [DST, SRC]] = 0
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        kept, chunks = self._kept.get(owner, (None, None))
        if kept is None or kept[2:] != (sizes, group, stream) or not _equal(kept[:2], (addresses, rows)):
            chunks = tuple(_to_device(part, device) for part in cut(addresses, sizes, rows, group))
            self._kept[owner] = ((addresses.copy(), rows, sizes, group, stream), chunks)
        return *chunks, int(base)


def _equal(old, new) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(old, new))


def _to_device(chunks: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(chunks))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
