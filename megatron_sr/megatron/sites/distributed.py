"""DistributedOptimizer, BF16 and FP16: main shards into their places in the param buffer, just before the all-gather.

Megatron's step of a ZeRO shard is: Adam on the FP32 main shard, `_copy_main_params_to_model_params` (a cast into the rank's
place in the param buffer), all-gather. Only the cast is replaced.
Source: megatron/core/optimizer/distrib_optimizer.py, core 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.megatron.sites.base import Piece, Site, shard_identity


class DistributedSite(Site):
    """One DistributedOptimizer whose inner optimizer steps Megatron's own FP32 shards."""

    kind = "DistributedOptimizer"

    def __init__(self, optimizer, identities: dict, config: ParamRounding):
        self.optimizer = optimizer
        super().__init__(optimizer.optimizer, identities, config)
        optimizer._copy_main_params_to_model_params = self.round_

    def find(self):
        o = self.optimizer
        pieces = [
            Piece(param, place, main, shard_identity(self.identities, param, start, end))
            for param, place, main, (start, end) in shards(o, o.model_float16_groups, o.shard_fp32_from_float16_groups)
        ]
        # FP32 model params (an FP32 router, say) keep Megatron's plain copy.
        copies = [(place, main) for _, place, main, _ in shards(o, o.model_fp32_groups, o.shard_fp32_groups)]
        return pieces, copies

    def optimizer_params(self) -> list[torch.nn.Parameter]:
        """The local params that the ranks of this optimizer step together; this rank has pieces of some only."""
        return [p for buffer in self.optimizer.buffers for bucket in buffer.buckets for p in bucket.params_list]


def shards(
    optimizer, model_groups, main_groups
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor, tuple]]:
    """(model param, this rank's place for it in the param buffer, its main shard, (start, end) of the shard in the flat param)."""
    for model_group, main_group in zip(model_groups, main_groups, strict=True):
        for param, main in zip(model_group, main_group, strict=True):
            ranges = optimizer._get_model_param_range_map(param)
            where = ranges["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[param]
            place = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[where.start : where.end]
            yield param, place, main, (ranges["param"].start, ranges["param"].end)
