"""Two ranks: identities and steps of models beyond Qwen, in several layouts. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

import megatron_sr as sr
from tests.distributed.megatron_job import Job, Layout, job_of, logical_tensors, process_groups
from tests.distributed.other_models import make

LAYOUTS = {"DP2": Layout(), "TP2": Layout(tensor=2), "PP2": Layout(pipeline=2), "EP2": Layout(expert=2)}
RUNS = [
    *(("shared experts", layout) for layout in ("DP2", "TP2", "EP2")),
    *(("MLA", layout) for layout in ("DP2", "TP2")),
    ("MTP", "DP2"),
    ("MTP", "PP2"),
    *(("GDN", layout) for layout in ("DP2", "TP2", "PP2", "EP2")),
    *(("Mamba", layout) for layout in ("DP2", "TP2")),
]


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    results = {}
    for kind, layout in RUNS:
        with process_groups(LAYOUTS[layout]):
            results[f"{kind} {layout}"] = run(kind, LAYOUTS[layout], Path(folder, kind))
    with process_groups(Layout()):
        results["stacked"] = stacked_experts()
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run(kind: str, layout: Layout, checkpoint: Path) -> dict:
    model, config = make(kind, layout)
    job = job_of([model], config)
    result = {"misplaced": misplaced(job, checkpoint), "keys": sorted({i.key for i in job.identities.values()})}
    controller = sr.apply_param_rounding(job.optimizer, job.chunks, sr.ParamRounding(seed=5))
    job.steps(1, 2)
    controller.verify()
    result["weights"], result["differing"] = logical_tensors(job)
    return result


def misplaced(job: Job, checkpoint: Path) -> list[str]:
    """Keys whose elements a distributed checkpoint, saved in the first layout, puts elsewhere than `identify` says."""
    filled = {param: param.detach().clone() for param in job.identities}
    if not checkpoint.exists():
        dist.barrier()
        if dist.get_rank() == 0:
            checkpoint.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(job.model_state_dict(), str(checkpoint))
        return []
    for param in job.identities:
        param.data.zero_()
    job.load_model(dist_checkpointing.load(job.model_state_dict(), str(checkpoint)))
    wrong = [identity.key for param, identity in job.identities.items() if not torch.equal(param, filled[param])]
    for param, value in filled.items():
        param.data.copy_(value)
    return wrong


def stacked_experts() -> dict:
    """Experts stacked in one parameter, as Transformer Engine's single_grouped_weight: entries are views of it."""
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_sr.megatron.identity import identify

    class Stacked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 4, 5))

        def sharded_state_dict(self):
            return {
                f"weight{i}": ShardedTensor.from_rank_offsets(
                    "experts.weight", expert, (0, 1, 2), (1, 3 + i, 6), prepend_axis_num=2
                )
                for i, expert in enumerate(self.weight.unbind(0))
            }

    model = Stacked()
    ((_, identity),) = identify(model).items()
    return {"key": identity.key, "segments": [list(segment) for segment in identity.segments]}
