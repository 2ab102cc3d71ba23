"""The requests that a vLLM engine is decoding: added by any thread, decoded together, drained, aborted or kept by a pause.

vLLM's in-process engine belongs to one thread at a time. Here every caller steps it in turn under one lock, and finished requests
are handed to whoever asked for them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from megatron_sr.rollout.engine import ABORT, KEEP, EnginePaused, check_in_flight


class Requests:
    """llm_engine: vLLM's LLMEngine with an in-process core and without asynchronous scheduling (no batch is in flight between steps)."""

    def __init__(self, llm_engine):
        self._engine = llm_engine
        self._turn = threading.Condition(threading.RLock())
        self._waiting = 0  # threads that want the lock: whoever steps makes way for them
        self._numbers = itertools.count()
        self._open: dict[str, str] = {}  # our id -> vLLM's own
        self._done: dict[str, tuple] = {}  # our id -> (vLLM's output, version at its end)
        self._paused_by: int | None = None  # a thread's identity
        self._mode: str | None = None
        self._failure: BaseException | None = None
        self.version = 0  # of the weights that decode now

    @property
    def running(self) -> int:
        """Number of requests being decoded."""
        return len(self._open)

    @property
    def paused(self) -> bool:
        return self._paused_by is not None

    def decode(self, prompts: Sequence[dict], params: Sequence, admit: Callable[[], None]) -> list[tuple]:
        """Decode one request per prompt; (vLLM's RequestOutput, version at its start, version at its end) of each, in order.

        admit: called under the lock when the engine is not paused; raises when it must not generate.
        Raises EnginePaused when this thread paused the engine; what vLLM raised, when a step failed, in every thread that waits;
        the error given to `fail`.
        """
        with self._locked():
            while self.paused:
                if self._paused_by == threading.get_ident():
                    raise EnginePaused(
                        "this thread paused the engine, so `generate` would wait for itself: resume it first"
                    )
                self._turn.wait()
            admit()
            started = self.version
            mine = [str(next(self._numbers)) for _ in prompts]
            for number, prompt, param in zip(mine, prompts, params):
                self._open[number] = self._engine.add_request(number, prompt, param)
        while True:
            with self._locked():
                if self._failure is not None:
                    raise self._failure
                if all(number in self._done for number in mine):
                    done = [self._done.pop(number) for number in mine]
                    for output, _ in done:
                        if isinstance(output, BaseException):
                            raise output
                    return [(output, started, ended) for output, ended in done]
                if self.paused and self._mode == KEEP:
                    self._turn.wait()
                else:
                    self._step()
            if self._waiting:
                time.sleep(1e-4)  # a lock is not handed over in order: give it up for long enough

    def pause(self, in_flight: str) -> None:
        """Let no new request in, and drain, abort or keep those that run. Raises ValueError for another `in_flight`."""
        check_in_flight(in_flight)
        with self._locked():
            if self.paused:
                return
            self._paused_by, self._mode = threading.get_ident(), in_flight
            if in_flight == ABORT:
                self._abort()
            while self._open and in_flight != KEEP:
                self._step()
            self._turn.notify_all()

    def resume(self) -> None:
        """Let requests in again."""
        with self._locked():
            self._paused_by = self._mode = None
            self._turn.notify_all()

    def forget_cache(self) -> None:
        """Drop all keys and values of old weights: the prefix cache, and those of kept requests, which are computed anew."""
        with self._locked():
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM could not clear the prefix cache, which was computed with the old weights")

    def fail(self, error: BaseException) -> None:
        """End the requests that were kept: `decode` raises `error` for them."""
        with self._locked():
            failed = list(self._open)
            if failed:
                self._abort()
            self._done.update((number, (error, self.version)) for number in failed)

    def exclusive(self):
        """A context in which no other thread touches the engine."""
        return self._locked()

    def _locked(self):
        return _Turn(self)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except BaseException as error:
            self._failure = error  # every waiting thread would wait for ever
            self._turn.notify_all()
            raise
        for output in outputs:
            if output.finished:
                self._finish(output)

    def _finish(self, output) -> None:
        self._done[output.request_id] = (output, self.version)
        del self._open[output.request_id]
        self._turn.notify_all()

    def _abort(self) -> None:
        """End the running requests; their outputs hold the tokens so far."""
        states = self._engine.output_processor.request_states
        for own in self._open.values():
            states[own].queue = self  # vLLM gives the last output of an aborted request to its queue only
        self._engine.abort_request(list(self._open.values()), internal=True)

    def put(self, output) -> None:
        """Called by vLLM with the output of an aborted request."""
        self._finish(output)


class _Turn:
    """Holds the lock, and counts while it waits for it."""

    def __init__(self, requests: Requests):
        self._requests = requests

    def __enter__(self):
        self._requests._waiting += 1
        try:
            self._requests._turn.acquire()
        finally:
            self._requests._waiting -= 1

    def __exit__(self, *error):
        self._requests._turn.release()
