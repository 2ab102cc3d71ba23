"""What the policy is trained on: a `Task` gives examples (prompts with a verifiable answer) and rewards for completions.

`task_from_spec("addition")`            3-digit + 3-digit addition; answers are four digits, zero-padded
`task_from_spec("jsonl:problems.jsonl")`  one JSON object a line with the fields `problem` and `answer`; rewards by math-verify
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_sr.rl import rewards


@dataclass(frozen=True)
class Example:
    """A prompt in token ids and its answer. `answer_ids` is set where exactly one completion is right."""

    prompt_ids: list[int]
    answer: str
    answer_ids: list[int] | None = None


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

    def reward(self, example: Example, token_ids: list[int]) -> float:
        """1.0 if the completion is the answer, else 0.0."""
        return float(list(token_ids) == example.answer_ids)


class JsonlTask:
    """Problems from a JSONL file, in the tokenizer's chat template where it has one. Rewards by math-verify."""

    has_exact_reward = False
    ignore_eos = False
    instruction = "Solve the problem. Put the final answer in \\boxed{}."

    def __init__(self, path: str | Path, tokenizer):
        self.name = f"jsonl:{path}"
        self.tokenizer = tokenizer
        rewards.require_math_verify()
        self.examples = [self._example(problem, answer) for problem, answer in read_problems(path)]

    def _example(self, problem: str, answer: str) -> Example:
        message = f"{problem}\n{self.instruction}"
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = self.tokenizer.encode(f"Problem: {message}\nAnswer:", add_special_tokens=True)
        return Example(list(ids), answer)

    def sample(self, count: int, generator: torch.Generator) -> list[Example]:
        """`count` training examples, without repeats while the file has enough problems."""
        order = torch.randperm(len(self.examples), generator=generator).tolist()
        return [self.examples[order[i % len(order)]] for i in range(count)]

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

    def reward(self, example: Example, token_ids: list[int]) -> float:
        """1.0 if math-verify finds the completion's answer equal to the example's, else 0.0."""
        return rewards.math_reward(self.tokenizer.decode(token_ids, skip_special_tokens=True), example.answer)


def read_problems(path: str | Path) -> list[tuple[str, str]]:
    """(problem, answer) pairs of a JSONL file.

    Raises FileNotFoundError for a missing file and ValueError, with the line number, for a line that is not a JSON
    object with `problem` and `answer`, and for a file without problems.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"--task jsonl:{path}: there is no such file; give the path of a JSONL file with "
            f"the fields 'problem' and 'answer'"
        )
    problems = []
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: with or without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}: {error.reason}); save the file as UTF-8") from None
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand inside a JSON string
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}); each line must be one object "
                f'like {{"problem": "1+1?", "answer": "2"}}'
            ) from None
        if not isinstance(record, dict) or not {"problem", "answer"} <= record.keys():
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{where}: needs the fields 'problem' and 'answer', found {found}")
        if not isinstance(record["problem"], str) or not record["problem"].strip():
            raise ValueError(f"{where}: 'problem' must be a non-empty string")
        if not isinstance(record["answer"], str | int | float) or isinstance(record["answer"], bool):
            raise ValueError(f"{where}: 'answer' must be a string or a number, found {type(record['answer']).__name__}")
        if not str(record["answer"]).strip():
            raise ValueError(f"{where}: 'answer' is empty, so no completion could be rewarded")
        problems.append((record["problem"], str(record["answer"])))
    if not problems:
        raise ValueError(f'{path}: the file has no problems; add lines like {{"problem": "1+1?", "answer": "2"}}')
    return problems


def task_from_spec(spec: str, tokenizer):
    """The task that `--task` names. Raises ValueError for an unknown one, and as `read_problems` does."""
    if spec == "addition":
        return AdditionTask(tokenizer)
    if spec.startswith("jsonl:"):
        return JsonlTask(spec.removeprefix("jsonl:"), tokenizer)
    raise ValueError(f"--task {spec!r} is not known; choose 'addition' or 'jsonl:PATH'")
