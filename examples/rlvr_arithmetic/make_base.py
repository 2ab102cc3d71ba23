"""Make the base model of the demo: a small Qwen3 that adds 3-digit numbers, but unsurely.

    python examples/rlvr_arithmetic/make_base.py --out examples/rlvr_arithmetic/base

Supervised fine-tuning with 30 % of the target digits replaced by random ones: greedy decoding is then right nearly always, while a
sampled answer is right with probability ~0.3. RL sharpens such a policy, and its exact expected reward shows even the small steps
of a learning rate of 1e-6. About eight minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from megatron_sr.rl.tasks import AdditionTask, Example

EOS, VOCAB_SIZE = 12, 64
CHARACTERS = "0123456789+=$"


def make_tokenizer():
    """One token per character of `0123456789+=`, and `$` as the end of a sequence."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="$"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="$", pad_token="$", unk_token="$")


def make_config():
    """Qwen3 (410k parameters) with head size 32, the least vLLM's CPU attention takes."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=64,
        rope_theta=1e4,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        rms_norm_eps=1e-6,
        attention_dropout=0.0,
        initializer_range=0.02,
    )


def as_tensors(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [B, 8] and answers [B, 4], int64."""
    return torch.tensor([e.prompt_ids for e in examples]), torch.tensor([e.answer_ids for e in examples])


def answer_logits(model, prompts, answers):
    """Logits [B, 4, vocab] at the positions that predict the answer."""
    tokens = torch.cat([prompts, answers], dim=1)[:, :-1]
    return model(input_ids=tokens, use_cache=False).logits[:, prompts.shape[1] - 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--noise", type=float, default=0.3, help="fraction of target digits that are randomised")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    task = AdditionTask(tokenizer)
    model = AutoModelForCausalLM.from_config(make_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(args.seed + 1)
    held_out = as_tensors(task.evaluation_set(512))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.steps} steps", flush=True)
    started = time.time()
    for step in range(args.steps):
        warmup = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warmup * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        prompts, answers = as_tensors(task.sample(args.batch_size, generator))
        randomised = torch.rand(answers.shape, generator=generator) < args.noise
        targets = torch.where(randomised, torch.randint(0, 10, answers.shape, generator=generator), answers)
        loss = torch.nn.functional.cross_entropy(
            answer_logits(model, prompts, targets).flatten(0, 1), targets.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == args.steps - 1:
            with torch.no_grad():
                log_probs = answer_logits(model, *held_out).log_softmax(-1)
            exact = log_probs.gather(-1, held_out[1][..., None]).squeeze(-1).sum(1).exp().mean().item()
            greedy = (log_probs.argmax(-1) == held_out[1]).all(1).float().mean().item()
            print(
                f"step {step:5d}  loss {loss.item():.4f}  expected reward {exact:.4f}  greedy {greedy:.3f}  {time.time() - started:.0f} s",
                flush=True,
            )
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
