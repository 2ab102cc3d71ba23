"""One rank: a Megatron model trained by Megatron's DistributedOptimizer and by MasterWeights, the same gradients for both."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr.megatron.fused_adam import FusedAdam
from megatron_sr.megatron.identity import identify
from megatron_sr.megatron.main_params import full_main_params
from megatron_sr.megatron.model import gpt_model, transformer_config
from tests.distributed.megatron_job import LEARNING_RATE, Layout, build, keyed_gradient, keyed_weight, process_groups
from tests.tiny_models import hf_config

HF = hf_config("qwen3", tied=True)
CONFIG = sr.ParamRounding(seed=31)


def main(results_file: str) -> None:
    torch.set_num_threads(1)
    with process_groups(Layout()):
        job = build(HF, Layout())
        sr.apply_param_rounding(job.optimizer, job.chunks, CONFIG)
        job.steps(1, 2, 3)
        mains = full_main_params(job.optimizer)
        theirs = {name: (p.detach(), mains[p]) for name, p in job.chunks[0].module.module.named_parameters()}

        model = gpt_model(HF, transformer_config(HF, Layout()))
        identities = identify(model)
        for parameter, identity in identities.items():
            parameter.data.copy_(keyed_weight(identity).view_as(parameter))
        opt = sr.MasterWeights(
            FusedAdam, model, rounding=CONFIG, identities=identities, lr=LEARNING_RATE, weight_decay=0.1
        )
        for step in (1, 2, 3):
            for parameter, identity in identities.items():
                parameter.grad_dtype = torch.float32  # as Megatron's main_grad
                parameter.grad = keyed_gradient(identity, step).view_as(parameter)
            opt.step()
        ours = {name: (p.detach(), opt.main_params()[p]) for name, p in model.named_parameters()}
    differing = {
        what: [name for name in ours if not torch.equal(ours[name][i], theirs[name][i].view_as(ours[name][i]))]
        for i, what in enumerate(("weights", "main params"))
    }
    rounded = sum((p != main.bfloat16()).sum().item() for p, main in ours.values())
    results = {
        "names": sorted(ours) == sorted(theirs),
        "count": len(ours),
        "differing": differing,
        "stochastic": rounded,
    }
    Path(results_file).write_text(json.dumps(results))
    dist.destroy_process_group()
