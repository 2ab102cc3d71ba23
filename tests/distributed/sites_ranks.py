"""Two ranks: every cast site, FP16 with loss scaling, formats, chosen tensors, metrics and the replica check, on real Megatron
optimizers. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr.megatron import summary
from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.megatron.replicas import first_holders
from megatron_sr.megatron.sites import parts
from tests.distributed.fused_adam_for_megatron import precision_aware
from tests.distributed.megatron_job import Job, Layout, build, logical_tensors, process_groups
from tests.distributed.rounding_checks import not_rounded, shard_mismatches
from tests.tiny_models import hf_config

DENSE = hf_config("qwen3", tied=True)
MOE = hf_config("qwen3_moe")
NORM = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
STOCHASTIC = sr.ParamRounding(seed=5)
NOT_DISTRIBUTED = dict(use_distributed_optimizer=False)
OFFLOAD = dict(
    use_precision_aware_optimizer=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5,
    overlap_cpu_optimizer_d2h_h2d=True, pin_cpu_grads=False, pin_cpu_params=False,
)  # fmt: skip


def main(results_file: str) -> None:
    torch.set_num_threads(1)
    results = {}
    with process_groups(Layout()):
        results["float16 site"] = float16_site()
        results["fp16"] = {name: fp16(ddp) for name, ddp in (("distributed", {}), ("not distributed", NOT_DISTRIBUTED))}
        results["formats"] = formats()
        results["nearest format"] = nearest_format()
        results["chosen"] = chosen()
        results["metrics"] = {
            name: metrics(DENSE, Layout(), ddp)
            for name, ddp in (("distributed", {}), ("not distributed", NOT_DISTRIBUTED))
        }
        results["offload"] = offload()
        results["precision-aware"] = precision_aware_optimizer()
        results["layer-wise"] = layer_wise()
        results["sgd"] = sgd()
        results["muon"] = {"plain": muon(layer_wise=False), "layer-wise": muon(layer_wise=True)}
        results["faults"] = {"data-parallel replica": fault("decoder.final_layernorm.weight", rank=1)}
        results["faults"]["main params"] = fault_in_main_params()
        results["faults"]["overlap"] = fault_under_overlap()
        results["refused"] = refused()
        results["table"] = table()
    with process_groups(Layout(tensor=2)):
        results["faults"]["norm under TP"] = fault(NORM, rank=0, layout=Layout(tensor=2))
        results["metrics"]["TP2 moe"] = metrics(MOE, Layout(tensor=2), {})
        results["faults"]["router under TP"] = fault(
            "decoder.layers.mlp.router.weight", rank=1, layout=Layout(tensor=2), hf=MOE
        )
    with process_groups(Layout(pipeline=2)):
        tied = "embedding.word_embeddings.weight"
        results["faults"]["tied embedding"] = fault(tied, rank=1, layout=Layout(pipeline=2))
        results["metrics"]["PP2 tied"] = metrics(DENSE, Layout(pipeline=2), {})
    with process_groups(Layout(expert=2)):
        results["metrics"]["EP2"] = metrics(MOE, Layout(expert=2), {})
        results["chained, not distributed"] = chained_not_distributed()
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def start(hf=DENSE, layout=None, config=STOCHASTIC, **options):
    job = build(hf, layout or Layout(), **options)
    return job, sr.apply_param_rounding(job.optimizer, job.chunks, config)


def weights(job: Job) -> dict[str, str]:
    digests, differing = logical_tensors(job)
    assert not differing, f"replicas differ: {differing}"
    return digests


def float16_site() -> dict:
    """The non-distributed optimizer gives the distributed one's bits: each rank rounds whole params."""
    reference, _ = start()
    job, controller = start(ddp_options=NOT_DISTRIBUTED)
    reference.steps(1, 2)
    job.steps(1, 2)
    controller.verify()
    kinds = [type(part).__name__ for part in parts(job.optimizer)]
    return {"kinds": kinds, "equal": weights(job) == weights(reference), "not rounded": not_rounded(job, STOCHASTIC, 2)}


def chained_not_distributed() -> dict:
    job, controller = start(MOE, Layout(expert=2), ddp_options=NOT_DISTRIBUTED)
    job.steps(1, 2)
    controller.verify()
    return {"parts": len(parts(job.optimizer)), "step": controller.step, "not rounded": not_rounded(job, STOCHASTIC, 2)}


def fp16(ddp: dict) -> dict:
    """A dynamic loss scale: gradients come scaled, an overflow skips the step and halves the scale; it draws nothing."""
    options = dict(
        dtype=torch.float16, initial_loss_scale=2.0**10, min_loss_scale=1.0, loss_scale_window=100, hysteresis=1
    )
    skipping, controller = start(ddp_options=ddp, **options)
    never, _ = start(ddp_options=ddp, **options)
    skipping.steps(1)
    never.steps(1)
    scale, before = skipping.optimizer.get_loss_scale().item(), weights(skipping)
    successful = skipping.step(7, poison=float("inf"))
    result = {
        "format": controller.config.format,
        "dtypes": sorted({str(param.dtype) for param in skipping.identities}),
        "successful": bool(successful),
        "unchanged": weights(skipping) == before,
        "step": controller.step,
        "scale": [scale, skipping.optimizer.get_loss_scale().item()],
    }
    skipping.steps(2, 3)
    never.steps(2, 3)
    controller.verify()
    result["not rounded"] = not_rounded(skipping, STOCHASTIC, 3)
    # Gradients are divided by the halved scale, so weights differ from those of `never`; the number of draws does not.
    result["final step"] = controller.step
    return result


def formats() -> dict:
    """Formats simulated in BF16 buffers: the rounding of the main params, with fewer bits in use."""
    results = {}
    for format in ("e8m4", "e8m5", "e8m6", "e8m7", "bf16"):
        config = sr.ParamRounding(seed=5, format=format)
        job, controller = start(config=config)
        job.steps(1, 2)
        controller.verify()
        results[format] = {"not rounded": not_rounded(job, config, 2), "unused bits": _unused_bits(job)}
    return results


def nearest_format() -> dict:
    """nearest in a simulated format is our cast, without noise: the seed does not matter."""
    config = sr.ParamRounding(mode="nearest", seed=5, format="e8m4")
    job, controller = start(config=config)
    other, _ = start(config=sr.ParamRounding(mode="nearest", seed=6, format="e8m4"))
    job.steps(1, 2)
    other.steps(1, 2)
    controller.verify()
    return {
        "not rounded": not_rounded(job, config, 2), "unused bits": _unused_bits(job), "equal": weights(job) == weights(other),
    }  # fmt: skip


def _unused_bits(job: Job) -> int:
    """How many low bits of the 16 are zero in every weight."""
    used = 0
    for param in job.identities:
        bits = param.detach().view(torch.int16).view(-1)
        used |= sum(1 << i for i in range(15) if bool((bits >> i & 1).any()))
    return (used & -used).bit_length() - 1


def chosen() -> dict:
    """Excluded tensors are rounded to nearest, the others as without --param-rounding-exclude."""
    config = sr.ParamRounding(seed=5, exclude=("*norm*", "output_layer*", "embedding*"))
    job, controller = start(hf_config("qwen3"), config=config)
    every, _ = start(hf_config("qwen3"))
    nearest, _ = start(hf_config("qwen3"), config=sr.ParamRounding(mode="nearest"))
    for j in (every, nearest, job):
        j.steps(1, 2)
    controller.verify()
    some, all_, none = weights(job), weights(every), weights(nearest)
    include, _ = start(hf_config("qwen3"), config=sr.ParamRounding(seed=5, include="*linear*.weight"))
    include.steps(1, 2)
    return {
        "excluded": sorted(key for key in some if not config.rounds(key)),
        "wrong": [key for key in some if some[key] != (all_ if config.rounds(key) else none)[key]],
        "stochastic": [key for key in some if config.rounds(key) and all_[key] == none[key]],
        "include is the complement": weights(include) == some,
        "typo": refusal(lambda: start(config=sr.ParamRounding(exclude=("*nrom*", "*norm*")))),
    }


def metrics(hf, layout: Layout, ddp: dict) -> dict:
    """What is logged, against the same numbers from whole tensors before and after the step."""
    seen = []
    job, controller = start(hf, layout, sr.ParamRounding(seed=5, log_interval=2), ddp_options=ddp)
    plain, _ = start(hf, layout, ddp_options=ddp)
    controller.on_metrics(lambda step, values: seen.append((step, values)))
    job.steps(1)
    before = {param: param.detach().clone() for param in job.identities}
    job.steps(2)
    mains = full_main_params(job.optimizer)
    first = first_holders(list(job.identities.values()), torch.device("cpu"))
    sums = torch.zeros(4, dtype=torch.float64)
    for (param, _), counted in zip(job.identities.items(), first):
        if counted:
            main = mains[param].double()
            difference = main - param.detach().double().view_as(main)
            changed = (before[param] != param).sum()
            sums += torch.stack([torch.tensor(float(main.numel())), changed, (difference**2).sum(), (main**2).sum()])
    dist.all_reduce(sums)
    elements, changed, distance, norm = sums.tolist()
    job.steps(3)
    plain.steps(1, 2, 3)
    ((step, values),) = seen
    expected = {
        "changed": changed / elements, "unchanged": 1 - changed / elements,
        "rms": math.sqrt(distance / elements), "relative": math.sqrt(distance / norm),
    }  # fmt: skip
    return {
        "step": step,
        "seen": values,
        "expected": expected,
        "elements": elements,
        "same bits as without logging": weights(job) == weights(plain),
    }


def offload() -> dict:
    """Half of the main params on the host, or all, or none: the same bits as of the plain distributed optimizer's main params."""
    results = {}
    for fraction in (0.0, 0.5, 1.0):
        job, controller = start(**OFFLOAD | dict(optimizer_offload_fraction=fraction))
        job.steps(1, 2)
        controller.verify()
        (part,) = parts(job.optimizer)
        hybrid = part.optimizer
        results[str(fraction)] = {
            "kind": type(hybrid).__name__,
            "offloaded": len(hybrid.gpu_params_map_cpu_copy),
            "params": len(hybrid.param_to_fp32_param),
            "step": controller.step,
            "not rounded": shard_mismatches(job, hybrid.param_to_inner_param, 2),
        }
        before = weights(job)
        state = hybrid.state_dict()
        state["state"] = {number: dict(values) for number, values in state["state"].items()}
        hybrid.load_state_dict(state)  # makes new main params
        controller.round_again()
        results[str(fraction)]["after loading"] = {
            "equal": weights(job) == before, "step": controller.step, "mismatches": controller.mismatches(),
        }  # fmt: skip
        job.steps(3)
        controller.verify()
        results[str(fraction)]["later"] = shard_mismatches(job, hybrid.param_to_inner_param, 3)
    return results


def precision_aware_optimizer() -> dict:
    """FusedAdam's own main params, through the hooks of megatron_sr.fused_adam; Transformer Engine's kernel is a stand-in."""
    results, found = {}, {}
    with precision_aware() as options:
        for name in ("FP32 main params", "16-bit remainders"):
            job, controller = start(**options, store_param_remainders=name == "16-bit remainders")
            job.steps(1, 2)
            controller.verify()
            found[name] = weights(job)
            (site,) = controller.sites
            mains = {shard: state["master_param"] for shard, state in site.inner.state.items()}
            wrong = shard_mismatches(job, mains, 2) if name == "FP32 main params" else None
            results[name] = {"kind": site.kind, "step": controller.step, "not rounded": wrong}
        results["equal"] = len({json.dumps(digests) for digests in found.values()}) == 1
        results["logging"] = refusal(lambda: start(config=sr.ParamRounding(log_interval=1), **options))
        results["nearest"] = refusal(lambda: start(config=sr.ParamRounding(mode="nearest", format="e8m4"), **options))
    return results


def layer_wise() -> dict:
    """LayerWiseDistributedOptimizer: each rank steps some whole params through Float16Optimizers, then all are gathered."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_sr.megatron.fused_adam import FusedAdam

    reference, _ = start(ddp_options=NOT_DISTRIBUTED)
    job = build(DENSE, Layout(), ddp_options=NOT_DISTRIBUTED)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [p for p in job.identities if p.ndim == (1 if group["wd_mult"] == 0.0 else 2)]}
        for part in parts(job.optimizer)
        for group in part.optimizer.param_groups
    ]
    inner = FusedAdam(groups, lr=3e-5, weight_decay=0.1)
    config = parts(job.optimizer)[0].config
    job.optimizer = LayerWiseDistributedOptimizer(
        [inner], config, ProcessGroupCollection.use_mpu_process_groups(), [None], job.chunks
    )
    controller = sr.apply_param_rounding(job.optimizer, job.chunks, STOCHASTIC)
    reference.steps(1, 2)
    job.steps(1, 2)
    controller.verify()
    return {
        "optimizer": type(job.optimizer).__name__,
        "own": [len(site.pieces) for site in controller.sites],
        "params": len(job.identities),
        "step": controller.step,
        "equal": weights(job) == weights(reference),
    }


def sgd() -> dict:
    job, controller = start(ddp_options=NOT_DISTRIBUTED, optimizer="sgd", sgd_momentum=0.9, lr=3e-3)
    job.steps(1, 2)
    controller.verify()
    return {"step": controller.step, "not rounded": not_rounded(job, STOCHASTIC, 2)}


def muon(layer_wise: bool) -> dict:
    """Muon for matrices and Adam for the rest, in Float16 optimizers; layer-wise, each rank steps some whole params."""
    job, controller = start(
        ddp_options=NOT_DISTRIBUTED, optimizer="muon", use_layer_wise_distributed_optimizer=layer_wise
    )
    job.steps(1, 2)
    controller.verify()
    mains = {piece.param: piece.main for site in controller.sites for piece in site.pieces}
    own = Job.__new__(Job)
    own.identities = {param: identity for param, identity in job.identities.items() if param in mains}
    return {
        "optimizer": type(job.optimizer).__name__,
        "inner": [type(site.inner).__name__ for site in controller.sites],
        "step": controller.step,
        "not rounded": not_rounded(own, STOCHASTIC, 2, mains),
        "all params": len(own.identities) == len(job.identities),
    }


def fault(key: str, rank: int, layout: Layout | None = None, hf=DENSE) -> dict:
    """One bit of one replica flips between two steps; --param-rounding-verify-interval 2 finds it at the next check."""
    job, controller = start(hf, layout, sr.ParamRounding(seed=5, verify_interval=2))
    job.steps(1, 2)
    good = refusal(controller.verify)
    targets = [param for param, identity in job.identities.items() if identity.key == key]
    if dist.get_rank() == rank:
        assert targets, f"rank {rank} has no {key}"
        for param in targets:
            param.data.view(-1).view(torch.int16)[-1] ^= 1
    found = refusal(controller.verify)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {"before": good, "found": found, "on every rank": all(text == found for text in everyone)}


def fault_in_main_params() -> dict:
    """A model param that all replicas agree on, but that is not the rounding of its main param."""
    job, controller = start(config=sr.ParamRounding(seed=5, verify_interval=1), ddp_options=NOT_DISTRIBUTED)
    job.steps(1)
    for param, identity in job.identities.items():
        if identity.key.endswith("linear_fc1.weight"):
            param.data.view(-1).view(torch.int16)[0] ^= 1
    return {"found": refusal(controller.verify), "repaired": _repaired(controller)}


def _repaired(controller) -> str | None:
    controller.round_again()
    return refusal(controller.verify)


def fault_under_overlap() -> dict:
    """With --overlap-param-gather the check of step 1 comes at the beginning of step 2, when all params have been gathered."""
    overlap = dict(bucket_size=20_000, overlap_grad_reduce=True, overlap_param_gather=True)
    job, _ = start(config=sr.ParamRounding(seed=5, verify_interval=1), ddp_options=overlap)
    job.steps(1)
    job.gather_params()
    job.steps(2)
    job.gather_params()
    if dist.get_rank() == 1:
        next(iter(job.identities)).data.view(-1).view(torch.int16)[0] ^= 1
    return {"found": refusal(lambda: job.steps(3))}


def refused() -> dict:
    def unknown():
        job = build(DENSE, Layout())
        (part,) = parts(job.optimizer)
        part.__class__ = type("Other", (type(part),), {})
        sr.apply_param_rounding(job.optimizer, job.chunks, STOCHASTIC)

    return {
        "unknown class": refusal(unknown),
        "fp16 format in bf16": refusal(lambda: start(config=sr.ParamRounding(format="fp16"))),
        "e8m8": refusal(lambda: start(config=sr.ParamRounding(format="e8m8"))),
        "mxfp8 with logging": refusal(lambda: start(config=sr.ParamRounding(format="mxfp8", log_interval=5))),
    }


def table() -> dict:
    _, controller = start(hf_config("qwen3"), config=sr.ParamRounding(seed=5, exclude="*norm*", verify_interval=3))
    _, nearest = start(config=sr.ParamRounding(mode="nearest"))
    return {"stochastic": summary.table(controller), "nearest": summary.table(nearest)}


def refusal(attempt) -> str | None:
    """The message with which `attempt` is refused, None if it is not. Any error but ValueError and RuntimeError ends the test."""
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None
