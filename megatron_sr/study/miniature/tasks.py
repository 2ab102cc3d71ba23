"""The study's tasks: prompts, rewards, demonstrations, and the completions whose total probability is the exact expected reward.

A completion is right or wrong, by its tokens alone. Where the right ones can be listed,

    E[reward | prompt] = sum over the right completions c of p(c | prompt)

exactly: no sampling noise hides small steps. Tokens: the digits 0-9, 10 "+", 11 "=".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VOCABULARY = 12
PLUS, EQUALS = 10, 11


def digits(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """[...] -> [..., count]: decimal digits, most significant first."""
    powers = 10 ** torch.arange(count - 1, -1, -1)
    return numbers[..., None] // powers % 10


@dataclass(frozen=True)
class Addition:
    """`abc+def=` -> `ghij`, then `free` further tokens that nobody grades, after `scratch` tokens that nobody grades.

    With free and scratch 0 the answer is unique.
    """

    name: str
    size: int = 3  # digits of a summand
    scratch: int = 0
    free: int = 0

    @property
    def prompt_length(self) -> int:
        return 2 * self.size + 2

    @property
    def evaluation_prompts(self) -> int:
        """As many as the exact reward is averaged over: fewer where there are many right completions to score."""
        return 48 if self.scratch else 512

    @property
    def answer_length(self) -> int:
        return self.size + 1

    @property
    def completion_length(self) -> int:
        return self.scratch + self.answer_length + self.free

    def prompts(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """[count, prompt_length] int64."""
        numbers = torch.randint(0, 10**self.size, (count, 2), generator=generator)
        written = digits(numbers, self.size)
        plus, equals = torch.full((count, 1), PLUS), torch.full((count, 1), EQUALS)
        return torch.cat([written[:, 0], plus, written[:, 1], equals], 1)

    def _answers(self, prompts: torch.Tensor) -> torch.Tensor:
        powers = 10 ** torch.arange(self.size - 1, -1, -1)
        first, second = prompts[:, : self.size], prompts[:, self.size + 1 : 2 * self.size + 1]
        return digits(((first + second) * powers).sum(1), self.answer_length)

    def reward(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """[P, L], [P, G, R] -> [P, G] FP32, 1 where the graded tokens are the answer."""
        graded = completions[..., self.scratch : self.scratch + self.answer_length]
        return (graded == self._answers(prompts)[:, None]).all(-1).float()

    def right_completions(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([P, K, r] the right completions as far as they are graded, [P, K] bool: which entries count)."""
        answers = self._answers(prompts)[:, None]
        if not self.scratch:
            return answers, torch.ones(answers.shape[:2], dtype=torch.bool)
        scratch = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * self.scratch).view(-1, self.scratch)
        p, k = len(prompts), len(scratch)
        completions = torch.cat([scratch.expand(p, k, -1), answers.expand(p, k, -1)], -1)
        return completions, torch.ones(p, k, dtype=torch.bool)

    def demonstrations(self, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """[P, R]: the answer among random digits."""
        p = len(prompts)
        scratch = torch.randint(0, 10, (p, self.scratch), generator=generator)
        free = torch.randint(0, 10, (p, self.free), generator=generator)
        return torch.cat([scratch, self._answers(prompts), free], 1)


@dataclass(frozen=True)
class Split:
    """`n=` (three digits, 0 .. 198) -> two numbers of two digits that add up to n: 1 to 100 right answers."""

    name: str
    prompt_length = 4
    completion_length = 4
    evaluation_prompts = 64

    def prompts(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """[count, 4] int64."""
        n = torch.randint(0, 199, (count,), generator=generator)
        return torch.cat([digits(n, 3), torch.full((count, 1), EQUALS)], 1)

    def _sum(self, prompts: torch.Tensor) -> torch.Tensor:
        return prompts[:, 0] * 100 + prompts[:, 1] * 10 + prompts[:, 2]

    def reward(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """[P, 4], [P, G, 4] -> [P, G] FP32. Tokens that are no digits make a completion wrong."""
        total = completions[..., 0] * 10 + completions[..., 1] + completions[..., 2] * 10 + completions[..., 3]
        return ((total == self._sum(prompts)[:, None]) & (completions < 10).all(-1)).float()

    def right_completions(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([P, 100, 4], [P, 100] bool: whether the second number lies in 0 .. 99)."""
        first = torch.arange(100).expand(len(prompts), 100)
        second = self._sum(prompts)[:, None] - first
        right = (second >= 0) & (second < 100)
        return torch.cat([digits(first, 2), digits(second.clamp(0, 99), 2)], -1), right

    def demonstrations(self, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """[P, 4]: one of the right completions, all equally likely."""
        completions, right = self.right_completions(prompts)
        chosen = torch.multinomial(right.float(), 1, generator=generator)
        return completions.gather(1, chosen[..., None].expand(-1, 1, 4)).squeeze(1)


TASKS = {
    task.name: task
    for task in (
        Addition("addition"),
        Addition("addition-then-free", size=3, free=8),
        Addition("scratch-then-addition", size=2, scratch=2),
        Split("split"),
    )
}
"""addition: a unique answer. The others leave freedom: ungraded tokens behind or before the answer, or many right answers."""


def get(name: str):
    """The task of that name. Raises ValueError for an unknown one."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not known; choose one of: {', '.join(TASKS)}")
    return TASKS[name]
