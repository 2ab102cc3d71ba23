"""One tensor as the difference from an older version of it: which elements changed, and their new bits. Pure functions.

Positions are kept in whichever of these is smallest:

    none      nothing changed                 gaps    LEB128 numbers: unchanged elements before each changed one
    all       every element is sent           runs    LEB128 pairs: unchanged elements, then changed ones in a row
                                              bitmap  one bit an element

and values as `bits` (the new elements as they are) or, for 16-bit elements, as `steps`: one signed byte that is added to the old
bits (an optimizer step mostly moves a BF16 weight to its neighbour, whose bits differ by 1); a step of -128 says that the new
element itself follows after the last step. Both are exact: elements are integers here, so NaN, -0.0 and subnormals are nothing special.
zstd (the `zstandard` package, optional) may compress both parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ESCAPE = -128
POSITIONS = ("none", "all", "gaps", "runs", "bitmap")
VALUES = ("bits", "steps")
_ZSTD_LEVEL = 1  # steps are nearly a coin toss each: higher levels cost time and win less than a percent


class DeltaDamaged(ValueError):
    """An encoded tensor that cannot be decoded: cut off, or not made for this base."""


@dataclass(frozen=True)
class TensorDelta:
    """positions, values: how the two byte strings `where` and `what` are coded (see above); changed: number of elements sent.

    zstd: whether `where` and `what` are compressed; plain: bytes of both before that, 0 without.
    """

    positions: str
    values: str
    changed: int
    where: bytes
    what: bytes
    zstd: bool = False
    plain: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.where) + len(self.what)


def encode(new: torch.Tensor, base: torch.Tensor | None, *, zstd: bool = False) -> TensorDelta:
    """The delta from `base` to `new` (same shape and dtype; 1, 2 or 4 bytes an element), or all of `new` when base is None.

    Never larger than all of `new`. Raises TypeError or ValueError for tensors that do not go together, ImportError when zstd is
    asked for and `zstandard` is missing.
    """
    bits = _integers(new)
    if base is None:
        return _compressed(TensorDelta("all", "bits", bits.numel(), b"", _bytes(bits)), zstd)
    if base.dtype != new.dtype or base.shape != new.shape:
        raise ValueError(
            f"a delta needs equal tensors: {new.dtype} {list(new.shape)}, base {base.dtype} {list(base.shape)}"
        )
    old = _integers(base)
    at = torch.nonzero(bits != old).view(-1)
    if not len(at):
        return TensorDelta("none", "bits", 0, b"", b"")
    positions, where = _encode_positions(at.cpu().numpy(), bits.numel())
    values, what = _encode_values(bits[at].cpu().numpy(), old[at].cpu().numpy())
    delta = _compressed(TensorDelta(positions, values, len(at), where, what), zstd)
    if delta.nbytes < bits.numel() * bits.element_size():
        return delta
    return _compressed(TensorDelta("all", "bits", bits.numel(), b"", _bytes(bits)), zstd)


def decode(delta: TensorDelta, shape: tuple[int, ...], dtype: torch.dtype, base: torch.Tensor | None) -> torch.Tensor:
    """The new tensor on the CPU; `base` is left as it is (it comes back itself when nothing changed).

    Raises DeltaDamaged when the delta cannot be one of a tensor of this shape and dtype.
    """
    count = torch.Size(shape).numel()
    integer = _INTEGER[dtype.itemsize]
    try:
        where, what = (_decompressed(part, count * dtype.itemsize + 16) for part in (delta.where, delta.what)) if delta.zstd else (
            delta.where, delta.what)  # fmt: skip
        if delta.positions == "all":
            _expect(len(what) == count * dtype.itemsize, "cut off")
            return torch.frombuffer(bytearray(what), dtype=integer).view(dtype).view(shape) if count else torch.empty(
                shape, dtype=dtype)  # fmt: skip
        _expect(base is not None and tuple(base.shape) == tuple(shape) and base.dtype == dtype, "without its base")
        if delta.positions == "none":
            return base
        at = _decode_positions(delta.positions, where, count, delta.changed)
        out = _integers(base).cpu().clone().numpy()
        out[at] = _decode_values(delta.values, what, out[at])
        return torch.from_numpy(out).view(dtype).view(shape)
    except DeltaDamaged:
        raise
    except (ValueError, IndexError, OverflowError) as error:
        raise DeltaDamaged(f"cannot be decoded ({error})") from error


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    if size not in _INTEGER or tensor.is_complex():
        raise TypeError(f"no delta of {tensor.dtype}: only elements of 1, 2 or 4 bytes are supported")
    return tensor.detach().contiguous().view(-1).view(_INTEGER[size])


def _bytes(bits: torch.Tensor) -> bytes:
    return bits.cpu().numpy().tobytes()


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise DeltaDamaged(what)


def _encode_positions(at: np.ndarray, count: int) -> tuple[str, bytes]:
    """at: sorted positions of the changed elements, at least one, of `count`."""
    gaps = np.diff(at, prepend=-1) - 1
    starts = np.flatnonzero(np.concatenate(([True], gaps[1:] > 0)))
    lengths = np.diff(starts, append=len(at))
    runs = np.stack([gaps[starts], lengths], 1).reshape(-1)
    sizes = {"gaps": int(_varint_sizes(gaps).sum()), "runs": int(_varint_sizes(runs).sum()), "bitmap": -(-count // 8)}
    best = min(sizes, key=sizes.get)
    if best == "bitmap":
        mask = np.zeros(count, dtype=bool)
        mask[at] = True
        return best, np.packbits(mask, bitorder="little").tobytes()
    return best, _varints(gaps if best == "gaps" else runs)


def _decode_positions(kind: str, where: bytes, count: int, changed: int) -> np.ndarray:
    if kind == "bitmap":
        _expect(len(where) == -(-count // 8), "bitmap of a wrong length")
        at = np.flatnonzero(np.unpackbits(np.frombuffer(where, np.uint8), count=count, bitorder="little"))
    elif kind == "gaps":
        at = np.cumsum(_read_varints(where) + 1) - 1
    elif kind == "runs":
        pairs = _read_varints(where)
        _expect(len(pairs) % 2 == 0 and int(pairs[1::2].sum()) == changed, "runs that do not add up")
        gaps, lengths = pairs[::2], pairs[1::2]
        starts = np.cumsum(gaps + lengths) - lengths
        at = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(changed)
    else:
        raise DeltaDamaged(f"unknown positions {kind!r}")
    _expect(len(at) == changed and changed > 0 and at[0] >= 0 and at[-1] < count, "positions outside the tensor")
    return at


def _encode_values(new: np.ndarray, old: np.ndarray) -> tuple[str, bytes]:
    if new.itemsize != 2:
        return "bits", new.tobytes()
    steps = new - old  # wraps, as the addition will
    far = (steps < -127) | (steps > 127)
    if 2 * int(far.sum()) + len(new) >= 2 * len(new):
        return "bits", new.tobytes()
    return "steps", np.where(far, _ESCAPE, steps).astype(np.int8).tobytes() + new[far].tobytes()


def _decode_values(kind: str, what: bytes, old: np.ndarray) -> np.ndarray:
    if kind == "bits":
        _expect(len(what) == len(old) * old.itemsize, "cut off")
        return np.frombuffer(what, old.dtype)
    _expect(kind == "steps" and old.itemsize == 2, f"unknown values {kind!r}")
    _expect(len(what) >= len(old), "cut off")
    steps = np.frombuffer(what, np.int8, count=len(old))
    far = steps == _ESCAPE
    _expect(len(what) == len(old) + 2 * int(far.sum()), "cut off")
    new = old + steps.astype(np.int16)
    new[far] = np.frombuffer(what, np.int16, offset=len(old))
    return new


def _varint_sizes(numbers: np.ndarray) -> np.ndarray:
    """Bytes that each number takes in LEB128."""
    sizes = np.ones(len(numbers), dtype=np.int64)
    limit = 1 << 7
    while len(numbers) and limit <= int(numbers.max()):
        sizes += numbers >= limit
        limit <<= 7
    return sizes


def _varints(numbers: np.ndarray) -> bytes:
    """LEB128: seven bits a byte, low ones first; the top bit says that another byte follows."""
    sizes = _varint_sizes(numbers)
    ends = np.cumsum(sizes)
    out = np.zeros(int(ends[-1]), dtype=np.uint8)
    for i in range(int(sizes.max())):
        has = sizes > i
        part = (numbers[has] >> (7 * i)) & 0x7F
        out[(ends - sizes)[has] + i] = part | np.where(sizes[has] > i + 1, 0x80, 0)
    return out.tobytes()


def _read_varints(data: bytes) -> np.ndarray:
    raw = np.frombuffer(data, np.uint8)
    _expect(len(raw) > 0 and raw[-1] < 0x80, "cut off")
    ends = np.flatnonzero(raw < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    shift = np.arange(len(raw)) - np.repeat(starts, ends - starts + 1)
    _expect(int(shift.max()) < 9, "a number too long")
    return np.add.reduceat((raw & 0x7F).astype(np.int64) << (7 * shift), starts)


def _zstandard():
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"compressed deltas need zstandard ({error}): pip install zstandard, or leave compression off"
        ) from error
    return zstandard


def _compressed(delta: TensorDelta, zstd: bool) -> TensorDelta:
    if not zstd:
        return delta
    compressor = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL)
    where, what = compressor.compress(delta.where), compressor.compress(delta.what)
    small = TensorDelta(delta.positions, delta.values, delta.changed, where, what, True, delta.nbytes)
    return small if small.nbytes < delta.nbytes else delta


def _decompressed(data: bytes, limit: int) -> bytes:
    """limit: bytes that an honest part never exceeds; a forged size is refused before memory is taken for it."""
    zstandard = _zstandard()
    try:
        size = zstandard.frame_content_size(data)
        _expect(0 <= size <= limit, f"says that it holds {size} bytes, more than the tensor can need ({limit})")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise DeltaDamaged(f"not zstd ({error})") from error
