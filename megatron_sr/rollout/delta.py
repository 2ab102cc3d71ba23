"""Weight updates that carry only what changed, chained by version and digest of their base.

`DeltaSender` (trainer) remembers the weights it last sent, `DeltaReceiver` (engine side) those it last received; an update names its
base by version and total digest, and holds the digest of every tensor that must come out. The receiver checks the base before and
every tensor after decoding, then gives the engine whole tensors, so engines with packed layouts (vLLM's CPU experts) need nothing of
their own. If anything does not fit, the engine keeps serving the old version, and `send` gives it the whole new one.

Memory: sender and receiver keep one copy of the weights each (2 bytes a BF16 parameter); while an update is applied the receiver holds
the old and the new.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace

import msgpack
import torch

from megatron_sr.rollout import delta_codec
from megatron_sr.rollout.delta_codec import POSITIONS, VALUES, DeltaDamaged, TensorDelta
from megatron_sr.rollout.engine import DRAIN, RolloutEngine, UpdateFailed, UpdateRefused, UpdateReport
from megatron_sr.rollout.manifest import Manifest, TensorRecord

_CHUNK = 1 << 22  # elements coded at a time: bounds the temporaries to about 100 MB
_FORMAT = 1


@dataclass(frozen=True)
class DeltaUpdate:
    """One update. manifest: the base (none for a whole update) and every tensor that must come out; chunks: of each tensor, by name."""

    manifest: Manifest
    chunks: dict[str, list[TensorDelta]]

    @property
    def whole(self) -> bool:
        return self.manifest.base_version is None

    @property
    def nbytes(self) -> int:
        """Payload bytes; names and digests come on top."""
        return sum(chunk.nbytes for chunks in self.chunks.values() for chunk in chunks)

    def statistics(self) -> dict:
        """elements; changed: how many were sent; bytes; plain_bytes: without zstd; whole_bytes: of all weights as they are;
        positions: chunks of each kind.
        """
        elements = sum(torch.Size(r.shape).numel() for r in self.manifest.tensors.values())
        whole = sum(
            torch.Size(r.shape).numel() * getattr(torch, r.dtype).itemsize for r in self.manifest.tensors.values()
        )
        kinds = [chunk.positions for chunks in self.chunks.values() for chunk in chunks]
        changed = sum(chunk.changed for chunks in self.chunks.values() for chunk in chunks)
        return {
            "elements": elements,
            "changed": changed,
            "bytes": self.nbytes,
            "plain_bytes": sum(chunk.plain or chunk.nbytes for chunks in self.chunks.values() for chunk in chunks),
            "whole_bytes": whole,
            "positions": {kind: kinds.count(kind) for kind in POSITIONS if kind in kinds},
        }

    def to_bytes(self) -> bytes:
        """msgpack: no code is run when it is read."""
        chunks = {name: [list(asdict(chunk).values()) for chunk in found] for name, found in self.chunks.items()}
        return msgpack.packb([_FORMAT, self.manifest.to_json(), chunks])

    @classmethod
    def from_bytes(cls, data: bytes) -> DeltaUpdate:
        """Raises DeltaDamaged for anything that `to_bytes` of this version did not write."""
        try:
            number, manifest, raw = msgpack.unpackb(data)
            if number != _FORMAT:
                raise ValueError(f"format {number!r}, this version reads {_FORMAT}")
            chunks = {name: [_chunk(values) for values in found] for name, found in raw.items()}
            return cls(Manifest.from_json(manifest), chunks)
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise DeltaDamaged(f"not a weight update ({error})") from error


def _chunk(values) -> TensorDelta:
    chunk = TensorDelta(*values)
    for field, value in zip(fields(TensorDelta), values, strict=True):
        if type(value).__name__ != field.type:
            raise ValueError(f"{field.name} is {type(value).__name__}")
    if chunk.positions not in POSITIONS or chunk.values not in VALUES:
        raise ValueError(f"unknown coding {chunk.positions!r}, {chunk.values!r}")
    return chunk


class DeltaSender:
    """The trainer's end. zstd: compress the deltas (needs the `zstandard` package; ImportError otherwise)."""

    def __init__(self, zstd: bool = False):
        if zstd:
            delta_codec._zstandard()
        self._zstd = zstd
        self._last: dict[str, torch.Tensor] = {}
        self._manifest: Manifest | None = None

    def encode(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> DeltaUpdate:
        """The update from the weights of the last call to `tensors`, which it remembers; the first one is whole.

        Whole as well when names changed or the version is the last one again (its update broke off). Always consumes the iterable.
        Raises ValueError when `version` goes back.
        """
        base, chunks, records = self._manifest, {}, {}
        for name, tensor in tensors:
            tensor, old = tensor.detach(), self._last.get(name)
            if old is not None and (old.shape != tensor.shape or old.dtype != tensor.dtype):
                old = None
            chunks[name] = _encode_chunks(tensor, old, self._zstd)
            if old is None:
                self._last[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
            else:
                old.copy_(tensor)  # in place: a failure in between is healed by a whole update
            records[name] = TensorRecord.of(tensor)
        if base is not None and version < base.version:
            self._manifest = None
            raise ValueError(f"version {version} is below the last one sent, {base.version}")
        for gone in self._last.keys() - records.keys():
            del self._last[gone]
        if base is None or base.version == version or base.tensors.keys() != records.keys():
            self._manifest = Manifest(version, records)
            return self.whole()
        self._manifest = Manifest(version, records, base.version, base.digest)
        return DeltaUpdate(self._manifest, chunks)

    @property
    def manifest(self) -> Manifest | None:
        """Of the last weights."""
        return self._manifest

    def whole(self) -> DeltaUpdate:
        """All of the last weights, for a receiver that cannot use the delta."""
        chunks = {name: _encode_chunks(tensor, None, self._zstd) for name, tensor in self._last.items()}
        return DeltaUpdate(replace(self._manifest, base_version=None, base_digest=None), chunks)


class DeltaReceiver:
    """The engine's end: applies updates to a `RolloutEngine`."""

    def __init__(self, engine: RolloutEngine):
        self._engine = engine
        self._held: dict[str, torch.Tensor] = {}
        self._manifest: Manifest | None = None
        self._one_at_a_time = threading.Lock()

    def apply(self, data: bytes, *, in_flight: str = DRAIN) -> UpdateReport:
        """Apply `DeltaUpdate.to_bytes`. Raises UpdateRefused, the old weights still served, when it does not fit or is damaged."""
        try:
            update = DeltaUpdate.from_bytes(data)
        except DeltaDamaged as error:
            raise UpdateRefused(f"update refused: {error}") from error
        with self._one_at_a_time:
            self._check_base(update)
            tensors = {name: self._decoded(name, record, update) for name, record in update.manifest.tensors.items()}
            self._manifest = None  # after a failure only a whole update can follow
            report = self._engine.update_weights(tensors.items(), update.manifest.version, in_flight=in_flight)
            if report.good:
                self._held, self._manifest = tensors, update.manifest
        return report

    def _check_base(self, update: DeltaUpdate) -> None:
        try:
            if update.chunks.keys() != update.manifest.tensors.keys():
                raise ValueError("its tensors are not those that its manifest names")
            if not update.whole:
                update.manifest.check_base(self._manifest or Manifest(-1))
        except ValueError as error:
            raise UpdateRefused(f"update refused: {error}") from error

    def _decoded(self, name: str, record: TensorRecord, update: DeltaUpdate) -> torch.Tensor:
        try:
            dtype = getattr(torch, record.dtype)
            base = None if update.whole else self._held[name].view(-1)
            count, pieces = torch.Size(record.shape).numel(), update.chunks[name]
            if len(pieces) != max(1, -(-count // _CHUNK)):
                raise DeltaDamaged("has chunks missing or too many")
            if base is not None and all(piece.positions == "none" for piece in pieces):
                tensor = self._held[name]
            else:
                parts = []
                for i, piece in enumerate(pieces):
                    where = slice(i * _CHUNK, min(count, (i + 1) * _CHUNK))
                    old = None if base is None else base[where]
                    parts.append(delta_codec.decode(piece, (where.stop - where.start,), dtype, old))
                tensor = torch.cat([part.view(torch.uint8) for part in parts]).view(dtype).view(record.shape)
            found = TensorRecord.of(tensor)
        except (DeltaDamaged, AttributeError, TypeError, RuntimeError, KeyError) as error:
            raise UpdateRefused(f"update refused: {name} {error}") from error
        if found != record:
            raise UpdateRefused(f"update refused: {name} comes out as {found}, not as the trainer's {record}")
        return tensor


def _encode_chunks(tensor: torch.Tensor, base: torch.Tensor | None, zstd: bool) -> list[TensorDelta]:
    flat = tensor.contiguous().view(-1)
    old = None if base is None else base.view(-1).to(flat.device)
    return [
        delta_codec.encode(flat[at : at + _CHUNK], None if old is None else old[at : at + _CHUNK], zstd=zstd)
        for at in range(0, max(1, len(flat)), _CHUNK)
    ]


def send(
    sender: DeltaSender, update: DeltaUpdate, apply: Callable, *, in_flight: str = DRAIN
) -> tuple[UpdateReport, bool]:
    """Give `update`, the last of `sender`, to a receiver, and a whole update in its place when it is refused or breaks off.

    apply: as `DeltaReceiver.apply`, wherever it runs. Returns its report, and whether the whole update was needed. Raises
    UpdateRefused or UpdateFailed when that does not get through either.
    """
    try:
        return apply(update.to_bytes(), in_flight=in_flight), False
    except (UpdateRefused, UpdateFailed):
        if update.whole:
            raise
        return apply(sender.whole().to_bytes(), in_flight=in_flight), True


class DeltaEngine:
    """A `RolloutEngine` whose updates travel as deltas: what `--weight-sync delta` puts around an engine.

    Engines in other processes (`RemoteEngine`, `SubprocessEngine`) are sent the encoded update; for one in this process both ends are
    here, which saves nothing and measures everything.

    last: statistics of the last update (`DeltaUpdate.statistics`, message bytes, seconds of encoding and of decoding + applying).
    """

    def __init__(self, engine: RolloutEngine, zstd: bool = False):
        self.engine = engine
        self.last: dict = {}
        self._sender, self._receiver = DeltaSender(zstd), None
        self._apply = getattr(engine, "apply_delta", None)  # the engine's process has a receiver of its own
        if self._apply is None:
            self._receiver = DeltaReceiver(engine)
            self._apply = self._receiver.apply

    def update_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, *, in_flight: str = DRAIN
    ) -> UpdateReport:
        """See `RolloutEngine.update_weights`."""
        started = time.perf_counter()
        update = self._sender.encode(tensors, version)
        encoded = time.perf_counter()
        report, resynced = send(self._sender, update, self._apply, in_flight=in_flight)
        self.last = {
            **update.statistics(),
            "whole": update.whole or resynced,
            "encode_seconds": encoded - started,
            "apply_seconds": time.perf_counter() - encoded,
            "update_seconds": report.seconds + report.verify_seconds,
        }
        return report

    def __getattr__(self, name: str):
        return getattr(self.engine, name)
