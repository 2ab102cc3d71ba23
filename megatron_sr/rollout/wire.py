"""What engine and trainer say to each other over HTTP, as msgpack: plain values and bytes, nothing that could run code."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgpack

from megatron_sr.rollout import engine
from megatron_sr.rollout.engine import Completion, Health, SamplingConfig, UpdateReport
from megatron_sr.rollout.manifest import TensorRecord

# Errors that keep their class on the way; others arrive as RuntimeError.
_ERRORS = {
    cls.__name__: cls
    for cls in (
        engine.UpdateRefused,
        engine.UpdateFailed,
        engine.WeightsUnverified,
        engine.EnginePaused,
        engine.EngineDead,
        ValueError,
        TimeoutError,
    )
}


def pack(message: dict) -> bytes:
    """A message as bytes."""
    return msgpack.packb(message)


def unpack(data: bytes) -> dict:
    """Raises ValueError unless `data` is one message."""
    try:
        message = msgpack.unpackb(data)
    except Exception as error:  # msgpack has many
        raise ValueError(f"not a msgpack message ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise ValueError(f"a message is a map, not {type(message).__name__}")
    return message


def error_message(error: BaseException) -> dict:
    """An exception as a message."""
    name = next((name for name, cls in _ERRORS.items() if type(error) is cls), "RuntimeError")
    text = str(error) if name != "RuntimeError" else f"{type(error).__name__}: {error}"
    return {"error": name, "message": text}


def raise_error(message: dict) -> None:
    """Raise what `error_message` described; do nothing for any other message."""
    if "error" in message:
        raise _ERRORS.get(message["error"], RuntimeError)(message["message"])


def value(item: Any) -> dict:
    """A dataclass of the protocol as plain values."""
    return asdict(item)


def sampling(values: dict) -> SamplingConfig:
    """Raises ValueError for fields that do not exist or are out of range."""
    values = {**values, "stop_token_ids": tuple(values.get("stop_token_ids", ()))}
    try:
        return SamplingConfig(**values)
    except TypeError as error:
        raise ValueError(f"sampling: {error}") from error


def completions(groups: list) -> list[list[Completion]]:
    return [[Completion(**values) for values in group] for group in groups]


def report(values: dict) -> UpdateReport:
    return UpdateReport(**values)


def health(values: dict) -> Health:
    return Health(**values)


def records(values: dict) -> dict[str, TensorRecord]:
    """Name -> record, from `record_values`. Raises ValueError."""
    try:
        return {name: TensorRecord(tuple(shape), dtype, digest) for name, (shape, dtype, digest) in values.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"not a list of tensor records ({error})") from error


def record_values(found: dict[str, TensorRecord]) -> dict:
    return {name: [list(r.shape), r.dtype, r.digest] for name, r in found.items()}
