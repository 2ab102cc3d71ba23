"""Which code knows a model's names: our own mapping for three families, NVIDIA's megatron-bridge for the rest where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from megatron_sr.rollout import names
from megatron_sr.rollout.export import export_hf


class ExportAdapter(Protocol):
    """Turns a Megatron model's shards into Hugging Face tensors."""

    def export(
        self, model, tensors: Mapping[torch.nn.Parameter, torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of every weight, the same on every rank; collective, so it must be used up.

        tensors: values to export in place of the parameters'. Never more than a decoder layer is whole in memory.
        """
        ...


class OwnMapping:
    """Qwen2, Qwen3 and Qwen3-MoE: see `export.export_hf`."""

    def __init__(self, hf_config):
        self._config = hf_config

    def export(self, model, tensors=None) -> Iterator[tuple[str, torch.Tensor]]:
        return export_hf(model, self._config, tensors)


class MegatronBridge:
    """Every family that megatron-bridge converts (`megatron.bridge.AutoBridge.export_hf_weights`). Tested with a mock only."""

    def __init__(self, model_dir: str | Path):
        from megatron.bridge import AutoBridge

        self._bridge = AutoBridge.from_hf_pretrained(str(model_dir))

    def export(self, model, tensors=None) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises ValueError when `tensors` is given: megatron-bridge exports the model's own parameters."""
        if tensors is not None:
            raise ValueError("megatron-bridge exports a model's parameters, not other values given for them")
        chunks = model if isinstance(model, (list, tuple)) else [model]
        for name, tensor in self._bridge.export_hf_weights(list(chunks), cpu=False, show_progress=False):
            yield name, tensor.detach()


def adapter_for(hf_config, model_dir: str | Path) -> ExportAdapter:
    """The adapter for a model. model_dir: its Hugging Face checkpoint, which megatron-bridge reads.

    Raises ValueError for a family outside our own when megatron-bridge is not installed.
    """
    if hf_config.model_type in names.FAMILIES:
        return OwnMapping(hf_config)
    try:
        return MegatronBridge(model_dir)
    except ImportError as error:
        raise ValueError(
            f"model_type {hf_config.model_type!r} is not one of {', '.join(names.FAMILIES)}, and megatron-bridge, which knows other "
            f"families, does not import ({error}); install it: pip install megatron-bridge"
        ) from error
