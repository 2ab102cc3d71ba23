"""What a rollout engine is, whatever runs it: `RolloutEngine` and the values that go in and come out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class UpdateRefused(ValueError):
    """An update that does not fit the engine's model or version. The old weights are untouched and still served."""


class WeightsUnverified(RuntimeError):
    """The engine holds weights that are not known to be the trainer's: it does not generate until a good update."""


class UpdateFailed(RuntimeError):
    """An update that broke off on the way (lost data, a timeout, a wrong digest); `Health` tells whether the old weights still serve."""


class EngineDead(RuntimeError):
    """The engine's process is gone or does not answer. Start a new one and send it all weights."""


class EnginePaused(RuntimeError):
    """`generate` was called by the thread that paused the engine: it would wait for itself. Call `resume` first."""


# What becomes of requests that are being decoded when the engine is paused (for an update or by hand).
DRAIN = "drain"  # they finish first, on the old weights
ABORT = "abort"  # they end now; their completions have finish_reason "abort" and the tokens so far
KEEP = (
    "keep"  # they wait and go on after `resume`, with whatever weights then serve; their keys and values are recomputed
)
IN_FLIGHT = (DRAIN, ABORT, KEEP)

# States of an engine.
SERVING, PAUSED, REFUSING, DEAD = "serving", "paused", "refusing", "dead"


@dataclass(frozen=True)
class Health:
    """state: SERVING, PAUSED, REFUSING (weights not known to be the trainer's) or DEAD. version: of the last good update.

    running: requests being decoded. reason: why the engine does not serve, empty while it does.
    """

    state: str
    version: int
    running: int = 0
    reason: str = ""


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are drawn.

    n               completions per prompt
    temperature     0 is greedy (then n must be 1)
    max_tokens      most new tokens; min_tokens: fewest, before which no stop token is drawn
    ignore_eos      do not stop at the model's end-of-sequence tokens
    stop_token_ids  further tokens to stop at; the stop token is part of the completion
    top_p           nucleus sampling; 1.0 is off

    Raises ValueError for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0

    def __post_init__(self):
        for name, ok, want in (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 or above"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
        ):
            if not ok:
                raise ValueError(f"sampling: {name}={getattr(self, name)} must be {want}")
        if self.temperature == 0.0 and self.n > 1:
            raise ValueError(
                f"sampling: n={self.n} greedy completions (temperature=0) are all the same; use n=1 or a temperature"
            )


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    prompt_index   its prompt's position in the list given to `generate`
    token_ids      the new tokens
    logprobs       natural log of each new token's probability under the model, before temperature and top_p
    finish_reason  "stop" (a stop or end-of-sequence token), "length", or "abort" (see ABORT)
    version        version of the weights that produced it; the oldest, when it was kept over an update (see KEEP)
    last_version   version of the weights that produced its last token; None: `version`
    """

    prompt_index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int
    last_version: int | None = None


@dataclass(frozen=True)
class UpdateReport:
    """What an update did.

    version         the version asked for
    tensors         number of tensors sent
    mismatched      Hugging Face names whose bits, read back from the live engine, are not the trainer's
    seconds         loading; verify_seconds: digests and read-back
    digest          total digest of the trainer's tensors (`Manifest.digest`)
    value_verified  names held in a layout from which only values can be read, not bits: there -0.0 and subnormals count as +0.0
    indistinct      number of the trainer's elements in those tensors that are -0.0 or subnormal
    """

    version: int
    tensors: int
    mismatched: list[str]
    seconds: float
    verify_seconds: float
    digest: str
    value_verified: list[str] = field(default_factory=list)
    indistinct: int = 0

    @property
    def good(self) -> bool:
        return not self.mismatched


class RolloutEngine(Protocol):
    """Generates completions with versioned weights.

    Every method may be called from any thread. `generate` calls of several threads are decoded together.
    """

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """n completions for each prompt of token ids. `seeds`: one per prompt, at least n apart.

        Waits while another thread has paused the engine. Raises ValueError for prompts or seeds that do not fit, WeightsUnverified
        after an update that went wrong, EnginePaused, EngineDead.
        """
        ...

    def update_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, in_flight: str = DRAIN
    ) -> UpdateReport:
        """Replace all weights by `tensors`, (Hugging Face name, tensor) pairs in any order; `version` must grow.

        All or nothing: pause (`in_flight`: what becomes of running requests), stage, check, swap, reset the prefix cache, read
        back, resume. The iterable is always consumed to its end, so a collective export never hangs the other ranks.
        Raises UpdateRefused, the old weights still served, when a name, shape, dtype or the version does not fit; UpdateFailed or
        EngineDead when it broke off: then `health` tells whether the old weights serve or the engine refuses to generate.
        """
        ...

    def pause(self, in_flight: str = DRAIN) -> None:
        """Stop decoding. Returns when no request runs (DRAIN, ABORT) or all stand still (KEEP). Pausing twice is the same as once.

        Raises ValueError for an `in_flight` that is not one of IN_FLIGHT.
        """
        ...

    def resume(self) -> None:
        """Decode again. Does nothing when the engine is not paused."""
        ...

    def health(self) -> Health:
        """The engine's state, at once, also while it generates or is paused. Never raises for a dead engine: its state is DEAD."""
        ...

    def weights_version(self) -> int:
        """Version of the last good update; 0 for the checkpoint that the engine started from."""
        ...

    def weights_digest(self) -> str:
        """Total digest of the weights that the engine holds, read back from the live engine now.

        Raises WeightsUnverified when they are not the ones that it was last given.
        """
        ...

    def shutdown(self) -> None:
        """Release the engine. No other call may follow."""
        ...


def check_in_flight(in_flight: str) -> None:
    """Raise ValueError unless `in_flight` is one of IN_FLIGHT."""
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight={in_flight!r}: what becomes of running requests is one of {', '.join(IN_FLIGHT)}")


def check_seeds(seeds: Sequence[int], n: int, prompts: int) -> None:
    """Raise ValueError unless there is one seed per prompt, none negative, all at least `n` apart.

    Engines give completion i of a prompt the seed `seed + i`: closer seeds would draw the same random numbers for two prompts.
    """
    if len(seeds) != prompts:
        raise ValueError(f"{len(seeds)} seeds for {prompts} prompts; give one seed per prompt")
    ordered = sorted(seeds)
    if ordered and ordered[0] < 0:
        raise ValueError(f"seed {ordered[0]} is negative; seeds must be 0 or above")
    for a, b in itertools.pairwise(ordered):
        if b - a < n:
            raise ValueError(
                f"seeds {a} and {b} are {b - a} apart, but completion i of a prompt is drawn with seed + i: "
                f"keep the seeds at least n={n} apart"
            )
