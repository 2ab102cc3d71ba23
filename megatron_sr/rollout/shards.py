"""Join the tensor-parallel shards of a Megatron parameter into Hugging Face tensors, and cut them out again.

Pure functions of tensors; bits are moved, never computed. Layouts: see `names`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sr.rollout import names
from megatron_sr.rollout.names import Entry


def join(entry: Entry, shards: Sequence[torch.Tensor], hf_config) -> list[torch.Tensor]:
    """The Hugging Face tensors (in the order of `entry.hf`) held by the shards of all tensor-parallel ranks, in rank order.

    A single shard may give views of it.
    """
    if entry.layout == names.REPLICATED:
        return [shards[0]]
    if entry.layout == names.ROWS:
        return [_cat(shards, 0)]
    if entry.layout == names.VOCABULARY:
        return [_cat(shards, 0)[: hf_config.vocab_size]]
    if entry.layout == names.COLUMNS:
        return [_cat(shards, 1)]
    if entry.layout == names.GATE_UP:
        halves = [shard.chunk(2) for shard in shards]
        return [_cat([half[i] for half in halves], 0) for i in (0, 1)]
    whole = _cat(shards, 0)
    head, rest = names.head_dim(hf_config), whole.shape[1:]
    queries = hf_config.num_attention_heads // hf_config.num_key_value_heads
    grouped = whole.view(hf_config.num_key_value_heads, queries + 2, head, *rest)
    parts = (grouped[:, :queries], grouped[:, queries], grouped[:, queries + 1])
    return [part.reshape(-1, *rest) for part in parts]


def cut(entry: Entry, tensors: Sequence[torch.Tensor], hf_config, rank: int, size: int, rows: int) -> torch.Tensor:
    """The shard that tensor-parallel rank `rank` of `size` holds of the Hugging Face tensors `tensors`.

    rows: the shard's size along dim 0; more than its share of the vocabulary is padding, filled with zeros.
    """
    if entry.layout == names.REPLICATED:
        return tensors[0]
    if entry.layout == names.ROWS:
        return tensors[0].chunk(size)[rank]
    if entry.layout == names.VOCABULARY:
        share = tensors[0][rank * rows : (rank + 1) * rows]
        padding = rows - share.shape[0]
        return torch.cat([share, share.new_zeros(padding, *share.shape[1:])]) if padding else share
    if entry.layout == names.COLUMNS:
        return tensors[0].chunk(size, 1)[rank]
    if entry.layout == names.GATE_UP:
        return torch.cat([t.chunk(size)[rank] for t in tensors])
    head, groups, rest = names.head_dim(hf_config), hf_config.num_key_value_heads, tensors[0].shape[1:]
    grouped = torch.cat([t.view(groups, -1, head, *rest) for t in tensors], 1)
    return grouped.chunk(size)[rank].reshape(-1, *rest)


def _cat(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)
