"""From a problem to the token ids that the policy goes on from: a prompt template, and the tokenizer's chat template around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

BOXED = "Put the final answer in \\boxed{}."
TEMPLATES = {
    # what this project asks for unless told otherwise
    "boxed": "{problem}\nSolve the problem. " + BOXED,
    # the instruction that Qwen2.5-Math and DeepSeek-R1 publish for mathematics
    "reason": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # the dataset's prompts are whole already (DAPO-Math-17k asks for a last line "Answer: ...")
    "none": "{problem}",
}
WITHOUT_CHAT = "Problem: {message}\nAnswer:"


@dataclass(frozen=True)
class Prompt:
    """How a problem is put to the policy.

    template  a name of TEMPLATES, or `@FILE`: a text with {problem} in it, which the problem replaces (other braces stay)
    system    a system message, for chat templates that take one

    Raises ValueError for an unknown name and a text without {problem}, FileNotFoundError for a missing file.
    """

    template: str = "boxed"
    system: str | None = None

    def __post_init__(self):
        self.text  # noqa: B018  checks it

    @cached_property
    def text(self) -> str:
        """The template itself."""
        if self.template in TEMPLATES:
            return TEMPLATES[self.template]
        if not self.template.startswith("@"):
            raise ValueError(
                f"--prompt-template {self.template!r} is not known; choose one of {', '.join(TEMPLATES)}, or @FILE with your own"
            )
        path = Path(self.template[1:])
        if not path.is_file():
            raise FileNotFoundError(f"--prompt-template {self.template}: there is no file {path}")
        text = path.read_text(encoding="utf-8").rstrip("\n")
        if "{problem}" not in text:
            raise ValueError(f"--prompt-template {self.template}: {path} lacks {{problem}}, where the problem goes")
        return text

    def ids(self, problem: str, tokenizer) -> list[int]:
        """Token ids up to where the answer begins, in the tokenizer's chat template where it has one.

        A chat template may open the answer itself: DeepSeek-R1's ends with `<think>` and a newline.
        Raises ValueError when there is a system message but no chat template.
        """
        message = self.text.replace("{problem}", problem)
        if tokenizer.chat_template:
            chat = [{"role": "system", "content": self.system}] if self.system else []
            chat.append({"role": "user", "content": message})
            return list(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        if self.system:
            raise ValueError(
                "--system-prompt: this model's tokenizer has no chat template to put it into; leave it out"
            )
        return list(tokenizer.encode(WITHOUT_CHAT.replace("{message}", message), add_special_tokens=True))
