"""Which part of a Hugging Face tensor a vLLM tensor-parallel worker holds.

Source: vLLM 0.32 model_executor/layers/linear.py (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear),
vocab_parallel_embedding.py (rows padded to a multiple of 64), fused_moe/layer.py (experts split along the intermediate size).
"""

from __future__ import annotations

import torch

_VOCABULARY_PADDING = 64
_ROWS = ("q_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


def local_part(name: str, tensor: torch.Tensor, kv_heads: int, rank: int, size: int) -> torch.Tensor:
    """A view of the part that tensor-parallel worker `rank` of `size` holds of the whole tensor `name`.

    kv_heads: number of key-value heads of the model; with more workers than heads, neighbours hold the same head.
    """
    if size == 1:
        return tensor
    layer = name.split(".")[-2]
    if layer in _VOCABULARY:
        rows = -(-tensor.shape[0] // _VOCABULARY_PADDING) * _VOCABULARY_PADDING // size
        return tensor[rank * rows : (rank + 1) * rows]
    if layer in ("k_proj", "v_proj"):
        parts = min(size, kv_heads)
        return tensor.chunk(parts)[rank * parts // size]
    if layer in _ROWS:
        return tensor.chunk(size)[rank]
    if layer in _COLUMNS:
        return tensor.chunk(size, 1)[rank]
    return tensor


def check_divisible(config, size: int) -> None:
    """Raise ValueError unless vLLM can split a model with this Hugging Face config over `size` workers evenly."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    for what, ok in (
        (f"{heads} attention heads", heads % size == 0),
        (f"{kv} key-value heads", kv % size == 0 or size % kv == 0),
        (f"an intermediate size of {width}", width % size == 0),
    ):
        if not ok:
            raise ValueError(
                f"{what} cannot be split over tensor_parallel_size={size} workers; choose a size that divides it"
            )
