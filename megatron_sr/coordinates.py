"""Where a local shard lies in its logical (whole, unsharded) tensor, as affine segments.

A `Segment` says: `length` consecutive local elements are runs of `run` consecutive global elements, `stride` apart.

    local  local_start + i          for 0 <= i < length
    global global_start + (i // run) * stride + i % run

    (run 1, stride 1)   consecutive global elements: a row-parallel shard, a flat ZeRO shard
    (run r, stride s)   r elements of every row of s: a column-parallel shard, one segment for the whole matrix
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """An affine piece of a logical tensor. All fields count elements; row-major order."""

    local_start: int
    length: int
    global_start: int
    stride: int = 1
    run: int = 1

    def global_index(self, i: int) -> int:
        """Global index of the segment's element `i` (0 <= i < length)."""
        return self.global_start + (i // self.run) * self.stride + i % self.run

    @property
    def contiguous(self) -> bool:
        return self.run == self.stride or self.run >= self.length


def clip(segments: Iterable[Segment], start: int, stop: int) -> list[Segment]:
    """The parts of `segments` whose local positions lie in [start, stop), with local positions counted from `start`.

    ZeRO shards cut rows in the middle: one segment gives at most three (a partial run, whole runs, a partial run).
    """
    out = []
    for s in segments:
        lo, hi = max(start, s.local_start), min(stop, s.local_start + s.length)
        if lo >= hi:
            continue
        i, n, local = lo - s.local_start, hi - lo, lo - start
        if s.contiguous:
            out.append(Segment(local, n, s.global_start + i))
            continue
        head = min(-i % s.run, n)
        body = (n - head) // s.run * s.run
        if head:
            out.append(Segment(local, head, s.global_index(i)))
        if body:
            out.append(Segment(local + head, body, s.global_index(i + head), s.stride, s.run))
        if n > head + body:
            out.append(Segment(local + head + body, n - head - body, s.global_index(i + head + body)))
    return out


def check_cover(segments: Sequence[Segment], numel: int, name: str) -> None:
    """Raise ValueError unless the segments cover the local positions [0, numel) exactly once."""
    at = 0
    for s in sorted(segments):
        if s.local_start != at or s.length < 1:
            raise ValueError(
                f"{name}: local elements {min(at, s.local_start)}..{max(at, s.local_start)} are "
                f"{'not covered' if s.local_start > at else 'covered twice'} by its segments"
            )
        at += s.length
    if at != numel:
        raise ValueError(f"{name}: segments cover {at} of {numel} local elements")
