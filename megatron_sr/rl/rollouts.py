"""Rollouts of one iteration: every rank generates a share of the prompts, every rank gets all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_sr.rl.tasks import Example
from megatron_sr.rollout.engine import SamplingConfig

SEED_LIMIT = 2**31 - 1  # request seeds: what every engine takes


def prompt_seeds(seed: int, iteration: int, prompts: int, n: int) -> list[int]:
    """A request seed per prompt, at least `n` apart: the engine gives child i of a request the seed + i.

    Raises ValueError when the seeds of one iteration do not fit below 2**31.
    """
    stride = prompts * n
    if stride > SEED_LIMIT // 2:
        raise ValueError(
            f"{prompts} prompts x {n} completions need more than 2**30 seeds; lower --prompts or --completions"
        )
    # Neighbouring (seed, iteration) pairs get disjoint blocks; 7919 iterations pass before two seeds could meet.
    block = (seed * 7919 + iteration) % (SEED_LIMIT // stride)
    return [block * stride + i * n for i in range(prompts)]


@dataclass
class Rollouts:
    """All completions of an iteration, right-padded, on every rank. S = longest (prompt + completion) - 1, padded.

    tokens [prompts, n, S + 1] int64; mask [prompts, n, S], 1 where tokens[..., 1:] is a sampled token;
    log_probs [prompts, n, S] FP32, the engine's, 0 outside the mask; completions [prompts][n] token ids.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    completions: list[list[list[int]]]
    version: int


def generate(
    engine, examples: list[Example], sampling: SamplingConfig, seeds: list[int], pad_id: int, multiple: int
) -> Rollouts:
    """Generate `sampling.n` completions an example. Collective over all ranks; sequence lengths are padded to `multiple`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(examples), world)
    groups = (
        engine.generate([examples[i].prompt_ids for i in mine], sampling, [seeds[i] for i in mine]) if len(mine) else []
    )
    shares: list = [None] * world
    dist.all_gather_object(shares, groups)
    ordered = [shares[i % world][i // world] for i in range(len(examples))]
    versions = {completion.version for group in ordered for completion in group}
    if len(versions) != 1:
        raise RuntimeError(f"rollouts of one iteration come from several weights versions: {sorted(versions)}")
    return collate([e.prompt_ids for e in examples], ordered, versions.pop(), pad_id, multiple)


def collate(prompts: list[list[int]], groups: list, version: int, pad_id: int, multiple: int) -> Rollouts:
    """Right-pad prompts and completions into tensors. `groups` [prompts][n] are `Completion`s."""
    n = len(groups[0])
    longest = max(len(p) + len(c.token_ids) for p, group in zip(prompts, groups) for c in group)
    length = -(-(longest - 1) // multiple) * multiple
    tokens = torch.full((len(prompts), n, length + 1), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(prompts), n, length)
    log_probs = torch.zeros(len(prompts), n, length)
    for i, (prompt, group) in enumerate(zip(prompts, groups)):
        for j, completion in enumerate(group):
            sequence = list(prompt) + list(completion.token_ids)
            tokens[i, j, : len(sequence)] = torch.tensor(sequence)
            response = slice(len(prompt) - 1, len(sequence) - 1)
            mask[i, j, response] = 1
            log_probs[i, j, response] = torch.tensor(completion.logprobs, dtype=torch.float32)
    return Rollouts(tokens, mask, log_probs, [[list(c.token_ids) for c in group] for group in groups], version)
