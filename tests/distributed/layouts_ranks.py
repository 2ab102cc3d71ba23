"""Two or four ranks: three steps in every layout, the same weights and gradients by key. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
import os
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
    options: dict = field(default_factory=dict)
    instances: int = 1
    seed: int = 77

    def build(self, hf) -> Job:
        ddp = self.ddp_options | ({"num_distributed_optimizer_instances": self.instances} if self.instances > 1 else {})
        return build(hf, self.layout, self.virtual, ddp, **self.options)

    def process_groups(self):
        return process_groups(self.layout, self.alone, self.virtual, self.instances)


DP1 = Run(alone=True)
TP2, PP2 = Run(Layout(tensor=2)), Run(Layout(pipeline=2))
OVERLAP = dict(bucket_size=20_000, overlap_grad_reduce=True, overlap_param_gather=True)
NOT_DISTRIBUTED = dict(use_distributed_optimizer=False)
TWO_RANKS = {
    "dense": (
        hf_config("qwen3", layers=4),
        {"DP1": DP1, "another seed": Run(alone=True, seed=78), "DP2": Run(), "DP2 overlap": Run(ddp_options=OVERLAP)}
        | {"DP2 one bucket": Run(ddp_options=dict(bucket_size=None, overlap_grad_reduce=True))}
        | {"DP2 not distributed": Run(ddp_options=NOT_DISTRIBUTED)}
        | {
            "DP2 overlap, not distributed": Run(
                ddp_options=dict(overlap_grad_reduce=True, bucket_size=9_000) | NOT_DISTRIBUTED
            )
        }
        | {"TP2": TP2, "TP2 SP": Run(Layout(tensor=2), options=dict(sequence_parallel=True))}
        | {"PP2": PP2, "PP2 VPP2": Run(Layout(pipeline=2), virtual=2)},
    ),
    "tied": (hf_config("qwen3", layers=4, tied=True), {"DP1": DP1, "TP2": TP2, "PP2": PP2}),
    "moe": (
        hf_config("qwen3_moe", layers=4),
        {"DP1": DP1, "DP2": Run(), "EP2": Run(Layout(expert=2)), "TP2 SP": TP2, "PP2": PP2}
        | {"EP2 not distributed": Run(Layout(expert=2), ddp_options=NOT_DISTRIBUTED)},
    ),
}
FOUR_RANKS = {
    "dense": (
        hf_config("qwen3", layers=4),
        {"DP1": DP1, "DP4": Run(), "DP4 overlap": Run(ddp_options=OVERLAP), "DP4 in 2 instances": Run(instances=2)}
        | {"TP2 PP2": Run(Layout(tensor=2, pipeline=2)), "PP2 VPP2 DP2": Run(Layout(pipeline=2), virtual=2)},
    ),
    "qwen2 tied": (  # no q/k norm, biases at q, k and v
        hf_config("qwen2", layers=4, tied=True),
        {"DP1": DP1, "TP2 PP2": Run(Layout(tensor=2, pipeline=2)), "PP4": Run(Layout(pipeline=4))},
    ),
    "moe": (
        hf_config("qwen3_moe", layers=4),
        {"DP1": DP1, "TP2 EP2": Run(Layout(tensor=2, expert=2)), "PP2 EP2": Run(Layout(pipeline=2, expert=2))}
        | {"PP2 VPP2 EP2 overlap": Run(Layout(pipeline=2, expert=2), virtual=2, ddp_options=OVERLAP)}
        | {"EP4": Run(Layout(expert=4)), "TP2 PP2 SP": Run(Layout(tensor=2, pipeline=2))}
        | {"DP2 EP2 not distributed": Run(Layout(expert=2), ddp_options=NOT_DISTRIBUTED)},
    ),
}


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    models = {"2": TWO_RANKS, "4": FOUR_RANKS}[os.environ["WORLD_SIZE"]]
    results = {model: {} for model in models}
    for alone in (True, False):  # then one world of all ranks serves all other runs
        for model, (hf, runs) in models.items():
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
        controller.verify()
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
