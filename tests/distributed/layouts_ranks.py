"""Two ranks: three steps in every layout, the same weights and gradients by key. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
import sys

from tests.distributed.megatron_job import Job, Layout, build, global_indices, logical_tensors, process_groups

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr.megatron.main_params import full_main_params
from tests.tiny_models import hf_config

CONFIG = sr.ParamRounding(mode="stochastic", seed=77)
MODELS = {
    "dense": dict(family="qwen3", layers=4),
    "tied": dict(family="qwen3", layers=4, tied=True),
    "moe": dict(family="qwen3_moe", layers=4),
}
ALONE = dict(alone=True)
SMALL_BUCKETS = dict(ddp_options=dict(bucket_size=20_000, overlap_grad_reduce=True, overlap_param_gather=True))
RUNS = {
    "dense": {"DP1": (Layout(), ALONE), "DP2": (Layout(), {}), "DP2 overlap": (Layout(), SMALL_BUCKETS),
              "TP2": (Layout(tensor=2), {}), "PP2": (Layout(pipeline=2), {}),
              "PP2 VPP2": (Layout(pipeline=2), dict(virtual=2))},
    "tied": {"DP1": (Layout(), ALONE), "TP2": (Layout(tensor=2), {}), "PP2": (Layout(pipeline=2), {})},
    "moe": {"DP1": (Layout(), ALONE), "DP2": (Layout(), {}), "EP2": (Layout(expert=2), {}),
            "TP2 SP": (Layout(tensor=2), {}), "PP2": (Layout(pipeline=2), {})},
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    results = {}
    runs = [(name, run, *how) for name, layouts in RUNS.items() for run, how in layouts.items()]
    runs.sort(key=lambda run: run[3] is not ALONE)  # worlds of one rank first: then one world of two for all the others
    for name, run, layout, options in runs:
        results[f"{name} {run}"] = three_steps(hf_config(**MODELS[name]), layout, **options)
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


def three_steps(hf, layout: Layout, alone: bool = False, virtual: int | None = None, ddp_options: dict | None = None) -> dict:
    with process_groups(layout, alone, virtual):
        job = build(hf, layout, virtual, ddp_options)
        controller = sr.apply_param_rounding(job.optimizer, job.chunks, CONFIG)
        start, _ = logical_tensors(job)
        for step in (1, 2, 3):
            assert job.step(step)
        job.gather_params()
        main_params = full_main_params(job.optimizer)
        weights, differing = logical_tensors(job)
        main_digests, main_differing = logical_tensors(job, main_params)
        return {
            "start": start,
            "weights": weights,
            "main": main_digests,
            "differing": differing + main_differing,
            "step": controller.step,
            "parts": len(job.optimizer.chained_optimizers),
            "recomputed_wrongly": recomputed_wrongly(job, main_params),
        }


def recomputed_wrongly(job: Job, main_params: dict) -> list[str]:
    """Keys of params that are not the C1 rounding of the main params, element by element from the public API."""
    wrong = []
    for param, identity in job.identities.items():
        index, flat = global_indices(identity), main_params[param].view(-1)
        whole = torch.zeros(int(index.max()) + 1)
        whole[index] = flat
        rounded = sr.round_to_(whole.bfloat16(), whole, noise=sr.Noise(CONFIG.seed, 3, identity.key))
        if not torch.equal(rounded[index], param.detach().view(-1)):
            wrong.append(identity.key)
    return wrong


if __name__ == "__main__":
    main()
