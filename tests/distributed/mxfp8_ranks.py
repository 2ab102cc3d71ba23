"""Two ranks: MXFP8 model params in real Megatron, every layout. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

import megatron_sr as sr
from megatron_sr import mxfp8
from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.rollout.export import export_hf
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.mxfp8_export import export_mxfp8, trainer_tensors
from megatron_sr.rollout.mxfp8_layout import dequantized
from tests.distributed.megatron_job import Job, Layout, build, global_indices, logical_tensors, process_groups
from tests.tiny_models import hf_config

CONFIG = sr.ParamRounding(mode="stochastic", seed=77, format="mxfp8")
DENSE, MOE = hf_config("qwen3"), hf_config("qwen3_moe")
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


DRAWS = 200


def main(results_file: str, folder: str) -> None:
    torch.set_num_threads(1)
    results: dict = {"layouts": {"dense": {}, "moe": {}}}
    for (model, name), run in LAYOUTS.items():
        results["layouts"][model][name] = three_steps(DENSE if model == "dense" else MOE, **run)
    checkpoint = Path(folder) / "dp2"
    with process_groups(Layout()):
        results["unbiased"] = unbiased()
        results["nearest"] = nearest()
        results["ends"] = first_and_last_layer_in_bf16()
        results["verify"] = verify()
        results["weights only"] = weights_only()
        results["resume"] = resume(checkpoint)
        results["refused"] = refused()
    with process_groups(Layout(tensor=2)):
        results["resume on TP2"] = continue_on_tp2(checkpoint)
        results["refused"] |= {"cut": refusal(lambda: start(hf_config("qwen3_moe", moe_width=32), Layout(tensor=2)))}
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def start(hf, layout: Layout, config: sr.ParamRounding = CONFIG, **options):
    job = build(hf, layout, **options)
    return job, sr.apply_param_rounding(job.optimizer, job.chunks, config)


def refusal(attempt) -> str | None:
    """The message with which `attempt` is refused, None if it is not."""
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


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
        exported = dict(export_mxfp8(job.chunks, hf, controller.mxfp8))
        bf16 = dict(export_hf(job.chunks, hf))
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
            "exported": Manifest.of(exported.items(), 3).digest,
            "exported as expected": {n: (tuple(t.shape), t.dtype) for n, t in exported.items()}
            == trainer_tensors(hf, set()),
            "exported wrongly": [name for name in bf16 if not torch.equal(dequantized(exported)[name], bf16[name])],
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


def unbiased() -> dict:
    """Draws for one set of main params through the job's own ZeRO shards, which cut rows and 32 x 32 tiles.

    If the mean error is zero, squared mean errors sum to variance / draws; see tests/unit/test_mxfp8.py.
    """
    # Sizes for which the two shards meet within a row of a quantized weight.
    hf = hf_config("qwen3", hidden=96, vocab=320, tied=True)
    job, controller = start(hf, Layout(), replace(CONFIG, mxfp8_scaling="2d"))
    job.steps(1)
    main_params = {p: m for p, m in full_main_params(job.optimizer).items() if p in controller.mxfp8.names}
    pieces = [piece for site in controller.sites for piece in site.pieces if piece.param in main_params]
    cut = sum(piece.main.numel() % (32 * piece.param.shape[-1]) != 0 for piece in pieces)
    unit = {p: _spacing(m) for p, m in main_params.items()}
    total = {p: torch.zeros_like(m, dtype=torch.float64) for p, m in main_params.items()}
    squares = {p: t.clone() for p, t in total.items()}
    for step in range(DRAWS):
        for site in controller.sites:
            site.set_step(step)
        controller.round_again()
        sync(job)
        for param, main in main_params.items():
            error = (param.detach().double() - main.double()) / unit[param]
            total[param] += error
            squares[param] += error**2
    mean = torch.cat([t.flatten() for t in total.values()]) / DRAWS
    variance = torch.cat([t.flatten() for t in squares.values()]) / DRAWS - mean**2
    return {
        "ratio": (mean.square().sum() / (variance / DRAWS).sum()).item(),
        "elements": (variance > 0).sum().item(),
        "shards that cut tiles": cut,
    }


def _spacing(main: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring MXFP8 numbers around each element, FP64."""
    scale = mxfp8.quantize(main, tile=True).scale.double().sub(127).exp2().repeat_interleave(32, -1)
    return torch.exp2(torch.floor(torch.log2((main.double() / scale).abs().clamp(min=2.0**-6))) - 3) * scale


def nearest() -> dict:
    """Both roundings to nearest: what Transformer Engine's own MXFP8 would train with."""
    job, controller = start(DENSE, Layout(), replace(CONFIG, mode="nearest"))
    job.steps(1, 2)
    wrong = []
    for param, main in full_main_params(job.optimizer).items():
        expected = main.bfloat16()
        if param in controller.mxfp8.names:
            expected = mxfp8.quantize(expected, min_scale=mxfp8.BF16_MIN_SCALE).dequantize(torch.bfloat16)
        wrong += [] if torch.equal(expected, param.detach()) else [job.identities[param].key]
    return {"wrong": wrong, "quantized": len(controller.mxfp8.names)}


def first_and_last_layer_in_bf16() -> dict:
    job = build(hf_config("qwen3", layers=4), Layout())
    job.chunks[0].module.module.config.first_last_layers_bf16 = True  # one at either end, Megatron's default
    controller = sr.apply_param_rounding(job.optimizer, job.chunks, CONFIG)
    job.steps(1)
    main_params, wrong = full_main_params(job.optimizer), []
    for param, identity in job.identities.items():
        if param not in controller.mxfp8.names:
            index = global_indices(identity)
            whole = torch.zeros(int(index.max()) + 1)
            whole[index] = main_params[param].view(-1)
            expected = sr.round_to_(whole.bfloat16(), whole, noise=sr.Noise(CONFIG.seed, 1, identity.key))
            wrong += [] if torch.equal(expected[index], param.detach().view(-1)) else [identity.key]
    layers = sorted({name.split(".")[2] for name in controller.mxfp8.names.values()})
    return {"layers": layers, "bf16_layers": sorted(controller.mxfp8.bf16_layers), "not rounded to BF16": wrong}


def verify() -> dict:
    """The replica check passes; a value that is no MXFP8 number, and one that is but is not the rounding, are found by name."""
    job, controller = start(DENSE, Layout())
    job.steps(1, 2)
    good = refusal(controller.verify)
    param = next(p for p, name in controller.mxfp8.names.items() if name.endswith("layers.1.mlp.linear_fc2.weight"))
    param.data.view(-1)[7] *= 1.01
    off_grid = refusal(controller.mxfp8.codes)
    off_grid_verify = refusal(controller.verify)
    param.data.view(-1)[9] *= -1
    return {
        "good": good,
        "off grid": off_grid,
        "off grid, verify": off_grid_verify,
        "other value": refusal(controller.verify),
    }


def weights_only() -> dict:
    """--finetune: BF16 weights are loaded, main params made of them, and only then the model becomes MXFP8."""
    job, controller = start(DENSE, Layout())
    base = {param: torch.full_like(param, 1.0).copy_(param.detach() * 1.25) for param in job.identities}
    for param, value in base.items():
        param.data.copy_(value)
    job.optimizer.reload_model_params()
    main_params = full_main_params(job.optimizer)
    exact = all(torch.equal(main_params[param], value.float()) for param, value in base.items())
    held, _ = logical_tensors(job, words(job, controller))
    controller.round_again()
    sync(job)
    return {"main params are the base": exact, "copied again": logical_tensors(job, words(job, controller))[0] == held}


def resume(folder: Path) -> dict:
    job, controller = start(DENSE, Layout())
    job.steps(1, 2)
    save(job, folder)
    saved, _ = logical_tensors(job, words(job, controller))
    job.steps(3, 4)
    resumed, again = start(DENSE, Layout())
    load(resumed, folder)
    result = {"step": again.step, "loaded": logical_tensors(resumed, words(resumed, again))[0] == saved}
    resumed.steps(3, 4)
    continued, _ = logical_tensors(resumed, words(resumed, again))
    return result | {"continued": continued == logical_tensors(job, words(job, controller))[0], "words": continued}


def continue_on_tp2(folder: Path) -> dict:
    """What DP2 saved after step 2; `main` compares the words with those of the run that was not interrupted."""
    resumed, controller = start(DENSE, Layout(tensor=2))
    load(resumed, folder)
    step = controller.step
    resumed.steps(3, 4)
    return {"step": step, "words": logical_tensors(resumed, words(resumed, controller))[0]}


def save(job: Job, folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(job.state_dict(is_loading=False, sharding="fully_reshardable"), str(folder))


def load(job: Job, folder: Path) -> None:
    for param in job.identities:
        param.data.zero_()
    state = dist_checkpointing.load(job.state_dict(is_loading=True, sharding="fully_reshardable"), str(folder))
    job.load_model(state)
    job.optimizer.load_state_dict(state["optimizer"])


def refused() -> dict:
    return {
        "not distributed": refusal(lambda: start(DENSE, Layout(), ddp_options=dict(use_distributed_optimizer=False))),
        "no blocks": refusal(lambda: start(hf_config("qwen3_moe", moe_width=48), Layout())),
    }
