"""What NCCL accepts and gloo refuses. Part of `host.install()`."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist


def install() -> None:
    """Replace the functions of torch.distributed below. Once per process."""
    dist.barrier = _barrier(dist.barrier)
    dist.init_process_group = _init_process_group(dist.init_process_group)
    dist.all_to_all_single = _all_to_all_single(dist.all_to_all_single)
    dist.all_gather = _all_gather(dist.all_gather)
    dist.reduce_scatter = _reduce_scatter(dist.reduce_scatter)


def _barrier(original):
    """gloo refuses `device_ids`, which Megatron's checkpointing passes."""

    @functools.wraps(original)
    def barrier(group=None, async_op=False, device_ids=None):
        return original(group=group, async_op=async_op)

    return barrier


def _init_process_group(original):
    """Whatever back end a script asks for, gloo is the one there is; it knows no `device_id`."""

    @functools.wraps(original)
    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        return original("gloo", *args, **kwargs)

    return init_process_group


def _all_to_all_single(original):
    """The MoE token dispatcher keeps its split sizes in tensors, which gloo does not convert."""

    def to_list(sizes):
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        return original(output, input, to_list(output_split_sizes), to_list(input_split_sizes), *args, **kwargs)

    return all_to_all_single


def _all_gather(original):
    """Pieces of unequal size (MoE with tensor and expert parallelism): one broadcast per rank instead."""

    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if len({piece.shape for piece in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        for piece, rank in zip(tensor_list, dist.get_process_group_ranks(group or dist.group.WORLD), strict=True):
            if rank == dist.get_rank():
                piece.copy_(tensor)
            dist.broadcast(piece, src=rank, group=group)

    return all_gather


def _reduce_scatter(original):
    """Pieces of unequal size: one all-reduce per rank instead."""

    @functools.wraps(original)
    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({piece.shape for piece in input_list}) == 1:
            return original(output, input_list, op=op, group=group, async_op=async_op)
        for piece, rank in zip(input_list, dist.get_process_group_ranks(group or dist.group.WORLD), strict=True):
            total = piece.clone()
            dist.all_reduce(total, op=op, group=group)
            if rank == dist.get_rank():
                output.copy_(total)

    return reduce_scatter
