"""Two ranks: three steps in every layout, the same weights and gradients by key. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

import megatron_sr as sr
from megatron_sr.megatron.main_params import full_main_params
from tests.distributed.megatron_job import Job, Layout, build, global_indices, logical_tensors, process_groups
from tests.tiny_models import hf_config


@dataclass
class Run:
    layout: Layout = field(default_factory=Layout)
    alone: bool = False  # each rank a world of its own
    virtual: int | None = None
    ddp_options: dict = field(default_factory=dict)
    seed: int = 77

    def build(self, hf) -> Job:
        return build(hf, self.layout, self.virtual, self.ddp_options)

    def process_groups(self):
        return process_groups(self.layout, self.alone, self.virtual)


DP1 = Run(alone=True)
TP2, PP2 = Run(Layout(tensor=2)), Run(Layout(pipeline=2))
OVERLAP = dict(bucket_size=20_000, overlap_grad_reduce=True, overlap_param_gather=True)
MODELS = {
    "dense": (
        hf_config("qwen3", layers=4),
        {"DP1": DP1, "another seed": Run(alone=True, seed=78), "DP2": Run(), "DP2 overlap": Run(ddp_options=OVERLAP)}
        | {"TP2": TP2, "PP2": PP2, "PP2 VPP2": Run(Layout(pipeline=2), virtual=2)},
    ),
    "tied": (hf_config("qwen3", layers=4, tied=True), {"DP1": DP1, "TP2": TP2, "PP2": PP2}),
    "moe": (
        hf_config("qwen3_moe", layers=4),
        {"DP1": DP1, "DP2": Run(), "EP2": Run(Layout(expert=2)), "TP2 SP": TP2, "PP2": PP2},
    ),
}


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    results = {model: {} for model in MODELS}
    for alone in (True, False):  # then one world of two ranks serves all other runs
        for model, (hf, runs) in MODELS.items():
            for name, run in runs.items():
                if run.alone == alone:
                    results[model][name] = three_steps(hf, run)
                    if not alone:
                        results[model][name]["misplaced"] = misplaced(hf, run, Path(folder, model))
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def three_steps(hf, run: Run) -> dict:
    with run.process_groups():
        job = run.build(hf)
        config = sr.ParamRounding(mode="stochastic", seed=run.seed)
        controller = sr.apply_param_rounding(job.optimizer, job.chunks, config)
        start, _ = logical_tensors(job)
        job.steps(1, 2, 3)
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
            "recomputed wrongly": recomputed_wrongly(job, main_params, config),
        }


def recomputed_wrongly(job: Job, main_params: dict, config: sr.ParamRounding) -> list[str]:
    """Keys of params that are not the C1 rounding of the main params, element by element from the public API."""
    wrong = []
    for param, identity in job.identities.items():
        index = global_indices(identity)
        whole = torch.zeros(int(index.max()) + 1)
        whole[index] = main_params[param].view(-1)
        rounded = sr.round_to_(whole.bfloat16(), whole, noise=sr.Noise(config.seed, 3, identity.key))
        if not torch.equal(rounded[index], param.detach().view(-1)):
            wrong.append(identity.key)
    return wrong


def misplaced(hf, run: Run, checkpoint: Path) -> list[str]:
    """Keys whose elements Megatron's distributed checkpointing moves elsewhere than `identify` says.

    The first layout of a model saves its weights, which are filled by (key, global index); every other one loads them
    and must find each element where its own fill puts it.
    """
    with run.process_groups():
        job = run.build(hf)
        if not _first_to_come(checkpoint):
            filled = {param: param.detach().clone() for param in job.identities}
            for param in job.identities:
                param.data.zero_()
            job.load_model(dist_checkpointing.load(job.model_state_dict(), str(checkpoint)))
            return [identity.key for param, identity in job.identities.items() if not torch.equal(param, filled[param])]
        dist_checkpointing.save(job.model_state_dict(), str(checkpoint))
        return []


def _first_to_come(folder: Path) -> bool:
    first = not folder.exists()
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return first
