"""A rollout engine in another process or on another machine, over HTTP (`server.EngineServer`), its weights over a transport."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import torch

from megatron_sr.rollout import wire
from megatron_sr.rollout.engine import (
    DEAD,
    DRAIN,
    Completion,
    EngineDead,
    Health,
    SamplingConfig,
    UpdateReport,
    check_in_flight,
)
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.server import PROTOCOL
from megatron_sr.rollout.transport import make_sender
from megatron_sr.rollout.update_sender import send_update


class RemoteEngine:
    """Implements `engine.RolloutEngine`.

    url        of the server, http://host:port
    token      what the server asks for, None where it asks for nothing
    transport  one of `transport.KINDS`; directory: the shared one, for 'file'
    stage      "whole": the old weights serve until all new ones have arrived and fit (the engine's host keeps both); "stream": each
               layer goes in as it arrives, in the memory of two buckets, and an update that breaks off leaves the engine refusing
    bucket     bytes that travel together; a larger tensor travels alone
    timeout    seconds that a request may take; update_timeout: that an update may stand still

    Raises ValueError for a URL that is not http://host:port.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        transport: str = "http",
        directory: str | Path | None = None,
        stage: str = "whole",
        bucket: int = 64 << 20,
        timeout: float = 600.0,
        update_timeout: float = 120.0,
    ):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"{url!r} is not the URL of a rollout engine (http://host:port)")
        self.url, self._address, self._token = url, (parts.hostname, parts.port), token
        self.transport, self.directory = transport, directory
        self.stage, self.bucket, self.timeout, self.update_timeout = stage, bucket, timeout, update_timeout
        self._connections = threading.local()
        self._sender = None
        self._version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `RolloutEngine.generate`."""
        message = {
            "prompts": [list(map(int, p)) for p in prompts],
            "sampling": wire.value(sampling),
            "seeds": list(seeds),
        }
        return wire.completions(self.request("/generate", message)["completions"])

    def update_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, in_flight: str = DRAIN
    ) -> UpdateReport:
        """See `RolloutEngine.update_weights`. `tensors` is streamed: two buckets of it are in memory at a time, plus what the
        transport keeps for the engine (`transport`).
        """
        check_in_flight(in_flight)
        return send_update([self], self.sender(), tensors, version, in_flight=in_flight)[0]

    def apply_delta(self, data: bytes, *, in_flight: str = DRAIN) -> UpdateReport:
        """Apply an encoded delta in the engine's process; see `delta.DeltaReceiver.apply`."""
        check_in_flight(in_flight)
        return wire.report(self.request("/update/delta", {"data": data, "in_flight": in_flight})["report"])

    def sender(self):
        """The transport's end of this engine, made at its first use."""
        if self._sender is None:
            self._sender = make_sender(self.transport, directory=self.directory, timeout=self.update_timeout)
        return self._sender

    def pause(self, in_flight: str = DRAIN) -> None:
        """See `RolloutEngine.pause`."""
        check_in_flight(in_flight)
        self.request("/pause", {"in_flight": in_flight})

    def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self.request("/resume", {})

    def health(self) -> Health:
        """See `RolloutEngine.health`. Raises ValueError when the server speaks another version of the protocol."""
        try:
            answer = self.request("/health", {}, timeout=10.0)
        except EngineDead as error:
            return Health(DEAD, self._version, 0, str(error))
        protocol = answer.pop("protocol")
        if protocol != PROTOCOL:
            raise ValueError(
                f"{self.url} speaks protocol {protocol}, this is {PROTOCOL}: install one megatron-sr on both sides"
            )
        found = wire.health(answer)
        self._version = found.version
        return found

    def weights_version(self) -> int:
        """See `RolloutEngine.weights_version`. Raises EngineDead."""
        found = self.health()
        if found.state == DEAD:
            raise EngineDead(found.reason)
        return found.version

    def weights_digest(self) -> str:
        """See `RolloutEngine.weights_digest`."""
        return self.request("/digest", {})["digest"]

    def weights_manifest(self) -> Manifest:
        """Names, shapes, dtypes and digests of the weights that the engine was last given."""
        return Manifest.from_json(self.request("/manifest", {})["manifest"])

    def shutdown(self) -> None:
        """Release this end; the server goes on."""
        self.release()

    def release(self) -> None:
        """Close connections of this thread, and the transport."""
        self._disconnect()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def request(self, path: str, message: dict, timeout: float | None = None) -> dict:
        """One request. Raises what the engine raised there, EngineDead when it cannot be reached or does not answer in time."""
        body, headers = wire.pack(message), {"Content-Type": "application/msgpack"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection = self._connect(timeout or self.timeout)
            connection.request("POST", path, body, headers)
            answer = connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            raise EngineDead(self._unreachable(path, error)) from error
        answer = wire.unpack(answer)
        wire.raise_error(answer)
        return answer

    def _unreachable(self, path: str, error: Exception) -> str:
        what = "did not answer in time" if isinstance(error, TimeoutError) else "cannot be reached"
        return f"the rollout engine at {self.url} {what} ({path}: {type(error).__name__}: {error})"

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        """This thread's connection, with that timeout."""
        connection = getattr(self._connections, "open", None)
        if connection is None:
            connection = self._connections.open = http.client.HTTPConnection(*self._address, timeout=timeout)
            connection.connect()
            connection.sock.setsockopt(6, 1, 1)  # TCP_NODELAY: header and body are two writes
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection

    def _disconnect(self) -> None:
        connection = getattr(self._connections, "open", None)
        if connection is not None:
            connection.close()
            self._connections.open = None
