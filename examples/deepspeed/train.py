"""Fine-tune a Hugging Face Qwen3 with DeepSpeed at a learning rate near 1e-6, rounding to nearest and stochastically, side by side.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed/train.py                 # ZeRO 3, as ds_config.json says
    torchrun --standalone --nproc-per-node 2 examples/deepspeed/train.py --stage 1 --steps 100

The base of the demo adds 3-digit numbers but was taught with wrong digits; supervised steps on right answers lower its loss on
held-out sums. The import of the plugin and "param_rounding" in ds_config.json are all that is not plain DeepSpeed. Writes
loss.png, and the weights of each mode in 16 bits, into --out. Without a GPU it runs on CPU and gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from rich.console import Console
from rich.progress import Progress

import megatron_sr.deepspeed.plugin  # noqa: F401  makes DeepSpeed read "param_rounding"
from megatron_sr.rl.tasks import AdditionTask, Example, iteration_generator

HERE = Path(__file__).parent
COLOURS = {"nearest": "#c44e52", "stochastic": "#2a78b5"}
IGNORED = -100  # label of tokens that Transformers leaves out of the loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=str(HERE.parent / "rlvr_arithmetic/base"), help="folder of a BF16 causal language model"
    )
    parser.add_argument("--config", type=Path, default=HERE / "ds_config.json", help="DeepSpeed config")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage in place of the config's")
    parser.add_argument("--modes", nargs="+", default=["nearest", "stochastic"], choices=["nearest", "stochastic"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/deepspeed"))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(
            "start this with torchrun (or deepspeed), for example: torchrun --standalone --nproc-per-node 2 "
            + " ".join(sys.argv)
        )
    if not torch.cuda.is_available():
        # DeepSpeed would compile an all-reduce in shared memory, for minutes; gloo does as well for a small model.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    args.out.mkdir(parents=True, exist_ok=True)
    losses = {mode: train(args, mode) for mode in args.modes}
    if torch.distributed.get_rank() == 0:
        (args.out / "losses.json").write_text(json.dumps(losses))
        draw(losses, args.out / "loss.png")
        print(f"wrote {args.out / 'loss.png'}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(args, mode: str) -> list[tuple[int, float]]:
    """(step, loss on held-out sums) of a run, every ten steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads(args.config.read_text())
    config["param_rounding"]["mode"] = mode
    if args.stage is not None:
        config["zero_optimization"]["stage"] = args.stage
    if config["zero_optimization"]["stage"] == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    task = AdditionTask(AutoTokenizer.from_pretrained(args.model))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    held_out, losses = task.evaluation_set(256), []
    size = engine.train_micro_batch_size_per_gpu()
    console = Console(quiet=rank != 0)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(mode, total=args.steps)
        for step in range(args.steps + 1):
            if step % 10 == 0:
                with torch.no_grad():
                    losses.append((step, loss_of(engine, held_out).item()))
                progress.console.print(f"{mode:10s} step {step:4d}   loss on held-out sums {losses[-1][1]:.5f}")
            if step < args.steps:
                examples = task.sample(size * world, iteration_generator(0, step))
                engine.backward(loss_of(engine, examples[rank::world]))
                engine.step()
                progress.advance(bar)
    engine.save_16bit_model(str(args.out / mode), "model.bin")
    return losses


def loss_of(engine, examples: list[Example]) -> torch.Tensor:
    """Transformers' own loss over the answers' digits."""
    tokens = torch.tensor([e.prompt_ids + e.answer_ids for e in examples], device=engine.device)
    labels = tokens.clone()
    labels[:, : len(examples[0].prompt_ids)] = IGNORED
    return engine(input_ids=tokens, labels=labels, use_cache=False).loss


def draw(losses: dict[str, list[tuple[int, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for mode, points in losses.items():
        axes.plot(*zip(*points), marker="o", ms=4, color=COLOURS[mode], label=f"rounding: {mode}")
    axes.set(title="DeepSpeed, BF16, learning rate 2e-6", xlabel="optimizer step", ylabel="loss on held-out sums")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
