"""A small pre-norm transformer whose params lie in one flat FP32 buffer, with completions packed behind their shared prompt.

**Packing.** The G completions of a prompt see the same prompt, so its activations are computed once. A packed sequence is

    prompt (L tokens) | token 0 of completions 0 .. G-1 | token 1 of completions 0 .. G-1 | ...

and a completion token attends to the prompt and to the earlier tokens of its own completion only. That is the function (and the
gradient) of G separate sequences, at a third of the work for the study's sizes. The last token of a completion predicts nothing and
is left out of the input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. length: the longest prompt + completion."""

    vocabulary: int
    length: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape, in the order of the flat buffer."""
        d = self.hidden
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocabulary, d), "position": (self.length, d)}
        for i in range(self.layers):
            shapes |= {
                f"layers.{i}.norm1": (d,),
                f"layers.{i}.qkv": (3 * d, d),
                f"layers.{i}.proj": (d, d),
                f"layers.{i}.norm2": (d,),
                f"layers.{i}.fc1": (4 * d, d),
                f"layers.{i}.fc2": (d, 4 * d),
            }
        return shapes | {"norm": (d,), "output": (self.vocabulary, d)}

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes().values())


def views(flat: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The named tensors that lie one after another in `flat` ([numel], any dtype)."""
    sizes = [math.prod(shape) for shape in config.shapes().values()]
    return {
        name: piece.view(shape) for (name, shape), piece in zip(config.shapes().items(), flat.split(sizes), strict=True)
    }


class _TwoWeights(torch.autograd.Function):
    """y = x w^T; the gradient of x uses `backward_weight` instead of w, that of w is as usual."""

    @staticmethod
    def forward(ctx, x, weight, backward_weight):
        ctx.save_for_backward(x, backward_weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, backward_weight = ctx.saved_tensors
        return grad @ backward_weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None


class Model:
    """flat, grad: [numel] FP32; both are what the optimizer sees. `backward_flat`: other weights for the gradient of activations."""

    def __init__(self, config: ModelConfig, backward_weights: bool = False):
        self.config = config
        self.flat, self.grad = torch.zeros(config.numel), torch.zeros(config.numel)
        self.params = {name: torch.nn.Parameter(v) for name, v in views(self.flat, config).items()}
        for param, grad in zip(self.params.values(), views(self.grad, config).values()):
            param.grad = grad
        self.backward_flat = torch.zeros(config.numel) if backward_weights else None
        self._backward = views(self.backward_flat, config) if backward_weights else None
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def log_probs(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of completion tokens. prompts [P, L], completions [P, G, R] (int64) -> [P, G, R]."""
        p, g, r = completions.shape
        length = prompts.shape[1]
        packed = torch.cat([prompts, completions[:, :, : r - 1].transpose(1, 2).reshape(p, -1)], 1)
        x = self._embed(packed, self._positions(length, g, r - 1))
        mask = self._mask(length, g, r - 1)
        for i in range(self.config.layers):
            x = self._layer(i, x, mask, None)
        logits = self._logits(x[:, length - 1 :]).log_softmax(-1)
        first = logits[:, :1].expand(p, g, -1)  # every completion's first token is predicted by the prompt's last one
        by_step = torch.cat([first[:, None], logits[:, 1:].unflatten(1, (r - 1, g))], 1)
        return by_step.gather(-1, completions.transpose(1, 2)[..., None]).squeeze(-1).transpose(1, 2)

    @torch.no_grad()
    def generate(
        self, prompts: torch.Tensor, completions: int, length: int, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample at temperature 1 (Gumbel-max), or greedily without generator.

        prompts [P, L] -> tokens [P, G, R] int64 and their log-probabilities [P, G, R]. The uniform numbers drawn depend on shapes
        alone, so two policies that share a generator's seed share the random numbers.
        """
        p, prompt_length = prompts.shape
        cache: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * self.config.layers
        mask = self._mask(prompt_length, completions, length - 1)
        x, done = self._embed(prompts, torch.arange(prompt_length)), prompt_length
        tokens, log_probs, start = [], [], 0
        for step in range(length):
            for i in range(self.config.layers):
                x, cache[i] = self._layer(i, x, mask[start:done, :done], cache[i], keep=True)
            logits = self._logits(x[:, -1:] if step == 0 else x).log_softmax(-1).expand(p, completions, -1)
            scores = logits
            if generator is not None:
                uniform = torch.rand(logits.shape, generator=generator).clamp_(min=1e-10)
                scores = logits - (-uniform.log()).log()
            token = scores.argmax(-1)
            tokens.append(token)
            log_probs.append(logits.gather(-1, token[..., None]).squeeze(-1))
            if step < length - 1:
                x = self._embed(token, torch.full((completions,), prompt_length + step))
                start, done = done, done + completions
        return torch.stack(tokens, -1), torch.stack(log_probs, -1)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.params["embedding"]) + self.params["position"][positions]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._norm(x, "norm"), "output")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), self.params[name], 1e-5)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self._backward is None:
            return F.linear(x, self.params[name])
        return _TwoWeights.apply(x, self.params[name], self._backward[name])

    def _layer(self, i: int, x: torch.Tensor, mask: torch.Tensor, past, keep: bool = False):
        """One block; with `keep` also the keys and values, `past` in front of the new ones."""
        p, s, d = x.shape
        heads = self.config.heads
        qkv = self._linear(self._norm(x, f"layers.{i}.norm1"), f"layers.{i}.qkv")
        q, k, v = qkv.view(p, s, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self._linear(attended.transpose(1, 2).reshape(p, s, d), f"layers.{i}.proj")
        h = self._linear(self._norm(x, f"layers.{i}.norm2"), f"layers.{i}.fc1")
        x = x + self._linear(F.gelu(h), f"layers.{i}.fc2")
        return (x, (k, v)) if keep else x

    def _positions(self, prompt: int, completions: int, steps: int) -> torch.Tensor:
        return torch.cat([torch.arange(prompt), prompt + torch.arange(steps).repeat_interleave(completions)])

    def _mask(self, prompt: int, completions: int, steps: int) -> torch.Tensor:
        """[S, S] bool, S = prompt + completions * steps: True where a row's token may look at a column's."""
        key = (prompt, completions, steps)
        if key not in self._masks:
            size = prompt + completions * steps
            index = torch.arange(size)
            who = torch.where(index < prompt, -1, (index - prompt) % completions)  # -1: the prompt, seen by all
            mine = (who[None, :] == -1) | (who[None, :] == who[:, None])
            self._masks[key] = mine & (index[None, :] <= index[:, None])
        return self._masks[key]
