"""The same with transformers.Trainer: one argument, no callback, no subclass. What derives from Trainer (TRL) takes it too.

python examples/transformers/trainer.py --mode stochastic
"""

from __future__ import annotations

import argparse

import torch
from train import BASE, loss_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import megatron_sr as sr
from megatron_sr.rl.tasks import AdditionTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(BASE))
    parser.add_argument("--mode", default="stochastic", choices=["nearest", "stochastic"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    task = AdditionTask(AutoTokenizer.from_pretrained(args.model))
    examples, held_out = task.sample(4096, torch.Generator().manual_seed(0)), task.evaluation_set(256)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=64,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            save_steps=20,
            logging_steps=20,
            report_to=[],
        ),
        train_dataset=[row(e) for e in examples],
        optimizer_cls_and_kwargs=sr.trainer_optimizer(
            model, torch.optim.AdamW, rounding=sr.ParamRounding(mode=args.mode, seed=0), lr=args.lr
        ),
    )
    print(f"{args.mode}: loss on held-out sums {loss_of(model, held_out):.5f}")
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"{args.mode}: loss on held-out sums {loss_of(model, held_out):.5f} after {args.steps} steps")


def row(example) -> dict:
    """The prompt is not trained on."""
    return {
        "input_ids": example.prompt_ids + example.answer_ids,
        "labels": [-100] * len(example.prompt_ids) + example.answer_ids,
    }


if __name__ == "__main__":
    main()
