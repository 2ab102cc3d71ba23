"""One Megatron-Core rank: main and model params of a small GPT after each of two steps, for other backends to reproduce.

torchrun ... tests/distributed/run_ranks.py tests.backends.megatron_reference FILE
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr.megatron.main_params import full_main_params
from tests.distributed.megatron_job import Layout, build, process_groups
from tests.tiny_models import hf_config


def main(file: str, seed: str) -> None:
    """FILE: name -> key, segments, [main param after each step], [model param after each step]; the name is the key where a
    parameter is a whole tensor (embedding, output layer, last norm) and not a part of one (layers are stacked under one key)."""
    torch.set_num_threads(1)
    with process_groups(Layout()):
        job = build(hf_config("qwen3", hidden=32, vocab=96), Layout())
        sr.apply_param_rounding(job.optimizer, job.chunks, sr.ParamRounding(seed=int(seed)))
        tensors = {}
        for number, (param, (key, segments)) in enumerate(job.identities.items()):
            (first, *more) = segments
            whole = not more and first.global_start == 0 and first.contiguous and "layers" not in key
            name = key if whole else f"piece.{number}"
            tensors[param] = {
                "name": name,
                "key": key,
                "segments": [tuple(s) for s in segments],
                "main": [],
                "model": [],
            }
        for step in (1, 2):
            job.steps(step)
            mains = full_main_params(job.optimizer)
            for param, tensor in tensors.items():
                tensor["main"].append(mains[param].clone())
                tensor["model"].append(param.detach().clone())
        torch.save({"tensors": {tensor["name"]: tensor for tensor in tensors.values()}}, file)
    dist.destroy_process_group()
