"""Buckets in nameless shared memory (`rollout.shared_memory`): written once by the trainer, read in place by any number of engines."""

from __future__ import annotations

import torch

from megatron_sr.rollout.places import fill, lay_out, views
from megatron_sr.rollout.shared_memory import SharedBuffer
from megatron_sr.rollout.transport.base import Tensors


class SharedMemorySender:
    """Keeps its buffers from update to update: their pages are mapped once. See `base.Sender`."""

    kind = "shared_memory"

    def __init__(self):
        self._free: list[SharedBuffer] = []
        self._used: dict[int, SharedBuffer] = {}

    def spec(self, receiver: int) -> dict:
        return {}

    def put(self, number: int, tensors: Tensors) -> dict:
        places, size = lay_out(tensors)
        buffer = self._used[number] = self._buffer(size)
        fill(buffer.bytes, places, tensors)
        return {
            "path": buffer.path,
            "inode": buffer.inode,
            "size": buffer.size,
            "places": [place.to_list() for place in places],
        }

    def _buffer(self, size: int) -> SharedBuffer:
        fitting = [b for b in self._free if b.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda b: b.size)
            self._free.remove(buffer)
            return buffer
        return SharedBuffer(size)

    def deliver(self, number: int) -> None:
        pass

    def taken(self, number: int) -> None:
        self._free.append(self._used.pop(number))

    def end(self, good: bool) -> None:
        self._free += self._used.values()
        self._used.clear()

    def close(self) -> None:
        self.end(True)
        for buffer in self._free:
            buffer.close()
        self._free.clear()


class SharedMemoryReceiver:
    """Keeps the buffers of the last update mapped. See `base.Receiver`."""

    def __init__(self):
        self._open: dict[tuple[str, int], SharedBuffer] = {}
        self._used: set[tuple[str, int]] = set()

    def get(self, header: dict) -> list[tuple[str, torch.Tensor]]:
        key = header["path"], header["inode"]
        if key not in self._open:
            self._open[key] = SharedBuffer.open(header["path"], header["size"], header["inode"])
        self._used.add(key)
        return views(self._open[key].bytes, header["places"])

    def end(self, good: bool) -> None:
        for key in self._open.keys() - self._used:
            self._open.pop(key).close()
        self._used.clear()

    def close(self) -> None:
        self.end(True)
        self.end(True)  # none was used in between
