"""The work of one launch: which elements of which tensors become which elements of which logical tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_sr.coordinates import Segment
from megatron_sr.formats import Format

DST, SRC, LENGTH, GLOBAL_START, STRIDE, RUN, KEY, STEP = range(8)
"""Columns of a row; the C++ and Triton kernels read the same eight 64-bit words."""


class PieceTable:
    """Pairs of tensors and, for each affine piece of them, its coordinates and its Philox key.

    dst, src  equally long lists of contiguous tensors; src FP32, dst in a storage dtype of the format, all on one
    device.
    format    the destination's Format.
    rows      [pieces, 8] uint64 array. Columns DST and SRC hold byte addresses (`refresh`), the others the piece's
              `Segment`, its key (k1 << 32 | k0) and its step.
    tensor    [pieces] int64: which tensor pair a piece belongs to.
    offset    [pieces] int64: its first element there.
    stochastic  whether to draw, or round to nearest.
    dtypes    the storage dtypes of dst.
    versioned  those of dst whose changes autograd counts.
    """

    def __init__(self, dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor], format: Format, stochastic: bool):
        self.dst, self.src, self.format, self.stochastic = list(dst), list(src), format, stochastic
        self.dtypes = {t.dtype for t in self.dst}
        self.versioned = [t for t in self.dst if not t.is_inference()]
        self._pieces: list[tuple] = []
        self._signature = [_signature(t) for t in self.dst + self.src]
        self._addresses: list[int] | None = None

    def add(self, tensor: int, segment: Segment, key: tuple[int, int], step: int) -> None:
        """Append one piece of the pair `tensor`."""
        local, length, global_start, stride, run = segment
        self._pieces.append((tensor, local, length, global_start, stride, run, key[1] << 32 | key[0], step))

    def seal(self) -> PieceTable:
        """Call once after the last `add`: makes the arrays."""
        pieces = np.array(self._pieces, dtype=np.uint64).reshape(-1, 8)
        self.tensor, self.offset = pieces[:, 0].astype(np.int64), pieces[:, 1].astype(np.int64)
        self.rows = pieces.copy()
        del self._pieces
        return self

    def set_step(self, step: int) -> None:
        """Give every piece the same optimizer step."""
        self.rows[:, STEP] = step

    def refresh(self) -> bool:
        """Renew the address columns if any tensor's storage has moved. Returns whether it did.

        Raises RuntimeError if a tensor's shape, dtype, device or contiguity has changed since the table was built.
        """
        tensors = self.dst + self.src
        addresses = [t.data_ptr() for t in tensors]
        if addresses == self._addresses:
            return False
        for i, (t, old) in enumerate(zip(tensors, self._signature)):
            if _signature(t) != old:
                name = f"dst[{i}]" if i < len(self.dst) else f"src[{i - len(self.dst)}]"
                raise RuntimeError(
                    f"{name} has changed since the plan was made: (shape, dtype, device, contiguous) "
                    f"was {old}, is {_signature(t)}; make a new plan"
                )
            if t.numel() and not addresses[i]:
                name = f"dst[{i}]" if i < len(self.dst) else f"src[{i - len(self.dst)}]"
                raise RuntimeError(f"{name} has no memory (its storage was resized to 0); allocate it before rounding")
        self._addresses = addresses
        self.rows[:, DST], self.rows[:, SRC] = self.piece_addresses(self.dst), self.piece_addresses(self.src)
        return True

    def piece_addresses(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        """[pieces] uint64: the byte address of each piece's first element in these tensors, one for each pair."""
        base = np.array([t.data_ptr() for t in tensors], dtype=np.uint64)
        size = np.array([t.element_size() for t in tensors], dtype=np.uint64)
        return base[self.tensor] + self.offset.astype(np.uint64) * size[self.tensor]


def _signature(t: torch.Tensor) -> tuple:
    return tuple(t.shape), t.dtype, t.device, t.is_contiguous()
