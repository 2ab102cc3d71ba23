"""Which logical tensors lie where in the optimizer buckets of a checkpoint (`dp_reshardable`, Megatron-LM's default sharding).

There main params are stored as flat buckets whose layout only the running job knows, so we add the layout: one small object for
each data-parallel group. With it `megatron-sr verify` finds every main param without building the model. `fully_reshardable`
checkpoints name their tensors and need none.
"""

from __future__ import annotations

import torch

from megatron_sr.coordinates import Segment
from megatron_sr.megatron.identity import ComposedIdentity

INDEX = "param_rounding_index"
COMPOSED = "param_rounding_composed"
"""The key in the content metadata under which `composed` stands."""


def composed(identities: dict) -> dict[str, list]:
    """Key in checkpoints -> [logical tensor, where it starts in that], for tensors that checkpoints store in parts.

    The same on all ranks: collective over all of them, once, when the optimizer is set up.
    """
    mine = {
        part: [identity.key, start]
        for identity in identities.values()
        if isinstance(identity, ComposedIdentity)
        for part, start in identity.parts
    }
    everyone: list = [mine]
    if torch.distributed.is_initialized():
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine)
    return {part: where for parts in everyone for part, where in sorted(parts.items())}


def is_rounded(param) -> bool:
    """Whether a model param is the rounding of a main param. FP32 model params are stepped or copied as they are."""
    return param.dtype in (torch.bfloat16, torch.float16)


def bucket_index(site, metadata: dict | None) -> dict:
    """{INDEX: a ShardedObject} for a DistributedOptimizer that is saved as `dp_reshardable`, otherwise {}.

    Its data: suffix of a bucket's checkpoint key -> [(start in the bucket, elements, tensor key, segments as tuples), ...]
    Source of the keys: `DistributedOptimizer.sharded_param_state_dp_reshardable`, core 0.19.
    """
    optimizer = site.optimizer
    if (metadata or {}).get("distrib_optim_sharding_type") != "dp_reshardable" or not hasattr(optimizer, "gbuf_ranges"):
        return {}
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    index = {}
    for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        (dtype,) = ranges
        for bucket_number, bucket in enumerate(buffer.buckets):
            index[f"gbuf_idx_{number}.dtype_{dtype}.bucket_idx_{bucket_number}"] = [
                (start - bucket.offset, end - start, key, [tuple(segment) for segment in segments])
                for param in bucket.params_list
                if is_rounded(param)
                for start, end, _ in [buffer.param_index_map[param]]
                for key, segments in [site.identities[param]]
            ]
    group = optimizer.data_parallel_group_idx
    replica = (optimizer.distributed_optimizer_instance_id, 0, optimizer.data_parallel_group.rank())
    return {INDEX: ShardedObject(f"optimizer.distributed.dp_group_idx_{group}.{INDEX}", index, (1,), (0,), replica)}


def read_index(index: dict) -> dict[str, list[tuple[int, int, str, list[Segment]]]]:
    """The data of a saved index with its segments as `Segment`s."""
    return {
        bucket: [(start, numel, key, [Segment(*s) for s in segments]) for start, numel, key, segments in entries]
        for bucket, entries in index.items()
    }
