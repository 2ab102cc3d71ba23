"""Name and place of a parameter's local elements: plain tensors, and DTensors on any mesh with any sharding, even or not.

The key is the parameter's name in the bare model, the index counts the elements of the whole tensor row by row. So a
sharded parameter gets the bits of the unsharded one, whatever the mesh.
"""

from __future__ import annotations

import torch

from megatron_sr.coordinates import Segment, check_cover

# Wrappers that put themselves into parameter names: DDP is told from a submodule called `module` by its class.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model within DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def names_of(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameter -> its name in the bare model, without what wrappers add. Tied parameters have their first name.

    Raises ValueError for FSDP1, whose flat parameters do not tell where an element lies.
    """
    bare = bare_model(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in bare.modules()):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) flattens parameters, so their elements have no place that is the same on every "
            "number of ranks; shard the model with torch.distributed.fsdp.fully_shard (accelerate: fsdp_version: 2)"
        )
    return {
        parameter: ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        for name, parameter in bare.named_parameters()
    }


def is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements on this rank: of a DTensor its local tensor itself, no copy, no communication."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def segments_of(parameter: torch.Tensor, name: str) -> list[Segment]:
    """Where the local elements lie in the whole tensor. No communication.

    Raises ValueError for a DTensor that is a partial sum on each rank.
    """
    if not is_dtensor(parameter):
        return [Segment(0, parameter.numel(), 0)] if parameter.numel() else []
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(
            f"{name}: its placements {parameter.placements} are partial sums; redistribute it to Shard or Replicate"
        )
    segments = box(list(parameter.shape), [_runs(parameter, dim) for dim in range(parameter.ndim)])
    check_cover(segments, local(parameter).numel(), name)
    return segments


def _runs(parameter, dim: int) -> list[tuple[int, int, int]]:
    """(local start, length, global start) of the runs of indices that this rank holds of one dimension.

    torch itself shards the indices, as it would the tensor: FSDP2 on top of tensor parallelism (_StridedShard) and
    uneven shards need no rule of ours.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    size = parameter.shape[dim]
    placements = []
    for placement in parameter.placements:
        if getattr(placement, "dim", None) not in (dim, dim - parameter.ndim):
            placements.append(Replicate())
        elif isinstance(placement, _StridedShard):
            placements.append(_StridedShard(0, split_factor=placement.split_factor))
        else:
            placements.append(Shard(0))
    if all(isinstance(placement, Replicate) for placement in placements):
        return [(0, size, 0)] if size else []
    held = distribute_tensor(
        torch.arange(size), parameter.device_mesh, placements, src_data_rank=None
    )._local_tensor.tolist()
    starts = [i for i, index in enumerate(held) if i == 0 or index != held[i - 1] + 1]
    return [(a, b - a, held[a]) for a, b in zip(starts, [*starts[1:], len(held)])]


def box(shape: list[int], runs: list[list[tuple[int, int, int]]]) -> list[Segment]:
    """Segments of the product of `runs`, one list of (local start, length, global start) for each dimension of `shape`."""
    if not all(runs):
        return []
    block, dim = 1, len(shape) - 1
    while dim >= 0 and runs[dim] == [(0, shape[dim], 0)]:
        block *= shape[dim]
        dim -= 1
    if dim < 0:
        return [Segment(0, block, 0)]
    width, stride = (
        sum(n for _, n, _ in runs[dim]) * block,
        shape[dim] * block,
    )  # of a row: here, and in the whole tensor
    segments = []
    for row, count, whole_row in _contiguous(box(shape[:dim], runs[:dim])):
        if len(runs[dim]) == 1:
            start = whole_row * stride + runs[dim][0][2] * block
            segments.append(Segment(row * width, count * width, start, stride, width))
            continue
        segments += [
            Segment((row + i) * width + here * block, n * block, (whole_row + i) * stride + there * block)
            for i in range(count)
            for here, n, there in runs[dim]
        ]
    return segments


def _contiguous(segments: list[Segment]) -> list[tuple[int, int, int]]:
    """(local start, length, global start) of the consecutive runs of segments."""
    out = []
    for s in segments:
        step = s.length if s.contiguous else s.run
        out += [(s.local_start + i, step, s.global_index(i)) for i in range(0, s.length, step)]
    return out


def same_placement(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A DTensor's gradient placed as the parameter: with tensor parallelism it may still be a partial sum."""
    if is_dtensor(grad) and grad.placements != parameter.placements:
        return grad.redistribute(placements=parameter.placements)
    return grad
