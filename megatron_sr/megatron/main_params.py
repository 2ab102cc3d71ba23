"""The whole FP32 main params, gathered from their ZeRO shards: what the policy would be without rounding."""

from __future__ import annotations

import torch


@torch.no_grad()
def full_main_params(optimizer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Model param -> its FP32 main param, of the local parameter's shape, on its device. Memory: 4 bytes per local parameter.

    optimizer  what `get_megatron_optimizer` returned, made of DistributedOptimizers and Float16OptimizerWithFloat16Params (TypeError
               otherwise).
    Collective over the data-parallel group; expert parameters over their own, smaller group. Every rank gets every
    parameter of its model chunks. The tensors are copies: writing to them changes nothing.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    main_params = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:
            continue
        if isinstance(part, Float16OptimizerWithFloat16Params):  # every rank has whole main params
            for params, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                main_params |= {param: main.detach().clone() for param, main in zip(params, mains, strict=True)}
            main_params |= {param: param.detach().clone() for group in part.fp32_from_fp32_groups for param in group}
        elif not isinstance(part, DistributedOptimizer):
            raise TypeError(f"full_main_params gathers from DistributedOptimizers, not from {type(part).__name__}")
        else:
            for number, buffer in enumerate(part.buffers):
                main_params |= _gather_buffer(part, number, buffer)
    return main_params


def _gather_buffer(optimizer, number: int, buffer) -> dict:
    main_params = {}
    ((_, shards_of_buckets),) = optimizer.gbuf_ranges[number].items()
    for bucket, shards in zip(buffer.buckets, shards_of_buckets, strict=True):
        whole = _gather_bucket(optimizer, bucket, shards["param_map"])
        for param in bucket.params_list:
            start, end, _ = buffer.param_index_map[param]
            main_params[param] = whole[start - bucket.offset : end - bucket.offset].view(param.shape)
    return main_params


def _gather_bucket(optimizer, bucket, shards: dict) -> torch.Tensor:
    """FP32, flat, of the bucket's length (padding is zero). `shards`: Megatron's ranges of the params this rank owns a part of."""
    group = optimizer.data_parallel_group
    mine = bucket.grad_data.new_zeros(bucket.grad_data.numel() // group.size(), dtype=torch.float32)
    for param, ranges in shards.items():
        group_index, order = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group_index]["params"][order]
        if main.dtype != torch.float32:
            raise TypeError(
                f"the optimizer's main params are {main.dtype}, not FP32 (--use-precision-aware-optimizer?)"
            )
        mine[ranges["gbuf_local"].start : ranges["gbuf_local"].end].copy_(main)
    whole = mine.new_empty(bucket.grad_data.numel())
    torch.distributed.all_gather_into_tensor(whole, mine, group=group)
    return whole
