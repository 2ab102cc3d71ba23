"""Mathematical rewards by a few processes of their own: an answer that hangs, crashes or eats memory costs its own reward and no more."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_sr.rl import math_worker

START_SECONDS = 120.0  # for importing math-verify, on a machine busy with other work
WALL_FACTOR, WALL_MORE = 20.0, 10.0  # a worker that uses no CPU for 20 times its limit, and 10 s, is taken for stuck


@dataclass
class Failures:
    """Answers without a verdict, which get no reward. timed_out: over the limit of CPU (or wall) time; crashed: twice in a row."""

    timed_out: int = 0
    crashed: int = 0


class MathPool:
    """Compares completions with answers in worker processes, in any thread, in order.

    workers     processes; they start at the first call, each imports math-verify (0.6 s of CPU, 80 MB)
    time_limit  CPU seconds for one answer: parsing both sides and comparing
    memory_mib  address space of a worker

    Verdicts depend on the texts, the limits and math-verify's version; an answer near the time limit may pass on a faster machine.
    The limit is of CPU time, so a busy machine does not change them. Wall time is bounded too, far beyond (`WALL_FACTOR`).
    failures: what had no verdict since the pool was made.
    """

    def __init__(self, workers: int, time_limit: float, memory_mib: int = 2048):
        self._limit, self._memory = time_limit, memory_mib
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-pool")
        self._lock = threading.Lock()
        self.failures = Failures()

    def rewards(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """1.0 or 0.0 for every (completion, answer), in order; see `math_worker.equal`. 0.0 where there is no verdict.

        Raises RuntimeError, with what they printed, when workers cannot start.
        """
        return list(self._threads.map(self._reward, pairs))

    def close(self) -> None:
        """End the workers. Idempotent; they also end by themselves when this process is gone."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            if worker := self._idle.get():
                worker.end()

    def _reward(self, pair: tuple[str, str]) -> float:
        worker = self._idle.get()
        try:
            for _ in range(
                2
            ):  # a worker that was killed from outside is not the answer's fault: asked again once, in a new one
                worker = worker or _Worker(self._memory)
                verdict = worker.ask(*pair, self._limit)
                if verdict is not None:
                    return verdict
                timed_out, worker = worker.timed_out, None
                if timed_out:
                    self._count("timed_out")
                    return 0.0
            self._count("crashed")
            return 0.0
        finally:
            self._idle.put(worker)

    def _count(self, what: str) -> None:
        with self._lock:
            setattr(self.failures, what, getattr(self.failures, what) + 1)


class _Worker:
    """One running `math_worker`. Raises RuntimeError when it does not start."""

    def __init__(self, memory_mib: int):
        ours, theirs = socket.socketpair()
        # -m, not multiprocessing: its children import the trainer's main module, and with it torch, Megatron and vLLM.
        command = [sys.executable, "-m", math_worker.__name__, str(memory_mib)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the trainer, which then ends it
            )
        self._connection, self.timed_out = ours, False
        ours.settimeout(START_SECONDS)
        try:
            math_worker.receive(ours)
        except (OSError, EOFError) as error:
            self._process.kill()
            printed = self._process.communicate()[1].decode(errors="replace")[-2000:]
            ours.close()
            raise RuntimeError(f"a process that checks answers did not start ({error}):\n{printed}") from None
        self._process.stderr.close()  # what it prints from here on is lost: it must not block on a full pipe

    def ask(self, completion: str, answer: str, limit: float) -> float | None:
        """1.0, 0.0, or None when the process ended, or was ended, without a verdict; it is then of no more use."""
        deadline = time.monotonic() + WALL_FACTOR * limit + WALL_MORE
        request = json.dumps([completion, answer, limit]).encode()
        try:
            self._connection.settimeout(deadline - time.monotonic())
            math_worker.send(self._connection, request)
            return float(math_worker.receive(self._connection))
        except TimeoutError:
            self.timed_out = True
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.timed_out = self._process.wait(timeout=10) == -signal.SIGPROF
        self.end()
        return None

    def end(self) -> None:
        """Kill it and take its resources back."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _environment() -> dict[str, str]:
    """Ours, with this package importable however it was found here, and one thread."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
