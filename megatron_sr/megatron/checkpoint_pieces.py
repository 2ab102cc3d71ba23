"""A stored checkpoint as pieces: each shard of its model params beside the main params that it must be the rounding of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_sr import checkpoint
from megatron_sr.coordinates import Segment
from megatron_sr.megatron.checkpoint_index import COMPOSED, INDEX, read_index
from megatron_sr.megatron.checkpoint_model import SAVE_MODEL
from megatron_sr.megatron.checkpoint_reader import CheckpointReader, Chunk, DamagedCheckpoint, walk
from megatron_sr.megatron.identity import region
from megatron_sr.megatron.recompute import Piece

_NAMED_MAIN = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.+)")
_BUCKET_MAIN = re.compile(r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.)(gbuf_idx_.+)\.param")
_OPTIMIZER = re.compile(r"(?:^|\.)optimizer\.|^common_state")
_ROUNDED = (torch.bfloat16, torch.float16)


class StoredState(NamedTuple):
    """What a checkpoint says about itself.

    rounding      the saved settings and step; None when it was saved without.
    model_params  whether it holds any.
    composed      stored key -> (logical tensor, start in it), for tensors that are stored in parts.
    """

    rounding: dict | None
    model_params: bool
    composed: dict[str, tuple[str, int]]


def read_state(reader: CheckpointReader) -> StoredState:
    """Raises ValueError when its parts were saved with different settings or at different steps: a mixed checkpoint."""
    states, model_params, composed = [], True, {}
    for key in reader.objects:
        if _OPTIMIZER.search(key) and (key.startswith("common_state") or key.endswith(".optimizer/shard_0_1")):
            for found in walk(reader.object(key)):
                if checkpoint.KEY in found and found[checkpoint.KEY] not in states:
                    states.append(found[checkpoint.KEY])
                model_params &= found.get(SAVE_MODEL) != "none"
                composed |= {part: tuple(where) for part, where in found.get(COMPOSED, {}).items()}
    if len(states) > 1:
        steps = [(state["seed"], state["step"]) for state in states]
        raise ValueError(
            f"parts of the checkpoint were saved in different runs or at different steps: (seed, step) {steps}"
        )
    return StoredState(states[0] if states else None, model_params, composed)


class Sources:
    """Finds the pieces of a checkpoint, whatever its sharding type.

    elements     of all pieces
    main_params  elements of all main params
    unmatched    keys of 16-bit model tensors without main params (frozen, say)

    Raises ValueError when main params are stored in a way that tells nothing about where they belong, or not in FP32.
    """

    def __init__(self, reader: CheckpointReader, composed: dict[str, tuple[str, int]] | None = None):
        self.reader, self._composed = reader, composed or {}
        self._named = {m[1]: key for key in reader.tensors if (m := _NAMED_MAIN.fullmatch(key))}
        self._buckets = {key: m for key in reader.tensors if (m := _BUCKET_MAIN.fullmatch(key))}
        self._indices = self._read_indices()
        self._model = {k: t for k, t in reader.tensors.items() if t.dtype in _ROUNDED and not _OPTIMIZER.search(k)}
        self._stored: dict[str, list[str]] = {}  # logical tensor -> the keys that it is stored under
        for key in self._model:
            self._stored.setdefault(self._logical(key)[0], []).append(key)
        indexed = {entry[2] for entries in self._indices.values() for entry in entries}
        self.unmatched = [k for k in sorted(self._model) if k not in self._named and self._logical(k)[0] not in indexed]
        main = [reader.tensors[key] for key in (*self._named.values(), *self._buckets)]
        odd = [tensor for tensor in main if tensor.dtype != torch.float32]
        if odd:
            raise ValueError(
                f"{odd[0].key} is stored as {odd[0].dtype}, not FP32 (--use-precision-aware-optimizer?): model params cannot be "
                "recomputed offline; a load verifies them"
            )
        self.main_params = sum(_numel(tensor.shape) for tensor in main)
        self.elements = sum(_numel(t.shape) for key, t in self._model.items() if key in self._named)
        self.elements += sum(n for entries in self._indices.values() for _, n, key, _ in entries if key in self._stored)

    def _logical(self, key: str) -> tuple[str, int]:
        """The logical tensor that a stored one is (a part of), and where it starts in it."""
        return self._composed.get(key, (key, 0))

    def _segments(self, key: str, chunk: Chunk) -> list[Segment]:
        """Where a stored chunk lies in its logical tensor."""
        start = self._logical(key)[1]
        return [
            s._replace(global_start=s.global_start + start)
            for s in region(chunk.shape, chunk.offset, self._model[key].shape)
        ]

    def _read_indices(self) -> dict[str, list]:
        indices, read = {}, {}
        for key, match in self._buckets.items():
            name = f"{match[1]}{INDEX}/shard_0_1"
            if name not in self.reader.objects:
                raise ValueError(
                    "the optimizer state is stored as flat buckets (dp_reshardable) without a list of what lies where: this checkpoint "
                    "was saved without megatron-sr, or by an older one. Save it with --dist-ckpt-optim-fully-reshardable, or load it"
                )
            if name not in read:
                read[name] = read_index(self.reader.object(name)[0])
            indices[key] = read[name][match[2]]
        return indices

    def pieces(self) -> Iterator[Piece]:
        """One piece at a time; each stored model shard at least once, replicas of main params each."""
        for key, main in self._named.items():
            if key in self._model:
                yield from self._named_pieces(key, main)
        segments = (
            {key: self._chunks_by_segment(stored) for key, stored in self._stored.items()} if self._buckets else {}
        )
        for bucket, entries in self._indices.items():
            for start, _, key, pieces in entries:
                if key in self._stored:
                    for segment in pieces:
                        yield self._bucket_piece(bucket, start, key, segment, segments[key])

    def read_main_params(self) -> Iterator[int]:
        """Read every stored main param, chunk by chunk; yields their sizes. For a checkpoint without model params."""
        for key in (*self._named.values(), *self._buckets):
            for chunk in self.reader.tensors[key].chunks:
                yield self.reader.chunk(key, chunk).numel()

    def _named_pieces(self, key: str, main: str) -> Iterator[Piece]:
        tensor = self._model[key]
        if self.reader.tensors[main].shape != tensor.shape:
            raise DamagedCheckpoint(
                f"{key} has shape {tensor.shape}, its main params {self.reader.tensors[main].shape}"
            )
        for chunk in tensor.chunks:
            yield Piece(
                self._logical(key)[0],
                self._segments(key, chunk),
                self.reader.chunk(key, chunk).contiguous().view(-1),
                self.reader.region(main, *chunk).contiguous().view(-1),
                chunk.shape,
            )

    def _chunks_by_segment(self, stored: list[str]) -> dict[tuple, tuple]:
        """Where a segment of a logical tensor lies -> (stored key, chunk, where it starts in the chunk)."""
        return {
            _place(segment): (key, chunk, segment.local_start)
            for key in stored
            for chunk in self._model[key].chunks
            for segment in self._segments(key, chunk)
        }

    def _bucket_piece(self, bucket: str, start: int, key: str, segment: Segment, chunks: dict) -> Piece:
        if _place(segment) not in chunks:
            raise DamagedCheckpoint(f"{key}: its model params are stored in other pieces than its main params")
        stored, chunk, at = chunks[_place(segment)]
        model = self.reader.chunk(stored, chunk).contiguous().view(-1)[at : at + segment.length]
        main = self.reader.region(bucket, (start + segment.local_start,), (segment.length,))
        shape = chunk.shape if segment.length == _numel(chunk.shape) else None
        return Piece(key, [segment._replace(local_start=0)], model, main.contiguous(), shape)


def _place(segment: Segment) -> tuple:
    """Where a segment lies in its tensor, whatever its local start; contiguous ones are the same for every run and stride."""
    if segment.contiguous:
        return segment.global_start, segment.length
    return segment.global_start, segment.length, segment.stride, segment.run


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
