"""Generated problems of the reasoning-gym library (Stojanovski et al. 2025), scored by it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from megatron_sr.rl.tasks import Example, TaskOptions

EVALUATION_SEED = 99_991
_BOXED = "\\boxed{"


class GymTask:
    """A dataset of reasoning-gym by name, for example chain_sum (implements `tasks.Task`).

    options.settings  the dataset's own settings, such as {"min_terms": 2, "max_terms": 2}; `size` and `seed` are set here

    Answers are what stands in the last \\boxed{}, or else the last line. A reward is 1.0 where the dataset scores the answer 1.0 and 0.0
    otherwise: partial credit (0.01 for an answer of the right form) would reward the form. Scorers run in this process.

    Raises ImportError when reasoning-gym is missing, ValueError for an unknown name or setting.
    """

    has_exact_reward = False
    ignore_eos = False

    def __init__(self, name: str, tokenizer, options: TaskOptions):
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(
                f"--task reasoning-gym:{name} needs the reasoning-gym library ({error}); install it with: pip install "
                f"'megatron-sr[reasoning-gym]' (it compiles pycosat: a C compiler is needed)"
            ) from error
        self.name = f"reasoning-gym:{name}"
        self._create, self._dataset, self._settings = reasoning_gym.create_dataset, name, options.settings
        self._tokenizer, self._prompt, self._longest = tokenizer, options.prompt, None
        if clash := {"seed", "size"} & options.settings.keys():
            raise ValueError(
                f"--task-settings {', '.join(sorted(clash))}: the job sets that itself, from --seed; leave it out"
            )
        try:
            self._scorer = self._generate(0, 1)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(
                f"--task reasoning-gym:{name} with --task-settings {options.settings}: {error}; the datasets and their settings are "
                f"listed in reasoning-gym's GALLERY.md"
            ) from error

    def _generate(self, seed: int, size: int):
        return self._create(self._dataset, seed=seed, size=size, **self._settings)

    def _examples(self, seed: int, count: int) -> list[Example]:
        """The first `count` problems of this seed with prompts that are short enough."""
        found: list[Example] = []
        for attempt in range(8):
            entries = self._generate(seed + attempt, count)
            for i in range(count):
                entry = entries[i]
                ids = self._prompt.ids(entry["question"], self._tokenizer)
                if self._longest is None or len(ids) <= self._longest:
                    found.append(Example(ids, str(entry["answer"]), scoring=entry))
            if len(found) >= count:
                return found[:count]
        raise ValueError(
            f"--max-prompt-tokens {self._longest}: only {len(found)} of {8 * count} problems of {self.name} are short enough; raise it"
        )

    def sample(self, count: int, generator: torch.Generator) -> list[Example]:
        """`count` new problems."""
        return self._examples(int(torch.randint(0, 2**31 - 16, (), generator=generator)), count)

    def evaluation_set(self, count: int) -> list[Example]:
        """`count` fixed problems."""
        return self._examples(EVALUATION_SEED, count)

    def drop_long_prompts(self, limit: int, announce: bool) -> None:
        """From here on only problems of at most `limit` tokens are drawn. Raises ValueError when hardly any is that short."""
        self._longest = limit
        self.evaluation_set(8)

    def rewards(self, examples: Sequence[Example], completions: Sequence[Sequence[list[int]]]) -> list[list[float]]:
        """1.0 where reasoning-gym gives full marks, else 0.0."""
        return [[self._reward(e, ids) for ids in group] for e, group in zip(examples, completions)]

    def _reward(self, example: Example, ids: list[int]) -> float:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return float(self._scorer.score_answer(final_answer(text), example.scoring) == 1.0)

    def failures(self) -> dict[str, int]:
        """Scorers always answer."""
        return {}

    def close(self) -> None:
        """Nothing runs."""


def final_answer(text: str) -> str:
    """What stands in the last \\boxed{...}, braces matched, else in <answer>...</answer>, else in the last line that is not blank."""
    start = text.rfind(_BOXED)
    if start >= 0:
        depth, at = 1, start + len(_BOXED)
        for end in range(at, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[at:end].strip()
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return tagged[-1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
