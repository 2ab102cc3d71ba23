"""Rollouts of one iteration: every rank generates a share of the prompts, every rank gets all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_sr.rl.tasks import Example, iteration_generator
from megatron_sr.rollout.engine import Completion, SamplingConfig

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


@dataclass(frozen=True)
class Batch:
    """The prompts of an iteration, a pure function of the job's seed and the iteration: the same on every rank and after a resume.

    seeds: one per example. shuffle: the order in which they are trained on.
    """

    iteration: int
    examples: list[Example]
    seeds: list[int]
    shuffle: torch.Tensor

    @classmethod
    def draw(cls, task, seed: int, iteration: int, prompts: int, n: int) -> Batch:
        generator = iteration_generator(seed, iteration)
        examples = task.sample(prompts, generator)
        return cls(
            iteration, examples, prompt_seeds(seed, iteration, prompts, n), torch.randperm(prompts, generator=generator)
        )


@dataclass
class Rollouts:
    """All completions of an iteration, right-padded, on every rank. S = longest (prompt + completion) - 1, padded.

    tokens [prompts, n, S + 1] int64; mask [prompts, n, S], 1 where tokens[..., 1:] is a sampled token;
    log_probs [prompts, n, S] FP32, the engine's, 0 outside the mask; completions [prompts][n] token ids;
    versions [prompts, n] int64: of the weights that generated each; the oldest, where they changed on the way.
    truncated [prompts, n] bool: cut off at the most tokens allowed, not ended by the policy.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    completions: list[list[list[int]]]
    versions: torch.Tensor
    truncated: torch.Tensor


class StaleRollouts(RuntimeError):
    """Rollouts of weights older than --max-staleness allows: training on them is refused."""


def share_of(count: int) -> range:
    """The prompts that this rank generates for."""
    return range(dist.get_rank(), count, dist.get_world_size())


def generate_share(engine, batch: Batch, sampling: SamplingConfig, prompts=None) -> list[list[Completion]]:
    """Completions of this rank's share of a batch, or of the `prompts` (indices into the batch) given."""
    mine = share_of(len(batch.examples)) if prompts is None else prompts
    if not len(mine):
        return []
    return engine.generate([batch.examples[i].prompt_ids for i in mine], sampling, [batch.seeds[i] for i in mine])


def share_rewards(task, examples: list[Example], completions: list[list[list[int]]]) -> list[list[float]]:
    """The task's rewards, every rank computing a share; collective over all ranks, which then hold the same ones.

    Computed once, not by each rank: where a verdict depends on a time limit, two ranks could differ, and with them their models.
    What one rank raises, all raise.
    """
    mine = share_of(len(examples))
    try:
        outcome = task.rewards([examples[i] for i in mine], [completions[i] for i in mine])
    except Exception as error:
        outcome = error
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, outcome)
    for share in shares:
        if isinstance(share, Exception):
            raise share
    return _in_order(shares, len(examples))


def sum_counts(counts: dict[str, int]) -> dict[str, int]:
    """The sum over all ranks of each count; collective."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counts)
    return {name: sum(theirs[name] for theirs in everyone) for name in counts}


def gather(batch: Batch, groups: list[list[Completion]], pad_id: int, multiple: int) -> Rollouts:
    """All ranks' shares together; collective over all ranks. Sequence lengths are padded to `multiple`."""
    ordered = gather_groups(groups, len(batch.examples))
    return collate([e.prompt_ids for e in batch.examples], ordered, pad_id, multiple)


def gather_groups(groups: list, count: int) -> list:
    """What the ranks have for their shares (`share_of`) of `count` prompts, in the prompts' order; collective over all ranks."""
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, groups)
    return _in_order(shares, count)


def _in_order(shares: list[list], count: int) -> list:
    """The inverse of `share_of`: what all ranks have, in the prompts' order."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(count)]


def staleness(rollouts: Rollouts, version: int, limit: int) -> dict[str, int]:
    """How many samples are 0, 1, .. versions older than `version`, the policy's. Raises StaleRollouts beyond `limit`."""
    ages, counts = (version - rollouts.versions).unique(return_counts=True)
    if ages.min() < 0 or ages.max() > limit:
        raise StaleRollouts(
            f"rollouts of weights {ages.max()} versions older than the policy's version {version}, --max-staleness {limit} (the oldest "
            f"and newest: {rollouts.versions.min()}, {rollouts.versions.max()})"
        )
    return {str(age): count for age, count in zip(ages.tolist(), counts.tolist())}


def collate(prompts: list[list[int]], groups: list, pad_id: int, multiple: int) -> Rollouts:
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
    completions = [[list(c.token_ids) for c in group] for group in groups]
    versions = torch.tensor([[c.version for c in group] for group in groups])
    truncated = torch.tensor([[c.finish_reason == "length" for c in group] for group in groups])
    return Rollouts(tokens, mask, log_probs, completions, versions, truncated)
