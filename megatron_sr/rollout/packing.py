"""Reading weights back out of layouts that only a kernel understands.

Two ways, both exact about what they claim:

- `Permutation`: a packer that only moves elements is learnt by packing their positions, then undone. Gives the live bits.
- `probe_linear`: a layout behind an opaque handle is read through the live operator itself, by multiplying with the identity.
  Gives values: -0.0 comes back as +0.0, and kernels that flush BF16's subnormals return zero for them, so `values_only` maps both
  to +0.0 on either side of a comparison. A difference that this hides cannot change any result of that operator. FP16's subnormals
  are common weights (below 6.1e-5) and must come back: kernels widen them to FP32, where they are normal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sr.kernels.bits_cpu import list_strided

# Magnitudes up to which values read through an operator may come back as zero: BF16's largest subnormal; in FP16 zero alone.
_FLUSHED = {torch.bfloat16: 127 * 2.0**-133, torch.float16: 0.0}
_WIDER = {1: torch.int16, 2: torch.int32, 4: torch.int64}
_PROBE_ROWS = 512  # identity rows per call: bounds the product to 512 x out_features


class Permutation:
    """Where a packer of 16-bit elements puts each element, for one weight shape.

    pack   maps a tensor of `dtype` to a tensor with the same number of 16-bit elements; it must only move them
    shape  of the unpacked tensor
    dtype  torch.bfloat16 or torch.float16

    The positions are sent through `pack` as bit patterns, in two passes (low and high half of a 32-bit index).
    Raises ValueError when `pack` does more than move elements.
    """

    def __init__(
        self,
        pack: Callable[[torch.Tensor], torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.bfloat16,
    ):
        count = torch.Size(shape).numel()
        position = torch.arange(count, dtype=torch.int32)
        low, high = (self._send(pack, half, shape, dtype) for half in (position & 0xFFFF, position >> 16))
        source = (high << 16) | low
        if source.numel() != count or not torch.equal(source.sort().values, position):
            raise ValueError(
                f"the kernel's weight packer does more than move the elements of a {list(shape)} weight, "
                f"so its bits cannot be read back"
            )
        self._shape = shape
        self._where = torch.empty_like(source)
        self._where[source.long()] = position
        # Elements that stay neighbours move together, as wider integers.
        self._width = next(w for w in (4, 2, 1) if _moves_together(self._where, w))
        self._where = self._where[:: self._width] // self._width
        self._strided, self._first = _as_strides(self._where), int(self._where[0])

    @staticmethod
    def _send(pack, half: torch.Tensor, shape, dtype: torch.dtype) -> torch.Tensor:
        packed = pack(half.to(torch.int16).view(dtype).view(shape))
        if packed.element_size() != 2:
            raise ValueError(f"the kernel's weight packer turned {dtype} into {packed.dtype}")
        return packed.contiguous().view(torch.int16).reshape(-1).int() & 0xFFFF

    def undo(self, packed: torch.Tensor) -> torch.Tensor:
        """The unpacked tensor, of the shape given at the start, bit for bit."""
        bits = packed.detach().contiguous().view(torch.int16).reshape(-1)
        if self._width > 1 and bits.storage_offset() % self._width:
            bits = bits.clone()
        bits = bits.view(_WIDER[self._width])
        if self._strided:
            moved = list_strided(bits, self._first, *self._strided)
        else:
            moved = bits.index_select(0, self._where)
        return moved.reshape(-1).view(packed.dtype).view(self._shape)


def _moves_together(where: torch.Tensor, width: int) -> bool:
    """Whether aligned groups of `width` elements go to aligned groups, in order."""
    if where.numel() % width:
        return False
    groups = where.view(-1, width)
    first = groups[:, :1]
    return bool((first % width == 0).all()) and torch.equal(groups, first + torch.arange(width, dtype=where.dtype))


def _as_strides(where: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """Sizes and strides with which a strided view lists the elements in the order of `where` (from where[0] on), or None.

    Blocked layouts are such views, and copying one is several times as fast as gathering single elements.
    """
    sizes, strides = [], []
    while where.numel() > 1:
        step = int(where[1] - where[0])
        regular = where[1:] - where[:-1] == step
        run = where.numel() if bool(regular.all()) else int((~regular).nonzero()[0]) + 1
        while where.numel() % run or not bool(regular.view(-1)[: where.numel() - 1][_inside(where.numel(), run)].all()):
            run -= 1
        if run == 1 or step < 0:
            return None
        sizes.insert(0, run)
        strides.insert(0, step)
        where = where[::run]
    return sizes, strides


def _inside(count: int, run: int) -> torch.Tensor:
    """Which of the count - 1 neighbouring pairs lie inside one of the runs."""
    return torch.arange(1, count) % run != 0


def probe_linear(
    linear: Callable[[torch.Tensor], torch.Tensor], in_features: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The weight [out_features, in_features] of a live linear operator `linear(x) = x @ weight.T` of this dtype, by value.

    Each output is one weight times 1.0 plus zeros, hence exact. A NaN or infinity in a row of the weight makes the whole row NaN.
    """
    columns = []
    for at in range(0, in_features, _PROBE_ROWS):
        rows = min(_PROBE_ROWS, in_features - at)
        identity = torch.zeros(rows, in_features, dtype=dtype)
        identity[torch.arange(rows), at + torch.arange(rows)] = 1.0
        columns.append(linear(identity).t())
    return torch.cat(columns, 1)


def values_only(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with -0.0, in BF16 subnormals too, replaced by +0.0; all other bits, NaN's too, are kept."""
    return torch.nn.functional.hardshrink(
        tensor, _FLUSHED[tensor.dtype]
    )  # zero where |x| is at most that; one fast pass


def count_indistinct(tensor: torch.Tensor) -> int:
    """How many elements `values_only` changes."""
    bits, kept = (t.contiguous().view(torch.int16) for t in (tensor, values_only(tensor)))
    return int(torch.count_nonzero(bits) - torch.count_nonzero(kept))
