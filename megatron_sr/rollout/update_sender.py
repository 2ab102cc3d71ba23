"""The trainer's side of an update: export, digest and pack one bucket while the one before travels."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron_sr.rollout import wire
from megatron_sr.rollout.engine import EngineDead, UpdateFailed, UpdateRefused, UpdateReport
from megatron_sr.rollout.manifest import Manifest, TensorRecord
from megatron_sr.rollout.transport.base import Sender


@dataclass
class Timing:
    """Seconds of the last update on the trainer's thread: export (the iterable's own), digest, pack (into the transport), and wait (for
    buckets before this one); of its whole. Bytes and buckets sent.
    """

    export: float = 0.0
    digest: float = 0.0
    pack: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
    whole: float = 0.0
    nbytes: int = 0
    buckets: int = 0


def send_update(
    engines: Sequence,
    sender: Sender,
    tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    in_flight: str,
    timing: Timing | None = None,
) -> list[UpdateReport]:
    """Send one update to all `engines` (`client.RemoteEngine`s of one stage and bucket size); their reports.

    `tensors` is always used up. Raises UpdateRefused, UpdateFailed or EngineDead as `RolloutEngine.update_weights` does; with several
    engines the others' updates are given up too.
    """
    return _Sending(engines, sender, version, in_flight, timing or Timing()).run(tensors)


class _Sending:
    def __init__(self, engines, sender: Sender, version: int, in_flight: str, timing: Timing):
        self._engines, self._sender, self._version, self._in_flight = engines, sender, version, in_flight
        self._stream = engines[0].stage != "whole"
        self._identity = secrets.token_hex(8)
        self._records: dict[str, TensorRecord] = {}
        self._timing = timing
        self._travelling: list[Future] = []

    def run(self, tensors) -> list[UpdateReport]:
        start, tensors = time.perf_counter(), iter(tensors)
        posts = ThreadPoolExecutor(len(self._engines), thread_name_prefix="update-post")
        carrier = ThreadPoolExecutor(1, thread_name_prefix="update-carry")  # one bucket after the other
        try:
            self._begin()
            count = 0
            for bucket in self._buckets(tensors):
                self._send(count, bucket, carrier, posts)
                count += 1
            self._wait(0)
            at = time.perf_counter()
            digest = Manifest(self._version, self._records).digest
            reports = self._everywhere(
                posts, "/update/commit", {"update": self._identity, "buckets": count, "digest": digest}
            )
            self._timing.commit = time.perf_counter() - at
        except BaseException as error:
            for _ in tensors:  # a collective export would hang the other ranks
                pass
            self._wait_quietly()
            self._abort(error)
            self._sender.end(False)
            if isinstance(error, (UpdateRefused, UpdateFailed, EngineDead)) or not isinstance(error, Exception):
                raise
            raise UpdateFailed(
                f"update to version {self._version} broke off: {type(error).__name__}: {error}"
            ) from error
        else:
            self._sender.end(True)
            return [wire.report(answer["report"]) for answer in reports]
        finally:
            carrier.shutdown(wait=True)
            posts.shutdown(wait=True)
            self._timing.whole = time.perf_counter() - start

    def _begin(self) -> None:
        for i, engine in enumerate(self._engines):
            engine.request(
                "/update/begin",
                {
                    "update": self._identity,
                    "version": self._version,
                    "transport": self._sender.kind,
                    "spec": self._sender.spec(i),
                    "stage": engine.stage,
                    "in_flight": self._in_flight,
                    "timeout": engine.update_timeout,
                },
            )

    def _buckets(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Tensors in buckets of at most the engines' size; a larger tensor is a bucket of its own."""
        most, bucket, size = min(engine.bucket for engine in self._engines), [], 0
        while True:
            at = time.perf_counter()
            item = next(tensors, None)
            self._timing.export += time.perf_counter() - at
            if item is None:
                break
            nbytes = item[1].numel() * item[1].element_size()
            if bucket and size + nbytes > most:
                yield bucket
                bucket, size = [], 0
            bucket.append(item)
            size += nbytes
            self._timing.nbytes += nbytes
        if bucket:
            yield bucket

    def _send(self, number: int, bucket, carrier: ThreadPoolExecutor, posts: ThreadPoolExecutor) -> None:
        at = time.perf_counter()
        records = {name: TensorRecord.of(tensor) for name, tensor in bucket}
        if twice := self._records.keys() & records.keys() or len(records) < len(bucket):
            raise UpdateRefused(f"update to version {self._version} refused: tensors sent twice ({twice})")
        self._records.update(records)
        digested = time.perf_counter()
        self._wait(1)  # of two buckets one travels while the other is made
        waited = time.perf_counter()
        header = self._sender.put(number, bucket)
        self._timing.digest += digested - at
        self._timing.wait += waited - digested
        self._timing.pack += time.perf_counter() - waited
        self._timing.buckets += 1
        self._travelling.append(carrier.submit(self._carry, number, header, wire.record_values(records), posts))

    def _carry(self, number: int, header: dict, records: dict, posts: ThreadPoolExecutor) -> None:
        message = {"update": self._identity, "number": number, "header": header, "records": records}
        posting = [
            posts.submit(engine.request, "/update/bucket", message, engine.update_timeout) for engine in self._engines
        ]
        self._sender.deliver(number)
        for post in posting:
            post.result()
        if self._stream:
            self._sender.taken(number)

    def _wait(self, most: int) -> None:
        """Until at most so many buckets travel."""
        while len(self._travelling) > most:
            self._travelling.pop(0).result()

    def _wait_quietly(self) -> None:
        for future in self._travelling:
            future.exception()
        self._travelling.clear()

    def _everywhere(self, posts: ThreadPoolExecutor, path: str, message: dict) -> list[dict]:
        """The same request to every engine at once; waits for all, then raises the first error."""
        posting = [posts.submit(engine.request, path, message) for engine in self._engines]
        for post in posting:
            post.exception()
        return [post.result() for post in posting]

    def _abort(self, error: BaseException) -> None:
        """Tell the engines, so that they need not wait for more; those that are gone or know it already need not be told."""
        for engine in self._engines:
            with contextlib.suppress(Exception):  # the first error is the one to report
                reason = f"the trainer gave up: {error}"
                within = min(30.0, engine.update_timeout)  # where it stands still, it will not answer this either
                engine.request("/update/abort", {"update": self._identity, "reason": reason}, within)
