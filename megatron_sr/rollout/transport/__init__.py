"""How the bytes of weights travel from trainer to engine. What they mean, and whether they arrived, is settled around it (`update`).

| kind | between | copies | ran on |
|---|---|---|---|
| `shared_memory` | processes of one machine | one into memory without a name (`memfd`), read in place | CPU |
| `file` | machines with a shared file system | safetensors files, renamed into place when whole | CPU |
| `http` | any machines | safetensors in the request's body | CPU |
| `gloo` | any machines | one broadcast per bucket, to all engines at once | CPU |
| `nccl` | GPUs | the same over NCCL | never run |
| `cuda_ipc` | processes on one GPU | one into a buffer whose IPC handle is sent | never run |
"""

from __future__ import annotations

from pathlib import Path

from megatron_sr.rollout.transport.base import Receiver, Sender

KINDS = ("shared_memory", "file", "http", "gloo", "nccl", "cuda_ipc")


def make_sender(kind: str, receivers: int = 1, *, directory: str | Path | None = None, timeout: float = 60.0) -> Sender:
    """The trainer's side. receivers: engines that get the same bytes; directory: for 'file'; timeout: seconds without progress.

    Raises ValueError for an unknown kind, or 'file' without a directory.
    """
    if kind == "shared_memory":
        from megatron_sr.rollout.transport.shared_memory import SharedMemorySender

        return SharedMemorySender()
    if kind == "file":
        from megatron_sr.rollout.transport.file import FileSender

        if directory is None:
            raise ValueError("transport 'file' needs the shared directory, the same that the engine was started with")
        return FileSender(directory)
    if kind == "http":
        from megatron_sr.rollout.transport.http import HTTPSender

        return HTTPSender()
    if kind in ("gloo", "nccl"):
        from megatron_sr.rollout.transport.broadcast import BroadcastSender

        return BroadcastSender(kind, receivers, timeout)
    if kind == "cuda_ipc":
        from megatron_sr.rollout.transport.cuda import CudaIpcSender

        return CudaIpcSender()
    raise ValueError(f"transport {kind!r} is not one of {', '.join(KINDS)}")


def make_receiver(kind: str, spec: dict, *, directory: str | Path | None = None, timeout: float = 60.0) -> Receiver:
    """The engine's side, from what `Sender.spec` gave. directory: the only one that 'file' reads from. Raises ValueError."""
    if kind == "shared_memory":
        from megatron_sr.rollout.transport.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver()
    if kind == "file":
        from megatron_sr.rollout.transport.file import FileReceiver

        if directory is None:
            raise ValueError("this engine takes no weights from files: start it with the shared directory")
        return FileReceiver(directory)
    if kind == "http":
        from megatron_sr.rollout.transport.http import HTTPReceiver

        return HTTPReceiver()
    if kind in ("gloo", "nccl"):
        from megatron_sr.rollout.transport.broadcast import BroadcastReceiver

        return BroadcastReceiver(kind, spec, timeout)
    if kind == "cuda_ipc":
        from megatron_sr.rollout.transport.cuda import CudaIpcReceiver

        return CudaIpcReceiver()
    raise ValueError(f"transport {kind!r} is not one of {', '.join(KINDS)}")
