"""The command line of the post-training job, named as Megatron names its flags, and its checks."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from megatron_sr.config import add_flags, from_flags
from megatron_sr.rl import task_options

# Megatron's flags of the dynamic loss scale, with Megatron's defaults.
LOSS_SCALE = (
    ("initial_loss_scale", float, 2.0**32, "loss scale of the first step"),
    ("min_loss_scale", float, 1.0, "smallest loss scale"),
    ("loss_scale_window", int, 1000, "steps without overflow after which it doubles"),
    ("hysteresis", int, 2, "overflows before it halves"),
)


def parser() -> argparse.ArgumentParser:
    """Flags of `python -m megatron_sr.rl.train`."""
    from megatron_sr.rl.engines import KINDS
    from megatron_sr.rollout.engine import IN_FLIGHT

    p = argparse.ArgumentParser(
        prog="megatron_sr.rl.train", description="RL post-training (Dr. GRPO) on Megatron-Core with vLLM rollouts."
    )
    p.add_argument(
        "--model", type=Path, required=True, help="folder of a Hugging Face checkpoint (Qwen2, Qwen3 or Qwen3-MoE)"
    )
    p.add_argument("--task", default="addition", help="addition | jsonl:PATH | parquet:PATH | reasoning-gym:NAME")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--iterations", type=int, default=40)
    p.add_argument("--metrics", type=Path, default=None, help="JSONL file that gets a line an iteration")
    p.add_argument(
        "--tensorboard-dir", type=Path, default=None, help="folder of TensorBoard event files, one run in each"
    )
    p.add_argument(
        "--wandb-project", default=None, help="Weights & Biases project to report to (needs the package wandb)"
    )
    p.add_argument("--quiet", action="store_true", help="no progress lines")
    p.add_argument("--verbose", action="store_true", help="show the start-up messages of torch, Megatron and vLLM")
    add_flags(p)
    task_options.add_flags(p)

    g = p.add_argument_group("optimizer")
    g.add_argument("--lr", type=float, default=1e-6)
    g.add_argument("--clip-grad", type=float, default=1.0)
    g.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    g.add_argument(
        "--fp16",
        action="store_true",
        help="model params, forward and backward pass, and rollouts in FP16 instead of BF16",
    )
    for name, kind, default, what in LOSS_SCALE:
        g.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=f"FP16: {what} (default: {default:g})"
        )

    g = p.add_argument_group("layout")
    g.add_argument("--tensor-model-parallel-size", type=int, default=1)
    g.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    g.add_argument("--expert-model-parallel-size", type=int, default=1)

    g = p.add_argument_group("rollouts and updates")
    g.add_argument("--prompts", type=int, default=64, help="prompts an iteration")
    g.add_argument("--completions", type=int, default=8, help="completions a prompt")
    g.add_argument("--mini-batches", type=int, default=4, help="optimizer steps an iteration")
    g.add_argument("--micro-batch-size", type=int, default=64, help="sequences in one forward pass of a rank")
    g.add_argument("--max-prompt-tokens", type=int, default=None, help="default: 16 for addition, else 1024")
    g.add_argument("--max-completion-tokens", type=int, default=None, help="default: 4 for addition, else 1024")
    g.add_argument("--clip-low", type=float, default=0.2)
    g.add_argument("--clip-high", type=float, default=0.28)
    g.add_argument("--dual-clip", type=float, default=3.0)
    g.add_argument(
        "--importance-ratio-cap",
        type=float,
        default=None,
        metavar="C",
        help="truncated importance sampling: weigh each token by trainer's / engine's probability, at most C (default: off)",
    )
    g.add_argument(
        "--rollout-engine",
        choices=KINDS,
        default="in-process",
        help="vLLM in every rank's process, in a child of every rank, or on a Ray cluster that the first rank drives",
    )
    g.add_argument("--ray-engines", type=int, default=1, help="engines on the Ray cluster")
    g.add_argument("--ray-cpus", type=float, default=1.0, help="CPUs of each, fractions allowed")
    g.add_argument("--ray-gpus", type=float, default=0.0, help="GPUs of each, fractions allowed")
    g.add_argument(
        "--ray-address", default=None, help="of a running cluster (default: one on this machine, started here)"
    )
    g.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        metavar="K",
        help="let rollouts run ahead: train on samples of weights up to K versions old (default: 0, the present ones)",
    )
    g.add_argument(
        "--in-flight",
        choices=IN_FLIGHT,
        default="drain",
        help="requests that run when the weights change: finish them first, abort and ask again, or keep (the new weights go on)",
    )
    g.add_argument(
        "--weight-sync",
        choices=("full", "delta"),
        default="full",
        help="send all weights to the engine, or what changed since the last time (default: full)",
    )
    g.add_argument("--delta-zstd", action="store_true", help="compress the deltas with zstd")
    g.add_argument(
        "--numerical-parity",
        action="store_true",
        help="trainer and engine compute one function, deterministically; reports what still differs (controlled comparisons)",
    )

    g = p.add_argument_group("evaluation")
    g.add_argument(
        "--max-logprob-gap",
        type=float,
        default=0.1,
        help="stop if trainer and engine differ by more, mean nats a token",
    )
    g.add_argument(
        "--eval-prompts",
        type=int,
        default=512,
        help="examples of the exact expected reward, and of a generated --eval-task",
    )
    g.add_argument(
        "--main-params-interval", type=int, default=5, help="score the FP32 main params every N iterations; 0: never"
    )

    g = p.add_argument_group("checkpoints")
    g.add_argument("--save", type=Path, default=None)
    g.add_argument("--save-interval", type=int, default=0, help="iterations between checkpoints; 0: only at the end")
    g.add_argument("--load", type=Path, default=None)
    g.add_argument(
        "--save-hf",
        type=Path,
        default=None,
        help="new folder for the trained model as a Hugging Face checkpoint (BF16)",
    )
    return p


def loss_scale(args: argparse.Namespace) -> dict:
    """The fields of Megatron's OptimizerConfig for FP16's dynamic loss scale; none in BF16."""
    return {name: getattr(args, name) for name, *_ in LOSS_SCALE} if args.fp16 else {}


def check(args: argparse.Namespace, world_size: int) -> None:
    """Raise ValueError or FileNotFoundError, naming flag, value and way out, for what cannot work.

    Runs before any process group or engine is built, so that every rank stops at once.
    """
    from megatron_sr.megatron.model import Layout
    from megatron_sr.rl import numerical_parity, trackers
    from megatron_sr.rl.checkpoint import read_loop_state

    if world_size < 1:
        raise ValueError(f"{world_size} ranks cannot run anything; start at least 1 (--nproc-per-node, --ranks)")
    rounding = from_flags(args)
    task_options.check(args)
    text = args.task != "addition"
    if args.max_prompt_tokens is None:
        args.max_prompt_tokens = 1024 if text else 16
    if args.max_completion_tokens is None:
        args.max_completion_tokens = 1024 if text else 4
    for name, low in (("lr", 0), ("clip_low", 0), ("clip_high", 0), ("dual_clip", 1), ("max_logprob_gap", 0)):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > low):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be a finite number above {low}")
    if not (math.isfinite(args.clip_grad) and args.clip_grad >= 0):
        raise ValueError(f"--clip-grad {args.clip_grad} must be a finite number, at least 0 (0: no clipping)")
    if args.fp16:
        _check_fp16(args, rounding)
    elif not args.bf16:
        raise ValueError(
            f"--no-bf16 with --param-rounding {rounding.mode}: this job trains BF16 model params; drop --no-bf16, or add --fp16"
        )
    for name in (
        "iterations",
        "prompts",
        "completions",
        "mini_batches",
        "micro_batch_size",
        "max_prompt_tokens",
        "max_completion_tokens",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "eval_prompts",
        "ray_engines",
    ):
        _at_least(args, name, 1)
    if args.importance_ratio_cap is not None and not (
        math.isfinite(args.importance_ratio_cap) and args.importance_ratio_cap >= 1
    ):
        raise ValueError(
            f"--importance-ratio-cap {args.importance_ratio_cap} must be a finite number, at least 1: a smaller cap would also weigh down "
            f"tokens on which trainer and engine agree"
        )
    for name in ("save_interval", "main_params_interval", "max_staleness"):
        _at_least(args, name, 0)
    if args.rollout_engine == "ray":
        args.weight_sync = "delta"  # always: the engines are not in this process
    if args.delta_zstd and args.weight_sync != "delta":
        raise ValueError("--delta-zstd compresses deltas; add --weight-sync delta")
    if args.rollout_engine != "in-process" and rounding.format == "mxfp8":
        raise ValueError(
            f"--rollout-engine {args.rollout_engine} with --param-rounding-format mxfp8: the engine could not start again after a "
            f"crash, its MXFP8 start is temporary; use in-process"
        )
    if args.in_flight != "drain" and not args.max_staleness:
        raise ValueError(
            f"--in-flight {args.in_flight} has no effect without rollouts that run ahead; add --max-staleness K, or leave it out"
        )
    numerical_parity.check(args)
    trackers.check(args)
    if args.completions < 2:
        raise ValueError(f"--completions {args.completions}: the advantage needs at least 2 completions a prompt")
    if not (args.model / "config.json").is_file():
        raise FileNotFoundError(
            f"--model {args.model}: no config.json there; give the folder of a Hugging Face checkpoint, or make the demo's base with "
            f"examples/rlvr_arithmetic/make_base.py --out {args.model}"
        )
    layout = Layout(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    data_parallel = layout.data(world_size)
    share = args.mini_batches * data_parallel
    if args.prompts % share:
        raise ValueError(
            f"--prompts {args.prompts} cannot be shared by --mini-batches {args.mini_batches} x {data_parallel} data-parallel ranks; "
            f"choose a multiple of {share}"
        )
    sequences = args.prompts // share * args.completions
    args.micro_batch_size = min(args.micro_batch_size, sequences)
    if sequences % args.micro_batch_size:
        raise ValueError(
            f"--micro-batch-size {args.micro_batch_size} does not divide the {sequences} sequences of a rank's mini-batch; choose a divisor"
        )
    if args.save_interval and not args.save:
        raise ValueError(f"--save-interval {args.save_interval} needs --save FOLDER")
    if args.load:
        done = read_loop_state(args.load)["iteration"]
        if done >= args.iterations:
            raise ValueError(
                f"--load {args.load} has {done} iterations and --iterations {args.iterations} asks for no more; raise --iterations"
            )
    _check_writable(args)


def _check_fp16(args: argparse.Namespace, rounding) -> None:
    """Raise ValueError for what does not go together with --fp16."""
    rounding.for_dtype("float16")
    if args.numerical_parity:
        raise ValueError(
            "--numerical-parity with --fp16: the engine's arithmetic is known for BF16 only; leave one of them out"
        )
    for name, *_ in LOSS_SCALE:
        _at_least(args, name, 1)
    if not (math.isfinite(args.initial_loss_scale) and args.min_loss_scale <= args.initial_loss_scale):
        raise ValueError(
            f"--initial-loss-scale {args.initial_loss_scale:g} must be finite and at least --min-loss-scale {args.min_loss_scale:g}"
        )


def _check_writable(args: argparse.Namespace) -> None:
    """Find out now, not after hours of training, that results cannot be written."""
    from megatron_sr.rl import save_hf

    try:
        if args.save:
            flag, path = "--save", args.save
            args.save.mkdir(parents=True, exist_ok=True)
            if not os.access(args.save, os.W_OK):
                raise PermissionError("Permission denied")
        if args.metrics:
            flag, path = "--metrics", args.metrics
            args.metrics.parent.mkdir(parents=True, exist_ok=True)
            args.metrics.open("a").close()
        if args.tensorboard_dir:
            flag, path = "--tensorboard-dir", args.tensorboard_dir
            args.tensorboard_dir.mkdir(parents=True, exist_ok=True)
            if not os.access(args.tensorboard_dir, os.W_OK):
                raise PermissionError("Permission denied")
        if args.save_hf:
            save_hf.check_new(args.save_hf)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror or error}); choose another place") from None


def _at_least(args: argparse.Namespace, name: str, low: int) -> None:
    if getattr(args, name) < low:
        raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {low}")
