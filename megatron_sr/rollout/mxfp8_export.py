"""Megatron's MXFP8 weights as Hugging Face tensors: the trainer's very codes and scales, never quantized again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from megatron_sr.rollout import names
from megatron_sr.rollout.export import export_hf
from megatron_sr.rollout.mxfp8_layout import is_linear, with_scales


class Weights(Protocol):
    """What `megatron.mxfp8.MXFP8Weights` gives: by parameter, codes [out, in] (float8_e4m3fn) and scales [out, in / 32] (uint8)."""

    bf16_layers: set[int]

    def codes(self) -> Mapping[torch.nn.Parameter, torch.Tensor]: ...

    def scales(self) -> Mapping[torch.nn.Parameter, torch.Tensor]: ...


def export_mxfp8(model, hf_config, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, whole tensor) in the layout of `mxfp8_layout`: BF16, or float8_e4m3fn with its uint8 scale.

    Collective, in the order of `mxfp8_layout.expected_tensors`, as `export.export_hf`. Memory: 1 byte a quantized param of this rank.
    Raises RuntimeError while weights are not gathered and quantized, ValueError as `export_hf`.
    """
    scales, values = weights.scales(), weights.codes()
    chunks = model if isinstance(model, (list, tuple)) else [model]
    values |= {p: p.detach() for chunk in chunks for p in chunk.parameters() if p not in values}
    shapes = {name: shape for name, (shape, _) in trainer_tensors(hf_config, weights.bf16_layers).items()}
    yield from export_hf(model, hf_config, values, scales=scales, shapes=shapes)


def trainer_tensors(hf_config, bf16_layers: set[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of what `export_mxfp8` yields. bf16_layers: decoder layers, from 0, that stay BF16."""
    shapes = names.expected_shapes(hf_config)
    quantized = {name for name in shapes if is_linear(name) and names.layer_number(name) not in bf16_layers}
    return with_scales(shapes, quantized)
