"""A rollout engine behind HTTP: for a trainer in another process or on another machine (`client.RemoteEngine`).

`megatron-sr serve --model DIR` serves on the loopback interface. Any other address needs a token, which every
request must bring. Messages are msgpack (`wire`), weights come through a transport; nothing is unpickled.
"""

from __future__ import annotations

import hmac
import inspect
import ipaddress
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_sr.rollout import wire
from megatron_sr.rollout.delta import DeltaReceiver
from megatron_sr.rollout.engine import DRAIN, UpdateFailed
from megatron_sr.rollout.transport import make_receiver
from megatron_sr.rollout.update_session import UpdateSession

PROTOCOL = 1  # of the messages; client and server must agree
MOST_BYTES = 8 << 30  # of one request
_LEAST_TOKEN = 16  # characters


class EngineServer:
    """Serves `engine` until `close`.

    host, port         where it listens; port 0: a free one, see `url`
    token              what requests must bring as "Authorization: Bearer ..."; required unless `host` is a loopback address
    weights_directory  the only directory from which the transport 'file' may read; None: that transport is refused
    update_timeout     seconds without a bucket after which an update is given up

    Raises ValueError for an address that others can reach without a token, or a short token.
    """

    def __init__(
        self,
        engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        weights_directory: str | Path | None = None,
        update_timeout: float = 120.0,
    ):
        if token is None and not is_loopback(host):
            raise ValueError(
                f"{host} can be reached from other machines, so requests must bring a token: give one (--token-file), or listen on "
                f"127.0.0.1"
            )
        if token is not None and len(token) < _LEAST_TOKEN:
            raise ValueError(
                f"the token has {len(token)} characters; use at least {_LEAST_TOKEN}, such as secrets.token_hex(32)"
            )
        self._engine, self._token, self._directory = engine, token, weights_directory
        self._update_timeout = update_timeout
        self._session: UpdateSession | None = None
        self._session_id: str | None = None
        self._sessions = threading.Lock()
        self._receiver, self._receiver_is = None, None
        self._deltas = DeltaReceiver(engine)
        handler = type("Handler", (_Handler,), {"owner": self})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._http = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})(
            (host, port), handler
        )
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._http.server_address[1]}"
        self._thread: threading.Thread | None = None

    def start(self) -> EngineServer:
        """Serve in a thread."""
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), daemon=True, name="engine-server"
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving. The engine is the caller's."""
        if self._thread is not None:
            self._http.shutdown()
        self._http.server_close()

    def admits(self, authorization: str) -> bool:
        """Whether a request's Authorization header brings the token."""
        return self._token is None or hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def answer(self, path: str, message: dict) -> dict:
        """The reply to a request. Raises what the engine raises, ValueError for a request that makes no sense."""
        method = _METHODS.get(path)
        if method is None:
            raise ValueError(f"no such request: {path}; there are {', '.join(_METHODS)}")
        try:
            inspect.signature(method).bind(self, **message)
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error
        return method(self, **message)

    def _health(self) -> dict:
        return {"protocol": PROTOCOL, **wire.value(self._engine.health())}

    def _generate(self, prompts: list, sampling: dict, seeds: list) -> dict:
        groups = self._engine.generate(prompts, wire.sampling(sampling), seeds)
        return {"completions": [[wire.value(c) for c in group] for group in groups]}

    def _digest(self) -> dict:
        return {"digest": self._engine.weights_digest(), "version": self._engine.weights_version()}

    def _manifest(self) -> dict:
        return {"manifest": self._engine.weights_manifest().to_json()}

    def _pause(self, in_flight: str = DRAIN) -> dict:
        self._engine.pause(in_flight)
        return {}

    def _resume(self) -> dict:
        self._engine.resume()
        return {}

    def _begin(
        self, update: str, version: int, transport: str, spec: dict, stage: str, in_flight: str, timeout: float
    ) -> dict:
        """A new update; one that still runs (its trainer is gone, or has begun anew) is given up first."""
        timeout = min(float(timeout), self._update_timeout)
        with self._sessions:
            if self._session is not None and self._session.running:
                self._session.abort("another update began")
            if self._receiver is None or self._receiver_is != (transport, spec):
                if self._receiver is not None:
                    self._receiver.close()
                self._receiver = make_receiver(transport, spec, directory=self._directory, timeout=timeout)
                self._receiver_is = transport, spec
            self._session = UpdateSession(
                self._engine, self._receiver, version, stage=stage, in_flight=in_flight, timeout=timeout
            )
            self._session_id = update
        return {}

    def _current(self, update: str) -> UpdateSession:
        with self._sessions:
            if self._session is None or update != self._session_id:
                raise UpdateFailed("this update is over: it was given up, or another one began")
            return self._session

    def _bucket(self, update: str, number: int, header: dict, records: dict) -> dict:
        self._current(update).bucket(number, header, wire.records(records))
        return {}

    def _commit(self, update: str, buckets: int, digest: str) -> dict:
        return {"report": wire.value(self._current(update).commit(buckets, digest))}

    def _delta(self, data: bytes, in_flight: str) -> dict:
        """A whole update in one request: what changed since the last one (`delta`)."""
        return {"report": wire.value(self._deltas.apply(data, in_flight=in_flight))}

    def _abort(self, update: str, reason: str) -> dict:
        self._current(update).abort(reason)
        return {}


_METHODS = {
    "/health": EngineServer._health,
    "/generate": EngineServer._generate,
    "/digest": EngineServer._digest,
    "/manifest": EngineServer._manifest,
    "/pause": EngineServer._pause,
    "/resume": EngineServer._resume,
    "/update/begin": EngineServer._begin,
    "/update/bucket": EngineServer._bucket,
    "/update/commit": EngineServer._commit,
    "/update/abort": EngineServer._abort,
    "/update/delta": EngineServer._delta,
}


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only. A name other than localhost is not taken for one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    owner: EngineServer
    protocol_version = "HTTP/1.1"  # keeps connections open
    disable_nagle_algorithm = True
    timeout = 600  # seconds that an idle connection is kept

    def do_POST(self):
        if not self.owner.admits(self.headers.get("Authorization", "")):
            self.close_connection = True  # its body is not read
            self._reply(
                401, {"error": "ValueError", "message": "the request brings no valid token (Authorization: Bearer ...)"}
            )
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MOST_BYTES:
            self.close_connection = True
            self._reply(
                413,
                {
                    "error": "ValueError",
                    "message": f"a request's body must state its length, at most {MOST_BYTES} bytes",
                },
            )
            return
        body = self.rfile.read(int(length))
        try:
            reply, status = self.owner.answer(self.path, wire.unpack(body)), 200
        except Exception as error:
            reply, status = wire.error_message(error), 400
        self._reply(status, reply)

    def _reply(self, status: int, message: dict) -> None:
        body = wire.pack(message)
        self.send_response(status)
        self.send_header("Content-Type", "application/msgpack")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass  # the trainer logs what it asked
