"""The engine's side of one update that arrives in buckets: in order, none lost, none twice, within a time limit, or not at all."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import torch

from megatron_sr.rollout.engine import UpdateFailed, UpdateReport
from megatron_sr.rollout.manifest import Manifest, TensorRecord
from megatron_sr.rollout.transport.base import Receiver

_POLL = 0.2  # seconds between looks at a thread that may have ended


class _End:
    """What ends the queue: a total digest after the last bucket, or why the update broke off."""

    def __init__(self, digest: str | None, reason: str = ""):
        self.digest, self.reason = digest, reason


class UpdateSession:
    """Feeds the buckets of one update into `engine.update_weights`, which runs in a thread of its own.

    engine     takes `expected` and `stage` beside the arguments of `RolloutEngine.update_weights`
    receiver   the transport's end; told when the update is over
    timeout    seconds without a bucket after which the trainer is taken for dead
    """

    def __init__(self, engine, receiver: Receiver, version: int, *, stage: str, in_flight: str, timeout: float):
        self.version = version
        self._receiver, self._timeout = receiver, timeout
        self._copy = (
            stage != "whole"
        )  # the sender uses a bucket again when it was taken, the engine may still look at it
        self._records: dict[str, TensorRecord] = {}
        self._queue: queue.Queue = queue.Queue(maxsize=1)
        self._next = 0
        self._outcome: UpdateReport | BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(engine, stage, in_flight), name=f"update-{version}", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def bucket(self, number: int, header: dict, records: dict[str, TensorRecord]) -> None:
        """Take the next bucket. Raises UpdateFailed for one out of order or damaged; the update is then over."""
        try:
            if number != self._next:
                raise UpdateFailed(
                    f"bucket {number} arrived where {self._next} was due: one was lost, repeated or overtaken"
                )
            try:
                tensors = self._receiver.get(header)
            except Exception as error:
                raise UpdateFailed(f"bucket {number} could not be read: {error}") from error
            if [name for name, _ in tensors] != list(records):
                raise UpdateFailed(f"bucket {number} holds other tensors than its list of digests")
            if self._copy:
                tensors = [(name, tensor.clone()) for name, tensor in tensors]
            self._records.update(records)
            self._next += 1
        except UpdateFailed as error:
            self.abort(str(error))
            raise
        self._put(tensors)

    def commit(self, buckets: int, digest: str) -> UpdateReport:
        """All was sent: `buckets` of them, `digest` in total. The engine's report; raises what the engine raised."""
        if buckets != self._next:
            reason = f"{buckets} buckets were sent, {self._next} arrived"
            self.abort(reason)
            raise UpdateFailed(self._failed(reason))
        self._put(_End(digest))
        self._thread.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def abort(self, reason: str) -> None:
        """Give up; returns when the engine has."""
        while self.running:
            try:
                self._queue.put(_End(None, reason), timeout=_POLL)
                break
            except queue.Full:
                continue
        self._thread.join()

    def _put(self, item) -> None:
        while self.running:
            try:
                self._queue.put(item, timeout=_POLL)
                return
            except queue.Full:
                continue
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        raise UpdateFailed(self._failed("it is over"))

    def _run(self, engine, stage: str, in_flight: str) -> None:
        try:
            self._outcome = engine.update_weights(
                self._tensors(), self.version, in_flight=in_flight, expected=self._records, stage=stage
            )
        except BaseException as error:
            self._outcome = error
        self._receiver.end(not isinstance(self._outcome, BaseException))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            try:
                item = self._queue.get(timeout=self._timeout)
            except queue.Empty:
                raise UpdateFailed(
                    self._failed(f"nothing arrived for {self._timeout:g} s, the trainer seems to be gone")
                ) from None
            if isinstance(item, _End):
                break
            yield from item
        if item.digest is None:
            raise UpdateFailed(self._failed(item.reason))
        total = Manifest(self.version, self._records).digest
        if total != item.digest:
            raise UpdateFailed(self._failed(f"total digest {total}, the trainer's is {item.digest}"))

    def _failed(self, reason: str) -> str:
        return f"update to version {self.version} broke off after {self._next} buckets: {reason}"
