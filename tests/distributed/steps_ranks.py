"""Two ranks: steps, skipped steps and refusals on real optimizers. Rank 0 writes what came out as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr.megatron.arguments import param_rounding
from megatron_sr.megatron.optimizer import Controller
from tests.distributed.megatron_job import Job, Layout, build, logical_tensors, process_groups
from tests.tiny_models import hf_config

DENSE = hf_config("qwen3", tied=True)
MOE = hf_config("qwen3_moe")
STOCHASTIC = sr.ParamRounding(mode="stochastic", seed=5)
NEAREST = sr.ParamRounding(mode="nearest", seed=5)


def main(results_file: str) -> None:
    torch.set_num_threads(1)
    results = {}
    with process_groups(Layout()):
        results["nearest"] = nearest_is_untouched()
        results["fixed noise"] = fixed_noise()
        results["skipped, dense"] = skipped_steps(DENSE, Layout())
        results["refused optimizers"] = refused_optimizers()
        results["refused flags"] = refused_flags()
        results["weights only"] = weights_only()
    with process_groups(Layout(expert=2)):
        results["one part stepped"] = refusal(one_part_stepped)
        results["skipped, chained"] = skipped_steps(MOE, Layout(expert=2))
    if dist.get_rank() == 0:
        Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def start(hf, layout: Layout, config: sr.ParamRounding, **options) -> tuple[Job, Controller]:
    job = build(hf, layout, **options)
    return job, sr.apply_param_rounding(job.optimizer, job.chunks, config)


def weights(job: Job) -> dict[str, str]:
    digests, differing = logical_tensors(job)
    assert not differing, f"replicas differ: {differing}"
    return digests


def nearest_is_untouched() -> dict:
    plain, touched = build(DENSE, Layout()), build(DENSE, Layout())
    objects = [touched.optimizer, *touched.optimizer.chained_optimizers, *touched.chunks]
    before = [dict(vars(o)) for o in [*objects, *map(type, objects)]]
    controller = sr.apply_param_rounding(touched.optimizer, touched.chunks, NEAREST)
    after = [dict(vars(o)) for o in [*objects, *map(type, objects)]]
    replaced = [name for a, b in zip(before, after) for name in a.keys() | b.keys() if a.get(name) is not b.get(name)]
    plain.steps(1, 2)
    touched.steps(1, 2)
    inner = touched.optimizer.chained_optimizers[0].optimizer
    return {
        "replaced": replaced,
        "step hooks": len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks),
        "keys added to checkpoints": sorted(touched.optimizer.state_dict().keys() ^ plain.optimizer.state_dict().keys())
        + sorted(inner.param_groups[0].keys() ^ plain.optimizer.chained_optimizers[0].optimizer.param_groups[0].keys()),
        "equal": weights(plain) == weights(touched),
        "mode": controller.config.mode,
        "step": controller.step,
    }


def fixed_noise() -> dict:
    """`noise="fixed"` leaves the step out: repeating the copy at another step gives the same bits."""
    job, controller = start(DENSE, Layout(), sr.ParamRounding(mode="stochastic", seed=5, noise="fixed"))
    job.steps(1)
    first = weights(job)
    controller.load_state_dict({**controller.state_dict(), "step": 9})
    return {"equal": copied_again(job) == first, "step": controller.step}


def copied_again(job: Job) -> dict[str, str]:
    """The weights after copying main to model params once more, as Megatron does before evaluation and saving in some modes."""
    for param in job.identities:
        param.data.zero_()
    for part in job.optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in job.chunks:
        chunk.start_param_sync(force_sync=True)
    return weights(job)


def skipped_steps(hf, layout: Layout) -> dict:
    """BF16 without loss scaling never skips for an overflow. Two things do skip: a constant --loss-scale, which checks the
    gradients for inf and NaN, and a gradient norm above `grad_norm_skip_threshold`."""
    results = {}
    for how, options, poison in (
        ("inf", dict(loss_scale=1.0), float("inf")),
        ("nan", dict(loss_scale=1.0), float("nan")),
        ("norm", dict(grad_norm_skip_threshold=1e4), 1e6),
    ):
        skipping, controller = start(hf, layout, STOCHASTIC, **options)
        never, _ = start(hf, layout, STOCHASTIC, **options)
        skipping.steps(1)
        never.steps(1)
        before = weights(skipping)
        successful = skipping.step(7, poison)
        unchanged, counted = weights(skipping) == before, controller.step
        skipping.steps(2)
        never.steps(2)
        results[how] = {
            "successful": bool(successful),
            "unchanged": unchanged,
            "step": counted,
            "later equal": weights(skipping) == weights(never),
            "copied again": copied_again(skipping) == weights(never),
            "changed": before != weights(never),
        }
    return results


def one_part_stepped() -> int:
    job, controller = start(MOE, Layout(expert=2), STOCHASTIC)
    job.optimizer.prepare_grads()
    job.optimizer.chained_optimizers[1].step_with_ready_grads()
    return controller.step


def weights_only() -> dict:
    """Main params from BF16 weights, as --finetune takes them: they are representable, so rounding leaves them alone."""
    job, controller = start(DENSE, Layout(), STOCHASTIC)
    before = weights(job)
    job.optimizer.reload_model_params()
    exact = copied_again(job) == before
    return {"exact": exact, "stepped": job.step(1), "step": controller.step}


def refused_optimizers() -> dict:
    def fp32():
        options = dict(use_distributed_optimizer=False, bf16=False, params_dtype=torch.float32)
        start(DENSE, Layout(), STOCHASTIC, ddp_options=dict(use_distributed_optimizer=False), **options)

    def twice():
        job, _ = start(DENSE, Layout(), STOCHASTIC)
        sr.apply_param_rounding(job.optimizer, job.chunks, STOCHASTIC)

    def part_of_the_model():
        job = build(DENSE, Layout())
        sr.apply_param_rounding(job.optimizer, build(DENSE, Layout()).chunks, STOCHASTIC)

    def uncovered():
        job = build(DENSE, Layout())
        model = job.chunks[0].module.module
        complete = model.sharded_state_dict
        model.sharded_state_dict = lambda: {k: v for k, v in complete().items() if "final_layernorm" not in k}
        sr.apply_param_rounding(job.optimizer, job.chunks, STOCHASTIC)

    return {
        "fp32": refusal(fp32),
        "twice": refusal(twice),
        "another model": refusal(part_of_the_model),
        "uncovered": refusal(uncovered),
    }


def refused_flags() -> dict:
    """Megatron's own parser with our flags, then its validation: what a script sees."""
    from megatron.training import arguments

    import megatron_sr.megatron.plugin  # noqa: F401

    def attempt(flags: str):
        sys.argv = ["pretrain_gpt.py", *flags.split()]
        return refusal(lambda: arguments.validate_args(arguments.parse_args(), {}))

    works = "--param-rounding stochastic --bf16 --use-distributed-optimizer"
    cases = {flags: attempt(flags) for flags in (
        "--param-rounding sideways",
        "--param-rounding stochastic --use-distributed-optimizer",
        "--param-rounding-format fp8",
        "--param-rounding-log-interval -1",
    )}  # fmt: skip
    cases |= {flags: attempt(f"{works} {flags}") for flags in (
        "--param-rounding-seed -1",
        f"--param-rounding-seed {2**64}",
        "--optimizer-cuda-graph",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--fp8-format e4m3",
        "--fp8-param-gather",
        "--fp4-format e2m1",
        "--fp4-param-gather",
        "--qk-clip",
    )}  # fmt: skip
    sys.argv = ["pretrain_gpt.py", *works.split(), "--seed", "42"]
    defaults = arguments.parse_args()
    sys.argv = ["pretrain_gpt.py"]
    nearest = arguments.parse_args()
    del nearest.param_rounding
    return {
        "cases": cases,
        "default seed": param_rounding(defaults).seed,
        "yaml": refusal(lambda: param_rounding(nearest)),
    }


def refusal(attempt) -> str | None:
    """The message with which `attempt` is refused, None if it is not. Any error but ValueError and RuntimeError ends the test."""
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None
