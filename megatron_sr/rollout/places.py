"""Where tensors lie in a flat buffer of bytes: what shared memory and the buckets of a transport have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}


@dataclass(frozen=True)
class Place:
    """One tensor in a buffer. dtype: torch's name without the prefix; offset: bytes, a multiple of 64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize

    def to_list(self) -> list:
        """As plain values, for a message."""
        return [self.name, self.dtype, list(self.shape), self.offset]

    @classmethod
    def of(cls, values: Sequence) -> Place:
        """From `to_list`. Raises ValueError for anything else."""
        try:
            name, dtype, shape, offset = values
            place = cls(str(name), str(dtype), tuple(int(n) for n in shape), int(offset))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{values!r} is not the place of a tensor ({error})") from error
        dtype_of(place.dtype)
        if place.offset < 0 or place.offset % _ALIGNMENT or min(place.shape, default=0) < 0:
            raise ValueError(f"{values!r} is not the place of a tensor")
        return place

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in the uint8 `buffer`. Raises ValueError when it does not lie in it."""
        if self.offset + self.nbytes > buffer.numel():
            raise ValueError(
                f"{self.name} ({self.nbytes} bytes at {self.offset}) does not lie in a buffer of {buffer.numel()} bytes"
            )
        return buffer[self.offset : self.offset + self.nbytes].view(dtype_of(self.dtype)).view(self.shape)


def lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Place], int]:
    """A place for each, one after the other from the start, and the bytes they take."""
    places, at = [], 0
    for name, tensor in tensors:
        places.append(Place(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at))
        at += -(-places[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, at


def fill(buffer: torch.Tensor, places: Sequence[Place], tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors to their places."""
    for place, (_, tensor) in zip(places, tensors):
        place.view(buffer).copy_(tensor)


def views(buffer: torch.Tensor, places: Sequence[Sequence]) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of every place of a message, views of `buffer`. Raises ValueError for places that make no sense."""
    return [(place.name, place.view(buffer)) for place in map(Place.of, places)]


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError for one that weights do not have."""
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of weights: {', '.join(_DTYPES)}")
    return _DTYPES[name]
