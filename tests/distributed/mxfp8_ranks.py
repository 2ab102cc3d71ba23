"""Two ranks: MXFP8 model params in real Megatron, every layout. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr import mxfp8
from megatron_sr.megatron.main_params import full_main_params
from tests.distributed.megatron_job import Job, Layout, build, global_indices, logical_tensors, process_groups
from tests.tiny_models import hf_config

CONFIG = sr.ParamRounding(mode="stochastic", seed=77, format="mxfp8")
DENSE, MOE = hf_config("qwen3", layers=4), hf_config("qwen3_moe", layers=4)
OVERLAP = dict(bucket_size=20_000, overlap_grad_reduce=True, overlap_param_gather=True)
LAYOUTS = {
    ("dense", "DP1"): dict(alone=True),
    ("moe", "DP1"): dict(alone=True),
    ("dense", "DP2"): {},
    ("dense", "DP2 overlap"): dict(ddp_options=OVERLAP),
    ("dense", "TP2"): dict(layout=Layout(tensor=2)),
    ("dense", "PP2"): dict(layout=Layout(pipeline=2)),
    ("moe", "DP2"): {},
    ("moe", "EP2"): dict(layout=Layout(expert=2)),
    ("moe", "TP2 SP"): dict(layout=Layout(tensor=2)),
    ("moe", "PP2"): dict(layout=Layout(pipeline=2)),
}


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    results: dict = {"layouts": {"dense": {}, "moe": {}}}
    for (model, name), run in LAYOUTS.items():
        results["layouts"][model][name] = three_steps(DENSE if model == "dense" else MOE, **run)
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def start(hf, layout: Layout, config: sr.ParamRounding = CONFIG, **options):
    job = build(hf, layout, **options)
    return job, sr.apply_param_rounding(job.optimizer, job.chunks, config)


def sync(job: Job) -> None:
    for chunk in job.chunks:
        chunk.start_param_sync(force_sync=True)


def words(job: Job, controller) -> dict:
    """Parameter -> 16 bits an element: scale and code of the quantized ones, BF16 of the others."""
    codes, scales = controller.mxfp8.codes(), controller.mxfp8.scales()
    out = {param: param.detach() for param in job.identities}
    for param, code in codes.items():
        scale = scales[param].repeat_interleave(mxfp8.BLOCK, -1).to(torch.int16)
        out[param] = (code.view(torch.uint8).to(torch.int16) | scale << 8).view(torch.bfloat16)
    return out


def three_steps(hf, layout: Layout = Layout(), alone: bool = False, ddp_options: dict | None = None) -> dict:  # noqa: B008
    with process_groups(layout, alone):
        job, controller = start(hf, layout, ddp_options=ddp_options)
        start_words, _ = logical_tensors(job, words(job, controller))
        job.steps(1, 2, 3)
        job.gather_params()
        main_params = full_main_params(job.optimizer)
        held, differing = logical_tensors(job, words(job, controller))
        values, _ = logical_tensors(job)
        sync(job)  # gathered once more, without a copy of the main params: nothing may change
        gathered_again, _ = logical_tensors(job, words(job, controller))
        controller.round_again()
        sync(job)
        copied_again, _ = logical_tensors(job, words(job, controller))
        return {
            "start": start_words,
            "words": held,
            "main": logical_tensors(job, main_params)[0],
            "differing": differing,
            "gathered again": gathered_again == held,
            "copied again": copied_again == held,
            "values again": logical_tensors(job)[0] == values,
            "step": controller.step,
            "quantized": sorted({job.identities[param].key for param in controller.mxfp8.names}),
            "keys": sorted({identity.key for identity in job.identities.values()}),
            "recomputed wrongly": recomputed_wrongly(job, controller, main_params, CONFIG),
        }


def recomputed_wrongly(job: Job, controller, main_params: dict, config: sr.ParamRounding) -> list[str]:
    """Keys of params that are not the two roundings of the main params: whole logical tensors, from the public API alone."""
    wrong = []
    for param, identity in job.identities.items():
        index = global_indices(identity)
        width = param.shape[-1] if identity.segments[0].contiguous else identity.segments[0].stride
        whole = torch.zeros(-(-(int(index.max()) + 1) // width) * width)
        whole[index] = main_params[param].view(-1)
        noise = sr.Noise(config.seed, controller.step, identity.key)
        expected = sr.round_to_(whole.bfloat16(), whole, noise=noise)
        if param in controller.mxfp8.names:
            second = mxfp8.quantize(expected.view(-1, width), noise=replace(noise, stream=1), min_scale=3)
            expected = second.dequantize(torch.bfloat16).view(-1)
        # Blocks that this rank holds no element of are zero; those it holds are whole.
        if not torch.equal(expected[index], param.detach().view(-1)):
            wrong.append(identity.key)
    return wrong
