"""Which parameters of a Megatron model Transformer Engine's MXFP8 recipe would quantize, and whether blocks of 32 fit them.

Quantized are the weight matrices of the linear layers (attention, MLP, experts, shared experts) inside transformer layers. Not:
embeddings, norms, biases, the router, and the output layer (unless `fp8_output_proj` asks for it), nor layers that
`first_last_layers_bf16` keeps in BF16. Source: megatron.core 0.19 fp8_utils (`get_fp8_context`, `is_first_last_bf16_layer`,
`is_mxfp8_output_proj_active`), extensions/transformer_engine.py.
"""

from __future__ import annotations

import re

import torch

from megatron_sr.megatron.identity import Identity, model_chunks
from megatron_sr.mxfp8 import BLOCK

_GROUPED = re.compile(r"weight\d*")  # of a grouped GEMM: weight0, weight1, ...
_NEAREST = "leave out --param-rounding-format mxfp8"


def mxfp8_parameters(model) -> dict[torch.nn.Parameter, str]:
    """The parameters of `model` (a chunk or list of chunks, wrapped or bare) that MXFP8 quantizes, with their names in it.

    Raises ValueError for a linear layer of which it is not known whether Transformer Engine would quantize it.
    """
    found = {}
    for number, chunk in enumerate(model_chunks(model)):
        where = f"chunk {number}, " if number else ""
        found |= {parameter: where + name for name, parameter in _of_chunk(chunk)}
    return found


def _of_chunk(chunk: torch.nn.Module):
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    layers = {path: module for path, module in chunk.named_modules() if isinstance(module, BaseTransformerLayer)}
    for path, module in chunk.named_modules():
        if not isinstance(module, _linear_types()):
            continue
        layer = next((layers[above] for above in _ancestors(path) if above in layers), None)
        if layer is None:
            if path != "output_layer":
                raise ValueError(
                    f"--param-rounding-format mxfp8: {path} is a linear layer outside the transformer layers, of which it is not "
                    f"known whether the MXFP8 recipe quantizes it; {_NEAREST}"
                )
            if not getattr(chunk.config, "fp8_output_proj", False):
                continue
            if chunk.share_embeddings_and_output_weights:
                raise ValueError(
                    "--param-rounding-format mxfp8: fp8_output_proj would quantize the embedding, which shares its weight with the "
                    "output layer; leave out --fp8-output-proj, or untie them (--untie-embeddings-and-output-weights)"
                )
        elif is_first_last_bf16_layer(layer.config, layer.layer_number - 1):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if _GROUPED.fullmatch(name):
                yield f"{path}.{name}", parameter


def bf16_layers(model) -> set[int]:
    """The decoder layers, from 0, of the whole model that `first_last_layers_bf16` keeps in BF16; the same on every rank."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = model_chunks(model)[0].config
    return {layer for layer in range(config.num_layers) if is_first_last_bf16_layer(config, layer)}


def _ancestors(path: str):
    while path:
        path = path.rpartition(".")[0]
        yield path


def _linear_types() -> tuple[type, ...]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    types: tuple = (ColumnParallelLinear, RowParallelLinear)
    try:
        from megatron.core.extensions import transformer_engine as te
    except ImportError:
        return types
    names = ("TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear")
    found = (getattr(te, name, None) for name in names)  # without Transformer Engine these are no classes
    return types + tuple(t for t in found if isinstance(t, type))


def check_blocks(parameter: torch.Tensor, name: str, identity: Identity, tile: bool) -> None:
    """Raise ValueError unless this rank's shard of a weight consists of whole blocks of 32 (tiles of 32 x 32).

    Blocks lie along the input dimension, the last one. Then blocks, scales and codes are the same in every layout.
    """
    way_out = f"choose another size, or {_NEAREST}"
    if parameter.dim() not in (2, 3):
        raise ValueError(f"{name} has shape {tuple(parameter.shape)}; MXFP8 weights are matrices; {_NEAREST}")
    columns = parameter.shape[-1]
    for segment in identity.segments:
        cut = not segment.contiguous
        row = segment.stride if cut else columns
        if row % BLOCK:
            raise ValueError(
                f"{name}: its input dimension is {row}, which blocks of {BLOCK} do not divide; Transformer Engine's MXFP8 "
                f"needs it divisible too; {way_out}"
            )
        first = segment.global_start % row
        if cut and (segment.run % BLOCK or first % BLOCK):
            raise ValueError(
                f"{name}: tensor parallelism splits its input dimension of {row} at {first}..{first + segment.run}, within a block of "
                f"{BLOCK} that shares a scale; choose a tensor-parallel size with {row} / size divisible by {BLOCK}, or {_NEAREST}"
            )
        if tile and (segment.length // columns % BLOCK or segment.local_start // columns % BLOCK):
            raise ValueError(
                f"{name}: {segment.length // columns} rows from {segment.local_start // columns} are not whole tiles of {BLOCK} x {BLOCK}; "
                f"{way_out}, or --param-rounding-mxfp8-scaling 1d"
            )
