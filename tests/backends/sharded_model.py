"""A small model with dimensions that no number of ranks divides, and gradients that depend on (name, element, step) alone."""

from __future__ import annotations

import hashlib
import zlib

import torch
from torch import nn

import megatron_sr as sr

SEED = 21
OPTIONS = {"AdamW": dict(lr=3e-4, weight_decay=0.1), "SGD": dict(lr=1e-2, momentum=0.9)}


class Model(nn.Module):
    """Embedding, uneven linear layers with biases, a norm, a 3-D parameter, a scalar gate, an FP32 parameter."""

    def __init__(self, width: int = 37):
        super().__init__()
        self.embed = nn.Embedding(29, 22)
        self.up, self.down = nn.Linear(22, width), nn.Linear(width, 22)
        self.norm = nn.LayerNorm(22)
        self.experts = nn.Parameter(torch.empty(5, 6, 22))
        self.gate = nn.Parameter(torch.empty(1))
        self.head = nn.Linear(22, 29, bias=False)
        for name, parameter in self.named_parameters():
            parameter.data.copy_(keyed(name, 0, parameter.shape) * 4)
        self.to(torch.bfloat16)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        x = x + (x[..., None, None, :] * self.experts).mean((-2, -3)) * self.gate
        return self.head(x)


def keyed(name: str, step: int, shape) -> torch.Tensor:
    """FP32, about +-0.03."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return (torch.rand(shape, generator=generator) - 0.5) / 16


def make(model: nn.Module, optimizer: str = "AdamW", **rounding) -> sr.MasterWeights:
    config = sr.ParamRounding(**{"seed": SEED, **rounding})
    return sr.MasterWeights(getattr(torch.optim, optimizer), model, rounding=config, **OPTIONS[optimizer])


def run(model: nn.Module, optimizer, *steps: int) -> None:
    """Optimizer steps on the keyed gradients, each rank holding its shard of them."""
    for step in steps:
        for name, parameter in model.named_parameters():
            grad = keyed(name, step, parameter.shape).to(parameter.dtype)
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor

                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(whole(tensor).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def digests(model: nn.Module, optimizer: sr.MasterWeights) -> dict[str, dict[str, str]]:
    """Of the whole weights and main params, by name. Collective."""
    mains = optimizer.main_params()
    parameters = dict(model.named_parameters())
    return {
        "weights": {name: digest(p) for name, p in parameters.items()},
        "main": {name: digest(mains[p]) for name, p in parameters.items()},
    }


def rounded_wrongly(model: nn.Module, optimizer: sr.MasterWeights) -> list[str]:
    """Names whose weights are not the rounding of the whole main params, from the public API. Collective."""
    wrong = []
    for (name, parameter), main in zip(model.named_parameters(), optimizer.main_params().values(), strict=True):
        expected, main = torch.empty(parameter.shape, dtype=torch.bfloat16), whole(main)
        sr.round_to_(expected, main, noise=sr.Noise(SEED, optimizer.steps, name))
        if not torch.equal(expected, whole(parameter)):
            wrong.append(name)
    return wrong
