"""MXFP8 tensors for the tests of megatron/mxfp8_te.py: Transformer Engine's own Python class, or a stand-in with its fields.

Transformer Engine compiles CUDA code, so on most machines only the stand-in runs. With TRANSFORMER_ENGINE_SOURCE=/path/to/its/checkout
(a git checkout; nothing is compiled) its own Python class is loaded, over a stub of its compiled extension.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
import sys
import types
from unittest.mock import MagicMock

import torch


class StandIn:
    """The fields of MXFP8Tensor that the adapter reads and writes (Transformer Engine 2.20)."""

    class DType(enum.IntEnum):
        kFloat8E4M3 = 7
        kFloat8E5M2 = 8

    def __init__(self, shape, swizzled: bool, columnwise: bool, dtype=DType.kFloat8E4M3):
        rows, columns = shape
        up = lambda n, to: -(-n // to) * to
        full = lambda *size: torch.full(size, 0x55, dtype=torch.uint8)
        self.shape = torch.Size(shape)
        self._rowwise_data, self._rowwise_scale_inv = full(*shape), full(up(rows, 128), up(columns // 32, 4))
        self._columnwise_data = full(*shape) if columnwise else None
        self._columnwise_scale_inv = full(up(rows // 32, 4), up(columns, 128)) if columnwise else None
        self._with_gemm_swizzled_scales, self._fp8_dtype = swizzled, dtype


@functools.cache
def transformer_engine():
    """The module with Transformer Engine's MXFP8Tensor; None when it neither imports nor TRANSFORMER_ENGINE_SOURCE is set."""
    try:
        return importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")
    except ImportError:
        source = os.environ.get("TRANSFORMER_ENGINE_SOURCE")
        return _over_a_stub(source) if source else None


def _over_a_stub(source: str):
    stub = types.ModuleType("transformer_engine_torch")
    stub.__getattr__ = lambda name: MagicMock(name=name)
    stub.__all__ = []
    names = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
    stub.DType = enum.IntEnum("DType", dict(zip(names, (0, 2, 4, 5, 6, 7, 8, 10))))
    sys.modules["transformer_engine_torch"] = stub
    for name in ("", ".common", ".pytorch", ".pytorch.tensor", ".pytorch.tensor.storage"):
        package = types.ModuleType(f"transformer_engine{name}")  # without running its __init__, which loads the library
        package.__path__ = [f"{source}/transformer_engine{name.replace('.', '/')}"]
        sys.modules[package.__name__] = package
    found = importlib.import_module("transformer_engine.pytorch.tensor.mxfp8_tensor")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]  # Megatron must not take the stub for a Transformer Engine
    return found


def real(module, shape, swizzled: bool, columnwise: bool):
    """An MXFP8Tensor of Transformer Engine, on CPU, allocated by its own quantizer's specification."""
    dtype = module.DType.kFloat8E4M3
    quantizer = module.MXFP8Quantizer(dtype, columnwise=columnwise)
    quantizer.optimize_for_gemm = swizzled
    fields = {name: None for name in ("_columnwise_data", "_columnwise_scale_inv")}
    for name, (size, kind) in quantizer.inner_tensor_specs(tuple(shape)).items():
        fields[name] = torch.full(size, 0x55, dtype=kind)
    return module.MXFP8Tensor(
        shape=shape,
        dtype=torch.bfloat16,
        fp8_dtype=dtype,
        quantizer=quantizer,
        with_gemm_swizzled_scales=swizzled,
        device="cpu",
        **{name.removeprefix("_"): value for name, value in fields.items()},
    )
