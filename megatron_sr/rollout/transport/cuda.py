"""Buckets in GPU memory shared by CUDA IPC handle, for trainer and engine on one GPU. Written for GPUs, never run."""

from __future__ import annotations

import torch

from megatron_sr.rollout.places import fill, lay_out, views
from megatron_sr.rollout.transport.base import Tensors

_HANDLE = (
    8  # fields of torch's handle: device, handle, bytes, offset, counter handle and offset, event handle, event wanted
)


class CudaIpcSender:
    """One buffer per bucket in flight, on the device of the tensors. See `base.Sender`."""

    kind = "cuda_ipc"

    def __init__(self):
        if not torch.cuda.is_available():
            raise ValueError(
                "transport 'cuda_ipc' needs a GPU that trainer and engine share; on CPU use 'shared_memory'"
            )
        self._used: dict[int, torch.Tensor] = {}

    def spec(self, receiver: int) -> dict:
        return {}

    def put(self, number: int, tensors: Tensors) -> dict:
        places, size = lay_out(tensors)
        buffer = torch.empty(size, dtype=torch.uint8, device=tensors[0][1].device)
        fill(buffer, places, tensors)
        torch.cuda.current_stream(buffer.device).synchronize()  # the other process does not wait for this stream
        self._used[number] = buffer
        handle = list(buffer.untyped_storage()._share_cuda_())
        return {"handle": handle, "size": size, "places": [place.to_list() for place in places]}

    def deliver(self, number: int) -> None:
        pass

    def taken(self, number: int) -> None:
        self._used.pop(number)

    def end(self, good: bool) -> None:
        self._used.clear()

    def close(self) -> None:
        self.end(True)


class CudaIpcReceiver:
    """See `base.Receiver`."""

    def get(self, header: dict) -> list[tuple[str, torch.Tensor]]:
        handle = header["handle"]
        if len(handle) != _HANDLE:
            raise ValueError(f"a CUDA IPC handle has {_HANDLE} fields, this one {len(handle)}")
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: header["size"]]
        return views(buffer, header["places"])

    def end(self, good: bool) -> None:
        pass

    def close(self) -> None:
        pass
