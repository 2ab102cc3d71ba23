"""Mathematical problems from a file, answers compared by math-verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_sr.rl.datasets import read_problems
from megatron_sr.rl.math_pool import MathPool
from megatron_sr.rl.tasks import Example, TaskOptions


def require_math_verify() -> None:
    """Raise ImportError with the way out when math-verify is missing."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"rewards for jsonl and parquet tasks need math-verify ({error}); install it with: pip install 'megatron-sr[math]'"
        ) from error


class MathTask:
    """The problems of a JSONL or Parquet file (implements `tasks.Task`). Raises as `read_problems` and `require_math_verify` do."""

    has_exact_reward = False
    ignore_eos = False

    def __init__(self, kind: str, path: str | Path, tokenizer, options: TaskOptions):
        self.name = f"{kind}:{path}"
        require_math_verify()
        self._tokenizer = tokenizer
        self._pool = MathPool(options.reward_workers, options.reward_time_limit)
        problems = read_problems(path, options.problem_field, options.answer_field, kind)
        self.examples = [Example(options.prompt.ids(problem, tokenizer), answer) for problem, answer in problems]

    def sample(self, count: int, generator: torch.Generator) -> list[Example]:
        """`count` training examples, without repeats while the file has enough problems."""
        order = torch.randperm(len(self.examples), generator=generator).tolist()
        return [self.examples[order[i % len(order)]] for i in range(count)]

    def evaluation_set(self, count: int) -> list[Example]:
        """All problems, in the file's order."""
        return list(self.examples)

    def drop_long_prompts(self, limit: int, announce: bool) -> None:
        """Leave out problems of more than `limit` tokens, and say how many. Raises ValueError if none is left."""
        kept = [e for e in self.examples if len(e.prompt_ids) <= limit]
        dropped = len(self.examples) - len(kept)
        if dropped and announce:
            print(
                f"{self.name}: left out {dropped} of {len(self.examples)} problems longer than --max-prompt-tokens {limit}",
                flush=True,
            )
        if not kept:
            shortest = min(len(e.prompt_ids) for e in self.examples)
            raise ValueError(
                f"--max-prompt-tokens {limit}: every problem is longer (the shortest has {shortest} tokens); raise the limit"
            )
        self.examples = kept

    def rewards(self, examples: Sequence[Example], completions: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """1.0 if math-verify finds the completion's answer equal to the example's, else 0.0; also without a verdict (`failures`)."""
        texts = self._tokenizer.batch_decode([ids for group in completions for ids in group], skip_special_tokens=True)
        answers = [example.answer for example, group in zip(examples, completions) for _ in group]
        flat = iter(self._pool.rewards(list(zip(texts, answers))))
        return [[next(flat) for _ in group] for group in completions]

    def failures(self) -> dict[str, int]:
        """See `math_pool.Failures`."""
        return asdict(self._pool.failures)

    def close(self) -> None:
        """End the processes that compare answers."""
        self._pool.close()
