"""What the policy is trained on: a `Task` gives examples (prompts with a verifiable answer) and rewards for completions.

addition              3-digit + 3-digit addition; answers are four digits, zero-padded
jsonl:PATH            mathematical problems, one JSON object a line; rewards by math-verify (`math_task`)
parquet:PATH          the same from a Parquet file
reasoning-gym:NAME    generated problems of the reasoning-gym library, scored by it (`gym_task`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_sr.rl.prompts import Prompt


@dataclass(frozen=True)
class Example:
    """A prompt in token ids and its answer. answer_ids: where exactly one completion is right. scoring: what else a scorer needs."""

    prompt_ids: list[int]
    answer: str
    answer_ids: list[int] | None = None
    scoring: dict | None = None


class Task(Protocol):
    """name: the `--task` that gives it. has_exact_reward: examples have `answer_ids`. ignore_eos: completions have a fixed length."""

    name: str
    has_exact_reward: bool
    ignore_eos: bool

    def sample(self, count: int, generator: torch.Generator) -> list[Example]:
        """`count` training examples, a function of the generator's state alone."""

    def evaluation_set(self, count: int) -> list[Example]:
        """Fixed examples, the same for every seed and run: `count` where examples are generated, all where they come from a file."""

    def drop_long_prompts(self, limit: int, announce: bool) -> None:
        """Leave out examples of more than `limit` prompt tokens. Raises ValueError if none is left."""

    def rewards(self, examples: Sequence[Example], completions: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """From 0.0 to 1.0 for each completion (token ids) of each example, in order."""

    def failures(self) -> dict[str, int]:
        """How many rewards could not be determined, by reason, since the job began; {} where that cannot happen."""

    def close(self) -> None:
        """End what the task has running."""


@dataclass(frozen=True)
class TaskOptions:
    """What beside its name makes a task; the defaults are the command line's.

    prompt, problem_field, answer_field  of problems from a file and of reasoning-gym (prompt)
    reward_workers, reward_time_limit    see `math_pool.MathPool`
    settings                             of a reasoning-gym dataset
    """

    prompt: Prompt = field(default_factory=Prompt)
    problem_field: str = "problem"
    answer_field: str = "answer"
    reward_workers: int = 1
    reward_time_limit: float = 5.0
    settings: dict = field(default_factory=dict)


def iteration_generator(seed: int, iteration: int) -> torch.Generator:
    """Randomness of one iteration as a pure function of (seed, iteration), so that a resumed job draws the same prompts."""
    return torch.Generator().manual_seed((seed * 1_000_003 + iteration) % 2**63)


class AdditionTask:
    """`abc+def=` -> `ghij`. The tokenizer must map each of 0-9, + and = to one token."""

    name = "addition"
    answer_length = 4
    has_exact_reward = True
    ignore_eos = True  # answers have a fixed length

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        for character in "0123456789+=":
            if len(tokenizer.encode(character, add_special_tokens=False)) != 1:
                raise ValueError(
                    f"the task 'addition' needs a tokenizer with one token per character, but {character!r} has "
                    f"{len(tokenizer.encode(character, add_special_tokens=False))}; use the base that "
                    f"examples/rlvr_arithmetic/make_base.py makes"
                )

    def _example(self, a: int, b: int) -> Example:
        answer = f"{a + b:04d}"
        encode = self.tokenizer.encode
        return Example(
            encode(f"{a:03d}+{b:03d}=", add_special_tokens=False), answer, encode(answer, add_special_tokens=False)
        )

    def sample(self, count: int, generator: torch.Generator) -> list[Example]:
        """`count` training examples."""
        pairs = torch.randint(0, 1000, (count, 2), generator=generator).tolist()
        return [self._example(a, b) for a, b in pairs]

    def evaluation_set(self, count: int) -> list[Example]:
        """`count` fixed examples for the exact expected reward, the same for every seed and run."""
        return self.sample(count, torch.Generator().manual_seed(99_991))

    def drop_long_prompts(self, limit: int, announce: bool) -> None:
        """Raise ValueError if the task's prompts are longer than `limit` tokens."""
        length = len(self._example(0, 0).prompt_ids)
        if length > limit:
            raise ValueError(
                f"--max-prompt-tokens {limit}: prompts of the task 'addition' have {length} tokens; raise the limit"
            )

    def rewards(self, examples: Sequence[Example], completions: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """1.0 if the completion is the answer, else 0.0."""
        return [[float(list(ids) == e.answer_ids) for ids in group] for e, group in zip(examples, completions)]

    def failures(self) -> dict[str, int]:
        """None can happen."""
        return {}

    def close(self) -> None:
        """Nothing runs."""


def task_from_spec(spec: str, tokenizer, options: TaskOptions | None = None) -> Task:
    """The task that `--task` names.

    Raises ValueError for an unknown one, ImportError for a missing library, and what `MathTask` and `GymTask` raise.
    """
    options = options or TaskOptions()
    kind, _, what = spec.partition(":")
    if spec == "addition":
        return AdditionTask(tokenizer)
    if kind in ("jsonl", "parquet") and what:
        from megatron_sr.rl.math_task import MathTask

        return MathTask(kind, what, tokenizer, options)
    if kind == "reasoning-gym" and what:
        from megatron_sr.rl.gym_task import GymTask

        return GymTask(what, tokenizer, options)
    raise ValueError(
        f"--task {spec!r} is not known; choose 'addition', 'jsonl:PATH', 'parquet:PATH' or 'reasoning-gym:NAME'"
    )
