"""Params against the rounding of their main params, tensor by tensor from the public API."""

from __future__ import annotations

import torch

import megatron_sr as sr
from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.megatron.sites import parts
from tests.distributed.megatron_job import Job, global_indices


def not_rounded(job: Job, config: sr.ParamRounding, step: int, mains: dict | None = None) -> list[str]:
    """Keys of params that are not the rounding of the main params, tensor by tensor from the public API."""
    wrong = []
    mains = mains or full_main_params(job.optimizer)
    for param, identity in job.identities.items():
        index = global_indices(identity)
        whole = torch.zeros(int(index.max()) + 1)
        whole[index] = mains[param].view(-1)
        noise = None
        if config.mode == "stochastic" and config.rounds(identity.key):
            noise = sr.Noise(config.seed, 0 if config.noise == "fixed" else step, identity.key)
        format = config.for_dtype(param.dtype).format
        rounded = sr.round_to_(torch.empty(len(whole), dtype=param.dtype), whole, noise=noise, format=format)
        if not torch.equal(rounded[index].view(torch.int16), param.detach().view(-1).view(torch.int16)):
            wrong.append(identity.key)
    return wrong


def shard_mismatches(job: Job, main_of: dict, step: int) -> list[str]:
    """As `not_rounded`, for main params that are shards: this rank's part of each param."""
    (part,) = parts(job.optimizer)
    wrong = []
    for params, shards in zip(part.model_float16_groups, part.shard_float16_groups):
        for param, shard in zip(params, shards):
            identity, where = job.identities[param], part._get_model_param_range_map(param)["param"]
            index = global_indices(identity)[where.start : where.end]
            whole = torch.zeros(int(index.max()) + 1)
            whole[index] = main_of[shard].detach().view(-1)
            rounded = sr.round_to_(whole.bfloat16(), whole, noise=sr.Noise(5, step, identity.key))
            if not torch.equal(rounded[index], shard.detach().view(-1)):
                wrong.append(identity.key)
    return wrong
