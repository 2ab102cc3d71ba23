"""Base checkpoints: noisy policies that reinforcement learning sharpens. Made by `make`, kept as BF16 safetensors in bases/.

Supervised training on right completions with 30 % of their digits replaced at random: the base samples the right answer with
probability near 0.73 per digit and finds it greedily. AdamW (0.9, 0.99, no decay), warm-up 100 steps, then cosine; gradient norm 1.

    python -m megatron_sr.study.miniature.bases OUT [NAME ...]
"""

from __future__ import annotations

import argparse
import math
from importlib import resources
from pathlib import Path

import torch

from megatron_sr.study.miniature import tasks
from megatron_sr.study.miniature.model import Model, ModelConfig, views

NOISE = 0.3  # of the target digits
BASES = {
    "addition-0": ("addition", 0),
    "addition-1": ("addition", 1),
    "addition-2": ("addition", 2),
    "addition-then-free-0": ("addition-then-free", 0),
    "scratch-then-addition-0": ("scratch-then-addition", 0),
    "split-0": ("split", 0),
}
"""Name -> (task, seed). Bases of one task differ in their initial weights and in their data."""


def config_of(task) -> ModelConfig:
    return ModelConfig(tasks.VOCABULARY, task.prompt_length + task.completion_length)


def folder() -> Path:
    """Where the bases lie in the package."""
    return Path(str(resources.files("megatron_sr.study").joinpath("bases")))


def load(name: str) -> torch.Tensor:
    """[numel] FP32 holding the base's BF16 values. Raises FileNotFoundError or ValueError, naming the way out."""
    from safetensors.torch import load_file

    if name not in BASES:
        raise ValueError(f"base {name!r} is not known; choose one of: {', '.join(BASES)}")
    path = folder() / f"{name}.safetensors"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing; make it again with: python -m megatron_sr.study.miniature.bases {path.parent} {name}"
        )
    tensors, config = load_file(path), config_of(tasks.get(BASES[name][0]))
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if shapes != config.shapes():
        raise ValueError(f"{path}: its tensors are not those of {config}; make it again (see its module's docstring)")
    return torch.cat([tensors[key].float().flatten() for key in config.shapes()])


def initialise(model: Model, generator: torch.Generator) -> None:
    """Embeddings N(0, 0.02); matrices N(0, 1/inputs), those that add to the residual stream smaller by sqrt(2 layers); norms 1."""
    with torch.no_grad():
        for name, param in model.params.items():
            if param.dim() == 1:
                param.fill_(1.0)
                continue
            std = 0.02 if name in ("embedding", "position") else 1 / math.sqrt(param.shape[1])
            if name.endswith(("proj", "fc2")):
                std /= math.sqrt(2 * model.config.layers)
            param.normal_(0, std, generator=generator)


def make(name: str, steps: int = 1800, batch: int = 256, lr: float = 3e-3, report=print) -> torch.Tensor:
    """Train a base; [numel] FP32 with BF16 values."""
    task, seed = tasks.get(BASES[name][0]), BASES[name][1]
    model = Model(config_of(task))
    initialise(model, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(1000 + seed)
    flat = torch.nn.Parameter(model.flat)
    flat.grad = model.grad
    optimizer = torch.optim.AdamW([flat], lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        prompts = task.prompts(batch, generator)
        targets = task.demonstrations(prompts, generator)
        noisy = torch.rand(targets.shape, generator=generator) < NOISE
        targets = torch.where(noisy, torch.randint(0, 10, targets.shape, generator=generator), targets)
        model.grad.zero_()
        loss = -model.log_probs(prompts, targets[:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([flat], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        if step % 200 == 0 or step == steps - 1:
            evaluation = task.prompts(512, torch.Generator().manual_seed(1))
            greedy = task.reward(evaluation, model.generate(evaluation, 1, task.completion_length, None)[0]).mean()
            report(f"{name} step {step}: loss {loss.item():.4f}, greedy reward {greedy.item():.3f}")
    return model.flat.bfloat16().float()


def main() -> None:
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(prog="megatron_sr.study.miniature.bases", description="Make the base checkpoints.")
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(BASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names or BASES:
        flat = make(name, report=lambda line: print(line, flush=True)).bfloat16()
        config = config_of(tasks.get(BASES[name][0]))
        tensors = {key: value.clone() for key, value in views(flat, config).items()}
        save_file(tensors, args.out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
