"""Fine-tune a Transformers model at a learning rate near 1e-6 in BF16, rounding to nearest and stochastically, side by side.

    python examples/transformers/train.py
    torchrun --standalone --nproc-per-node 2 examples/transformers/train.py --save runs/transformers   # FSDP2
    python examples/transformers/train.py --load runs/transformers                                     # on, on one process

The base of the demo adds 3-digit numbers but was taught with wrong digits; supervised steps on right answers lower its loss on
held-out sums. The model code knows nothing of the rounding: `MasterWeights` is all there is to it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_sr as sr
from megatron_sr.rl.tasks import AdditionTask, iteration_generator

BASE = Path(__file__).parents[1] / "rlvr_arithmetic/base"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(BASE), help="folder or name of a BF16 causal language model")
    parser.add_argument("--modes", nargs="+", default=["nearest", "stochastic"], choices=["nearest", "stochastic"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="sums a step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write a checkpoint of each mode there, for any number of ranks")
    parser.add_argument("--load", type=Path, help="continue what --save wrote")
    args = parser.parse_args()
    sharded = "RANK" in os.environ
    if sharded:
        dist.init_process_group()
    elif not torch.cuda.is_available():
        torch.set_num_threads(1)  # the model is small
    for mode in args.modes:
        train(args, mode, sharded)
    if sharded:
        dist.destroy_process_group()


def train(args, mode: str, sharded: bool) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        model.cuda()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    rounding = sr.ParamRounding(mode=mode, seed=args.seed)
    optimizer = sr.MasterWeights(torch.optim.AdamW, model, rounding=rounding, lr=args.lr, weight_decay=0.0)
    if args.load:
        checkpoint(model, optimizer, args.load / mode, save=False, sharded=sharded)
    task = AdditionTask(AutoTokenizer.from_pretrained(args.model))
    rank, world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    held_out = task.evaluation_set(256)
    until = optimizer.steps + args.steps
    while optimizer.steps < until:
        if optimizer.steps % 20 == 0:
            report(mode, optimizer.steps, loss_of(model, held_out), rank)
        examples = task.sample(args.batch_size, iteration_generator(args.seed, optimizer.steps))
        loss_of(model, examples[rank::world], train=True).backward()
        optimizer.step()
        optimizer.zero_grad()
    report(mode, optimizer.steps, loss_of(model, held_out), rank)
    if args.save:
        checkpoint(model, optimizer, args.save / mode, save=True, sharded=sharded)


def loss_of(model, examples, train: bool = False) -> torch.Tensor:
    """Mean cross-entropy of the answers' digits."""
    device = next(model.parameters()).device
    tokens = torch.tensor([e.prompt_ids + e.answer_ids for e in examples], device=device)
    answer = len(examples[0].answer_ids)
    with torch.set_grad_enabled(train):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -answer:]
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, -answer:].flatten())


def report(mode: str, step: int, loss: torch.Tensor, rank: int) -> None:
    if rank == 0:
        print(f"{mode:10s} step {step:4d}   loss on held-out sums {loss.item():.5f}", flush=True)


def checkpoint(model, optimizer, folder: Path, save: bool, sharded: bool) -> None:
    """torch.distributed.checkpoint: weights, main params, AdamW's moments, the step; resharded on load."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state}
    if save:
        dcp.save(held, checkpoint_id=folder, no_dist=not sharded)
        return
    dcp.load(held, checkpoint_id=folder, no_dist=not sharded)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


if __name__ == "__main__":
    main()
