"""What real DeepSpeed engines do on gloo ranks. Rank 0 writes what came out as JSON; test_deepspeed.py judges it.

torchrun ... deepspeed_ranks.py RESULTS FOLDER SCENARIO...      scenarios share FOLDER with earlier launches
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_set_full_fp32_param

import megatron_sr as sr
from megatron_sr.coordinates import Segment
from megatron_sr.deepspeed import enable
from tests.backends import deepspeed_checkpoints
from tests.backends.deepspeed_job import (
    CONFIG,
    KINDS,
    SEED,
    adamw,
    digest,
    main_params,
    make_engine,
    refusal,
    rounded,
    same,
    share_changed_by_rounding,
    start_ranks,
    train,
    weights,
)

FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


def kinds(folder: Path) -> dict:
    """Three steps of every kind of engine from the same main params."""
    results = {}
    for kind in KINDS:
        engine, rounding = make_engine(kind)
        train(engine, 1, 2, 3)
        whole, mains = weights(engine), main_params(engine)
        results[kind] = {
            "optimizer": type(engine.optimizer).__name__,
            "digest": digest(whole),
            "reference": same(whole, rounded(mains, 3)),
            "step": rounding.step,
            "not nearest": share_changed_by_rounding(whole, mains),
        }
        rounding.recompute()
        results[kind]["recomputed"] = same(weights(engine), whole)
    return results


def accumulation(folder: Path) -> dict:
    """Six micro-batches, two for each step."""
    results = {}
    for kind in ("none", "ZeRO 1", "ZeRO 1, BF16_Optimizer", "ZeRO 2", "ZeRO 3"):
        engine, rounding = make_engine(kind, adamw, gradient_accumulation_steps=2)
        train(engine, *range(1, 7))
        results[kind] = {"step": rounding.step, "reference": same(weights(engine), rounded(main_params(engine), 3))}
    return results


def skipped(folder: Path) -> dict:
    """A step with an overflow between two others."""
    cases = {f"FP16, {kind}": (kind, FP16) for kind in ("none", "ZeRO 1", "ZeRO 2, offload", "ZeRO 3")}
    checked = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    cases |= {f"BF16, {kind}": (kind, checked) for kind in ("ZeRO 1", "ZeRO 1, BF16_Optimizer", "ZeRO 3")}
    results = {}
    for name, (kind, settings) in cases.items():
        engine, rounding = make_engine(kind, adamw, **settings)
        train(engine, 1)
        before = weights(engine)
        train(engine, 2, scale=float("inf"))
        after, counted = weights(engine), rounding.step
        train(engine, 3)
        format = "fp16" if engine.fp16_enabled() else "bf16"
        results[name] = {
            "unchanged": same(before, after),
            "steps": [counted, rounding.step, engine.global_steps],
            "reference": same(weights(engine), rounded(main_params(engine), 2, format)),
        }
    return results


def options(folder: Path) -> dict:
    """exclude, noise, format, as ParamRounding documents them."""
    results = {}
    for kind in ("none", "ZeRO 1", "ZeRO 3"):
        engine, _ = make_engine(kind, rounding=sr.ParamRounding(seed=SEED, exclude=("norm.*", "first.bias")))
        train(engine, 1, 2, 3)
        expected = rounded(main_params(engine), 3, stochastic=lambda name: name in ("first.weight", "second.weight"))
        results[f"exclude, {kind}"] = same(weights(engine), expected)
        engine, _ = make_engine(kind, rounding=sr.ParamRounding(seed=SEED, noise="fixed"))
        train(engine, 1, 2, 3)
        results[f"fixed noise, {kind}"] = same(weights(engine), rounded(main_params(engine), 0))
        engine, _ = make_engine(kind, rounding=sr.ParamRounding(seed=SEED, format="e8m4"))
        train(engine, 1, 2, 3)
        results[f"e8m4, {kind}"] = same(weights(engine), rounded(main_params(engine), 3, "e8m4"))
    return results


def nearest(folder: Path) -> dict:
    """With nearest, nothing of the step is replaced, and the weights are DeepSpeed's own."""
    results = {}
    for kind in ("none", "ZeRO 1", "ZeRO 3"):
        plain, _ = make_engine(kind, adamw, rounding=None)
        touched, rounding = make_engine(kind, adamw, rounding=sr.ParamRounding(mode="nearest"))
        train(plain, 1, 2, 3)
        train(touched, 1, 2, 3)
        optimizers = [engine.optimizer for engine in (plain, touched)]
        groups = [engine.basic_optimizer.param_groups[0] for engine in (plain, touched)]
        hooks = touched.basic_optimizer
        results[kind] = {
            "replaced": sorted(vars(optimizers[0]).keys() ^ vars(optimizers[1]).keys()),
            "keys added to checkpoints": sorted(groups[0].keys() ^ groups[1].keys()),
            "step hooks": len(hooks._optimizer_step_pre_hooks) + len(hooks._optimizer_step_post_hooks),
            "equal": same(weights(plain), weights(touched)),
            "step": rounding.step,
        }
    return results


def moved(folder: Path) -> dict:
    """`offload_states` and `reload_states` between two steps make new lists of model params."""
    results = {}
    # ZeRO 3 moves main params for DeepSpeed's FusedAdam only.
    for kind, states in (("ZeRO 2", None), ("ZeRO 3", [OffloadStateTypeEnum.lp_params])):
        engine, _ = make_engine(kind, adamw)
        train(engine, 1)
        engine.offload_states(include=states, pin_memory=False)
        engine.reload_states()
        train(engine, 2)
        results[kind] = same(weights(engine), rounded(main_params(engine), 2))
    return results


def from_json(folder: Path) -> dict:
    """The plugin: "param_rounding" in DeepSpeed's config."""
    import megatron_sr.deepspeed.plugin  # noqa: F401

    def attempt(settings):
        return refusal(lambda: make_engine("ZeRO 1", rounding=None, param_rounding=settings))

    engine, _ = make_engine("ZeRO 3", rounding=None, param_rounding={"mode": "stochastic", "seed": SEED, "exclude": []})
    train(engine, 1, 2, 3)
    other, _ = make_engine("ZeRO 1", rounding=None)
    return {
        "digest": digest(weights(engine)),
        "another engine": type(vars(other.optimizer).get("step")).__name__,
        "unknown key": attempt({"sed": 1}),
        "wrong value": attempt({"mode": "stochastik"}),
        "no object": attempt("stochastic"),
        "twice": refusal(lambda: make_engine("ZeRO 1", rounding=CONFIG, param_rounding={})),
    }


def refused(folder: Path) -> dict:
    """Combinations that cannot be right: the rounding's own, and settings of DeepSpeed.

    Most of the latter DeepSpeed itself starts on GPUs only, so they are put into the configuration of an engine that has started.
    """
    engine, _ = make_engine("ZeRO 1", adamw, rounding=None)
    config = engine._config

    def own(**fields):
        return refusal(lambda: enable(engine, sr.ParamRounding(**fields)))

    def setting(owner: dict, **values):
        before = {name: owner.get(name) for name in values}
        owner.update(values)
        message = own()
        owner.update(before)
        return message

    nvme = SimpleNamespace(device="nvme")
    on = {"enabled": True}
    zero, bf16, settings = vars(config.zero_config), vars(config.bfloat16_config), config._param_dict
    results = {
        "format": own(format="fp16"),
        "mxfp8": own(format="mxfp8"),
        "save_model": own(save_model="none"),
        "verify_interval": own(verify_interval=1),
        "glob": own(include=("frist.*",)),
        "version": refusal_of_version(own),
        "bf16_master_weights_and_grads": setting(bf16, bf16_master_weights_and_grads=True),
        "zenflow": setting(zero, zenflow=object()),
        "offload_param to NVMe": setting(zero, offload_param=nvme),
        "offload_optimizer to NVMe": setting(zero, offload_optimizer=nvme),
        "zero_quantized_weights": setting(zero, zero_quantized_weights=True),
        "elastic_checkpoint": setting(zero, elastic_checkpoint=True),
        "MiCS": setting(settings, zero_optimization={"mics_shard_size": 2}),
        "quantize_training": setting(settings, quantize_training=on),
        "compression_training": setting(
            settings, compression_training={"weight_quantization": {"shared_parameters": on}}
        ),
        "legacy_fusion": setting(vars(config), optimizer_legacy_fusion=True),
        "MoE": setting(vars(engine), has_moe_layers=True),
        "pipeline": setting(vars(engine), pipeline_parallelism=True),
        "tensor parallelism": setting(vars(engine), mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2)),
        "afterwards": own(),
        "no 16-bit params": refusal(lambda: make_engine("none", adamw, bf16={"enabled": False})),
        "torch_autocast": refusal(
            lambda: make_engine(
                "ZeRO 1", adamw, bf16={"enabled": False}, torch_autocast={"enabled": True, "dtype": "bfloat16"}
            )
        ),
    }
    return results


def refusal_of_version(attempt) -> str | None:
    import deepspeed

    version, deepspeed.__version__ = deepspeed.__version__, "0.21.0"
    try:
        return attempt()
    finally:
        deepspeed.__version__ = version


def as_megatron(folder: Path) -> dict:
    """Main params of a Megatron run at its steps 1 and 2; its model params are in the same file."""
    job = torch.load(folder / "megatron.pt")
    results = {}
    for kind in ("none", "ZeRO 1", "ZeRO 2", "ZeRO 3"):
        # The names of these DeepSpeed params are Megatron's keys, and they are whole tensors there.
        whole = {n: t for n, t in job["tensors"].items() if t["name"] == t["key"]}
        results[f"{kind}, by name"] = {"tensors": len(whole), "equal": follow(kind, whole, identities=False)}
        results[f"{kind}, by identity"] = {"tensors": len(job["tensors"]), "equal": follow(kind, job["tensors"])}
    return results


class Still(torch.optim.Optimizer):
    """Leaves main params as they are: the test sets them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["step"] = torch.tensor(1.0)


class Sum(torch.nn.Module):
    """The sum of its own parameters, as a module whose forward DeepSpeed sees."""

    def forward(self, x):
        return x + sum(param.sum() for param in self.parameters(recurse=False))


class Sums(torch.nn.Module):
    """A model with these parameters. `tensors`: dotted name -> tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, Sum())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(torch.zeros_like(tensor)))

    def forward(self, x):
        for module in self.modules():
            if isinstance(module, Sum) and module._parameters:
                x = module(x)
        return x.sum()


def follow(kind: str, tensors: dict, identities: bool = True) -> list[bool]:
    """Whether DeepSpeed's model params equal Megatron's after each step, given Megatron's main params."""
    model = Sums({name: tensor["model"][0] for name, tensor in tensors.items()})
    params = dict(model.named_parameters())
    given = {params[n]: (t["key"], [Segment(*s) for s in t["segments"]]) for n, t in tensors.items()}
    engine, _ = make_engine(kind, Still, model=model, identities=given if identities else None)
    equal = []
    for step in range(2):
        engine.backward(engine(torch.ones(1, dtype=torch.bfloat16, requires_grad=True)))
        for name, param in params.items():
            if kind == "none":
                main = engine.optimizer.fp32_groups[0][list(params).index(name)]
                main.data.copy_(tensors[name]["main"][step])
            else:
                safe_set_full_fp32_param(param, tensors[name]["main"][step])
        engine.step()
        equal.append(same(weights(engine), {name: tensor["model"][step] for name, tensor in tensors.items()}))
    return equal


SCENARIOS = {
    function.__name__: function
    for function in (kinds, accumulation, skipped, options, nearest, moved, from_json, refused, as_megatron)
} | deepspeed_checkpoints.SCENARIOS


def main(results_file: str, folder: str, *scenarios: str) -> None:
    start_ranks()
    results = {}
    for name in scenarios:
        began = time.perf_counter()
        try:
            results[name] = SCENARIOS[name](Path(folder))
        except Exception:  # the other scenarios shall be seen; every test of this one fails with the traceback
            results[name] = {"error": traceback.format_exc()}
        results[name]["seconds"] = round(time.perf_counter() - began, 1)
        if dist.get_rank() == 0:
            Path(results_file).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
