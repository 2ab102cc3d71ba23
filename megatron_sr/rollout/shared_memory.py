"""Memory shared with other processes of this user on this machine, without a name in any file system.

A buffer is a `memfd`: the kernel frees it with its last user, however that ends (SIGKILL too), so nothing can be left in /dev/shm.
Others open it through /proc/<pid>/fd/<number> of its owner, which the kernel allows to the same user only. Linux; both processes must
see the same /proc (one container).
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass

import torch

from megatron_sr.rollout.places import Place, fill, lay_out

_NAME = "megatron-sr-weights"  # shown in /proc; not a path
_PATH = re.compile(r"/proc/[1-9]\d*/fd/\d+")


@dataclass(frozen=True)
class SharedTensors:
    """Where tensors lie: path of the buffer, its size in bytes, a place for each. Small, and safe to send to another process."""

    path: str
    size: int
    places: tuple[Place, ...]

    def open(self) -> tuple[SharedBuffer, list[tuple[str, torch.Tensor]]]:
        """The buffer, and (name, tensor) pairs that are views of it. Raises what `SharedBuffer.open` raises."""
        buffer = SharedBuffer.open(self.path, self.size)
        return buffer, [(place.name, place.view(buffer.bytes)) for place in self.places]


class SharedBuffer:
    """`size` bytes of shared memory, as a uint8 tensor `bytes`. Owner: `SharedBuffer(size)`; others: `SharedBuffer.open`."""

    def __init__(self, size: int):
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, max(size, 1))
        self._attach(fd, size)

    @classmethod
    def open(cls, path: str, size: int, inode: int | None = None) -> SharedBuffer:
        """Attach to another process's buffer. inode: which one `path` must still be, as numbers are used again.

        Raises ValueError when `path` is not one of such a buffer, holds less than `size` bytes, or cannot be opened.
        """
        if not _PATH.fullmatch(path):
            raise ValueError(f"{path!r} is not the path of a shared buffer (/proc/<pid>/fd/<number>)")
        try:
            target = os.readlink(path)
            if not target.startswith(f"/memfd:{_NAME}"):
                raise ValueError(f"{path} is {target}, not a shared buffer of megatron-sr")
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(
                f"cannot open the shared buffer {path} ({error.strerror}): sender and receiver must run as one user, see the same "
                f"/proc, and the sender must live; between machines or containers use the transport 'file', 'http' or 'gloo'"
            ) from error
        held = os.fstat(fd)
        if held.st_size < size or inode not in (None, held.st_ino):
            os.close(fd)
            raise ValueError(
                f"the shared buffer {path} ({held.st_size} bytes, inode {held.st_ino}) is not the one announced ({size} bytes, {inode})"
            )
        self = cls.__new__(cls)
        self._attach(fd, size)
        return self

    def _attach(self, fd: int, size: int) -> None:
        self._fd, self.size = fd, size
        self.path, self.inode = f"/proc/{os.getpid()}/fd/{fd}", os.fstat(fd).st_ino
        # The tensor keeps the mapping alive: views may outlive `close`.
        self.bytes = torch.frombuffer(mmap.mmap(fd, max(size, 1)), dtype=torch.uint8)[:size]

    def close(self) -> None:
        """Give up this process's handle; the memory goes when its last view is gone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = self.bytes = None


def share(tensors: list[tuple[str, torch.Tensor]]) -> tuple[SharedBuffer, SharedTensors]:
    """Copy CPU tensors once into shared memory, for workers that are other processes. Close the buffer when they are done."""
    places, size = lay_out(tensors)
    buffer = SharedBuffer(size)
    fill(buffer.bytes, places, tensors)
    return buffer, SharedTensors(buffer.path, size, tuple(places))
