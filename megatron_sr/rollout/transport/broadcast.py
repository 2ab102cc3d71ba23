"""Buckets broadcast over a process group of the trainer and its engines: gloo on CPU, NCCL on GPUs (NCCL has never been run).

The group is its own: neither torch's default group nor Megatron's know of it. Its store listens on the loopback interface unless
MEGATRON_SR_TRANSPORT_HOST names another address of this machine.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_sr.rollout.places import fill, lay_out, views
from megatron_sr.rollout.transport.base import Tensors


class BroadcastSender:
    """Rank 0 of the group; receiver i is rank i + 1. See `base.Sender`."""

    def __init__(self, kind: str, receivers: int, timeout: float):
        self.kind = kind
        self._size, self._timeout = receivers + 1, timeout
        self._host = os.environ.get("MEGATRON_SR_TRANSPORT_HOST", "127.0.0.1")
        self._buffers: dict[int, torch.Tensor] = {}
        self._open()

    def _open(self) -> None:
        # The store would listen on every interface: it is given a socket that does not.
        listener = socket.create_server((self._host, 0))
        self._port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self._host,
            self._port,
            self._size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout),
            master_listen_fd=listener.detach(),
        )
        self._group = None

    def spec(self, receiver: int) -> dict:
        return {"host": self._host, "port": self._port, "rank": receiver + 1, "size": self._size}

    def put(self, number: int, tensors: Tensors) -> dict:
        places, size = lay_out(tensors)
        buffer = torch.empty(size, dtype=torch.uint8, device=_device(self.kind))
        fill(buffer, places, tensors)
        self._buffers[number] = buffer
        return {"size": size, "places": [place.to_list() for place in places]}

    def deliver(self, number: int) -> None:
        if self._group is None:
            self._group = _group(self.kind, self._store, 0, self._size, self._timeout, self._host)
        _broadcast(self._group, self._buffers.pop(number))

    def taken(self, number: int) -> None:
        pass

    def end(self, good: bool) -> None:
        if not good:  # the group may be out of step: another one, which the receivers know by its port
            self._buffers.clear()
            self.close()
            self._open()

    def close(self) -> None:
        self._group = self._store = None


class BroadcastReceiver:
    """See `base.Receiver`. Joins the group at its first bucket."""

    def __init__(self, kind: str, spec: dict, timeout: float):
        self._kind, self._spec, self._timeout, self._group = kind, spec, timeout, None

    def get(self, header: dict) -> list[tuple[str, torch.Tensor]]:
        if self._group is None:
            s = self._spec
            store = dist.TCPStore(
                s["host"], s["port"], s["size"], is_master=False, timeout=timedelta(seconds=self._timeout)
            )
            self._group = _group(self._kind, store, s["rank"], s["size"], self._timeout, None)
        buffer = torch.empty(header["size"], dtype=torch.uint8, device=_device(self._kind))
        _broadcast(self._group, buffer)
        return views(buffer, header["places"])

    def end(self, good: bool) -> None:
        if not good:
            self._group = None

    def close(self) -> None:
        self._group = None


def _device(kind: str) -> str:
    return "cuda" if kind == "nccl" else "cpu"


def _group(kind: str, store, rank: int, size: int, timeout: float, host: str | None):
    """A process group that torch.distributed's registry does not know."""
    store = dist.PrefixStore("megatron-sr", store)
    if kind == "nccl":
        return dist.ProcessGroupNCCL(store, rank, size, timedelta(seconds=timeout))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host or "127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group, buffer: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([buffer], options).wait()
