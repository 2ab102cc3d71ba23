"""The same rounding function for different machines. Every backend equals `reference`, bit for bit.

    reference  plain torch, any device: the specification
    cpu        C++ (AVX-512, AVX2 or plain, OpenMP), CPU tensors
    triton     CUDA tensors

A backend is a module with `round_table_(table: PieceTable) -> None`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "triton_rounding"}
_AUTO = {"cpu": "cpu", "cuda": "triton"}
BACKENDS = ("auto", *_MODULES)


def backend_name(backend: str, device: torch.device) -> str:
    """The backend that serves tensors on `device`. Raises ValueError if there is none or the named one cannot."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; choose one of: {', '.join(BACKENDS)}")
    if backend == "auto":
        if device.type not in _AUTO:
            raise ValueError(
                f"no kernel serves tensors on {device}: move them to cpu or cuda, or pass backend='reference' (slow)"
            )
        return _AUTO[device.type]
    if backend == "cpu" and device.type != "cpu":
        raise ValueError(f"backend 'cpu' cannot work on tensors on {device}; pass backend='auto'")
    return backend


def load(backend: str, device: torch.device) -> ModuleType:
    """The module of the backend; see `backend_name`."""
    return importlib.import_module(f"megatron_sr.kernels.{_MODULES[backend_name(backend, device)]}")
