"""The RL post-training job.

    torchrun --standalone --nproc-per-node 2 -m megatron_sr.rl.train --model BASE --param-rounding stochastic

Megatron-Core trains, one vLLM engine in each rank's process generates. `--help` lists the flags.
"""

from __future__ import annotations

import os
import sys
import traceback

from megatron_sr.megatron.launch import default_to_one_rank
from megatron_sr.rl import options, task_options
from megatron_sr.rl.quiet import quiet_libraries

BAD_INPUT = (ValueError, OSError, ImportError)


def build(args):
    """Process groups, policy, rounding and engine of this rank, as a `PostTraining`. Raises BAD_INPUT for what cannot work."""
    default_to_one_rank()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options.check(args, world_size)
    if not args.verbose:
        quiet_libraries()

    from transformers import AutoConfig, AutoTokenizer

    from megatron_sr.config import from_flags

    hf_config = AutoConfig.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    task, eval_task = task_options.build_tasks(args, tokenizer, announce=rank == 0)

    from megatron_sr.megatron import host

    host.install()
    import torch
    import torch.distributed as dist

    from megatron_sr.megatron.model import Layout, initialize_model_parallel
    from megatron_sr.megatron.optimizer import apply_param_rounding
    from megatron_sr.rl import numerical_parity
    from megatron_sr.rl.base import load_base
    from megatron_sr.rl.engines import build_engine
    from megatron_sr.rl.loop import PostTraining
    from megatron_sr.rl.mxfp8 import engine_start
    from megatron_sr.rl.policy import Policy

    dtype = torch.float16 if args.fp16 else torch.bfloat16
    base = load_base(args.model, dtype)
    if args.numerical_parity:
        numerical_parity.prepare()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    layout = Layout(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    initialize_model_parallel(layout, args.seed)
    torch.manual_seed(args.seed)
    policy = Policy(hf_config, base, layout, args.lr, args.clip_grad, dtype, **options.loss_scale(args))
    rounding = apply_param_rounding(policy.optimizer, policy.ddp, from_flags(args))
    if rounding.mxfp8 is not None:
        base = {name: tensor.clone() for name, tensor in policy.export()}  # sticking counts from the first MXFP8 values
    # The engine comes after Megatron: it joins the default process group instead of making one (facts of vLLM 0.32).
    with engine_start(args.model, rounding.mxfp8) as engine_dir:
        engine = build_engine(args, engine_dir)
    if args.numerical_parity:
        numerical_parity.install(policy)
    return PostTraining(args, policy, rounding, engine, task, tokenizer, base, eval_task)


def close(job) -> None:
    """Orderly end: vLLM's shutdown destroys torch's default process group, so Megatron's groups go first."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    job.close_tasks()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    job.engine.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Exit codes: 0 done, 2 bad input, 1 any other failure (with its traceback)."""
    args = options.parser().parse_args()
    try:
        job = build(args)
    except BAD_INPUT as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-sr: error: {error}", file=sys.stderr, flush=True)
        _end(2)
    except Exception:
        _fail()
    try:
        job.run()
        close(job)
    except BAD_INPUT as error:
        print(f"megatron-sr: error: {error}", file=sys.stderr, flush=True)
        _end(2)
    except Exception:
        _fail()


def _fail() -> None:
    rank, error = os.environ.get("RANK", "0"), traceback.format_exc()
    if "by peer" in error.splitlines()[-1]:  # gloo: "Connection reset by peer", "Connection closed by peer"
        error = "another rank has ended: its own message says why\n"
    print(f"megatron-sr: rank {rank} failed:\n{error}", end="", file=sys.stderr, flush=True)
    _end(1)


def _end(code: int) -> None:
    """Leave without waiting for threads of gloo or vLLM, so that torchrun ends the other ranks at once."""
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":  # dist_checkpointing and vLLM start helper processes that import this module
    main()
