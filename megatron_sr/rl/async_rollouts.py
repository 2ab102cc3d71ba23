"""Rollouts that run ahead of the trainer, at most `max_staleness` weights versions.

The batch of iteration i is trained on by the policy of version i + 1. It is handed to the engine as soon as the policy has version
i + 1 - max_staleness, not before, so whatever the engine does with it, no token of it is older than allowed; and at most
max_staleness + 1 batches are on the way at any time. Each batch has a thread that calls `engine.generate`; the engine decodes them
together. What becomes of requests that run when the weights change is the engine's `in_flight`: they are drained, kept (finished
by the new weights), or aborted and, here, asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from megatron_sr.rl.rollouts import Batch, generate_share, share_of
from megatron_sr.rollout.engine import Completion, RolloutEngine, SamplingConfig


class RolloutQueue:
    """This rank's share of the batches to come, generated in order.

    draw       iteration -> `Batch`; a pure function
    last       number of iterations of the whole job: no batch beyond is started
    aborted    how many prompts were asked for again because an update aborted them
    """

    def __init__(
        self,
        engine: RolloutEngine,
        draw: Callable[[int], Batch],
        sampling: SamplingConfig,
        max_staleness: int,
        last: int,
    ):
        self._engine, self._draw, self._sampling = engine, draw, sampling
        self._ahead, self._last = max_staleness, last
        # Calls that are collective over the ranks must be made in one order on all of them: one thread.
        threads = 1 if getattr(engine, "collective", False) else max_staleness + 1
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rollouts")
        self._batches: dict[int, tuple[Batch, Future]] = {}
        self.aborted = 0

    def advance(self, iteration: int) -> None:
        """The policy of `iteration` (version iteration + 1) is in the engine: start every batch that may now be started."""
        for i in range(iteration, min(iteration + self._ahead + 1, self._last)):
            if i not in self._batches:
                batch = self._draw(i)
                self._batches[i] = batch, self._threads.submit(self._generate, batch)

    def take(self, iteration: int) -> tuple[Batch, list[list[Completion]]]:
        """The batch of `iteration` and this rank's completions of it; waits for them. Raises what generating them raised."""
        batch, future = self._batches.pop(iteration)
        return batch, future.result()

    @property
    def waiting(self) -> int:
        """Batches on the way or ready, not yet taken."""
        return len(self._batches)

    def close(self) -> None:
        """Let no more batches start, and wait for those on the way."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _generate(self, batch: Batch) -> list[list[Completion]]:
        open_prompts, done = list(share_of(len(batch.examples))), {}
        while open_prompts:
            groups = generate_share(self._engine, batch, self._sampling, open_prompts)
            for prompt, group in zip(open_prompts, groups):
                if not any(completion.finish_reason == "abort" for completion in group):
                    done[prompt] = group
            open_prompts = [prompt for prompt in open_prompts if prompt not in done]
            self.aborted += len(open_prompts)
        return [done[prompt] for prompt in sorted(done)]
