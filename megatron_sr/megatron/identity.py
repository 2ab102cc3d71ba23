"""Which elements of which logical tensor a rank's parameters hold, by the coordinates of distributed checkpointing.

A logical tensor is the whole, unsharded weight. `model.sharded_state_dict()` names it (`key`) and gives the local shard's
offset in it, in every layout (TP, PP, VPP, EP) alike; buffer positions would change with the data-parallel size, the
bucket size and padding. Source: megatron.core.dist_checkpointing.mapping, `ShardedTensor`, `ShardedTensorFactory`.

Axes that Megatron prepends (layer, expert) count as leading dimensions of the logical tensor: layers and experts share a
key and differ in `global_start`. Padding the vocabulary changes only dimension 0, which no row-major index depends on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch

from megatron_sr.coordinates import Segment, check_cover


class Identity(NamedTuple):
    """Where a local parameter's elements lie: segments of the logical tensor `key`, covering the parameter exactly once."""

    key: str
    segments: list[Segment]


class ComposedIdentity(Identity):
    """Of a logical tensor that checkpoints store in parts. parts: (key in checkpoints, where it starts in the tensor), in order."""

    parts: tuple[tuple[str, int], ...] = ()


def model_chunks(model) -> list[torch.nn.Module]:
    """The bare chunks of `model`: a module or a list of modules (virtual pipeline), in DDP and Float16Module or not."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    for i, chunk in enumerate(chunks):
        while isinstance(chunk, (DistributedDataParallel, Float16Module)):
            chunk = chunk.module
        chunks[i] = chunk
    return chunks


def identify(model) -> dict[torch.nn.Parameter, Identity]:
    """The identity of every parameter of `model` (as in `model_chunks`). No communication, no tensor is made.

    Replicas (norms and router under TP, the tied embedding on the first and last stage) get equal identities.
    Raises ValueError, naming the parameter, when `sharded_state_dict()` leaves one out or does not cover it exactly once.
    """
    identities = {}
    for number, chunk in enumerate(model_chunks(model)):
        entries = _sharded_entries(chunk)
        for name, parameter in chunk.named_parameters():
            where = f"parameter {name}" + (f" of model chunk {number}" if number else "")
            if parameter not in entries:
                raise ValueError(
                    f"{where} is not in the model's sharded_state_dict(), so its elements have no name that is the same "
                    "in every layout; give its module a sharded_state_dict() or use --param-rounding nearest"
                )
            identities[parameter] = _identity(entries[parameter], parameter, where)
    return identities


def _sharded_entries(chunk: torch.nn.Module) -> dict[torch.nn.Parameter, list[tuple[int, object]]]:
    """Parameter -> (offset in the flat parameter, its ShardedTensor or ShardedTensorFactory).

    Megatron puts the parameter itself in an entry's `data`, or, for experts that are stacked in one parameter, views of it.
    The state dict is asked for without metadata: identities must not depend on how a run chooses to store checkpoints.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    tensors, _ = extract_sharded_tensors_and_factories(chunk.sharded_state_dict())
    entries: dict[torch.nn.Parameter, list] = {}
    for entry in nested_values(tensors):
        data = entry.data
        if isinstance(data, torch.nn.Parameter):
            entries[data] = [(0, entry)]
        elif isinstance(data, torch.Tensor) and isinstance(data._base, torch.nn.Parameter) and data.is_contiguous():
            offset = data.storage_offset() - data._base.storage_offset()
            entries.setdefault(data._base, []).append((offset, entry))
    return entries


def _identity(entries: list[tuple[int, object]], parameter: torch.nn.Parameter, where: str) -> Identity:
    found: dict[str, list[Segment]] = {}
    sizes: dict[str, int] = {}
    for offset, entry in entries:
        # A probe of the entry's shape without memory: strides and offsets of its views are all that is asked of it.
        probe = torch.empty(entry.data.shape, dtype=entry.data.dtype, device="meta")
        for piece in _sharded_tensors(dataclasses.replace(entry, data=probe)):
            if piece.data is not probe and piece.data._base is not probe:
                raise ValueError(
                    f"{where}: its checkpoint entry copies instead of viewing; use --param-rounding nearest"
                )
            segments = [s._replace(local_start=s.local_start + offset) for s in _segments(piece, where)]
            found.setdefault(piece.key, []).extend(segments)
            sizes[piece.key] = math.prod(piece.global_shape)
    identity = _compose(found, sizes)
    check_cover(identity.segments, parameter.numel(), where)
    return identity


def _compose(found: dict[str, list[Segment]], sizes: dict[str, int]) -> Identity:
    """One logical tensor from the tensors that a checkpoint splits a parameter into. sizes: their elements, whole.

    Mamba's and Gated DeltaNet's input projection is stored as "...in_proj.weight.z", ".x" and so on, a fused MLA projection under the
    names of its halves. These lie one after the other, whole, in the order of their names, in a logical tensor named
    "...in_proj.weight" (or "first+second"): the same in every layout.
    """
    if len(found) == 1:
        ((key, segments),) = found.items()
        return Identity(key, sorted(segments))
    segments, parts, start = [], [], 0
    for key in sorted(found):
        segments += [s._replace(global_start=s.global_start + start) for s in found[key]]
        parts.append((key, start))
        start += sizes[key]
    stems = {key.rpartition(".")[0] for key in found}
    identity = ComposedIdentity(stems.pop() if len(stems) == 1 else "+".join(sorted(found)), sorted(segments))
    identity.parts = tuple(parts)
    return identity


def _sharded_tensors(entry) -> list:
    """The ShardedTensors of an entry: itself, or what its factory builds (SwiGLU's fc1: the gate and the up half)."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    return list(nested_values({"built": entry.build()})) if isinstance(entry, ShardedTensorFactory) else [entry]


def region(shape: Sequence[int], offset: Sequence[int], whole: Sequence[int]) -> list[Segment]:
    """The segments of a contiguous block of `shape` that lies at `offset` in a logical tensor of shape `whole`: a checkpoint's chunk."""
    data = torch.empty(tuple(shape), device="meta")
    return _segments(
        SimpleNamespace(data=data, global_shape=whole, global_offset=offset, prepend_axis_num=0),
        f"chunk at {tuple(offset)}",
    )


def _segments(piece, where: str) -> list[Segment]:
    """The segments of one ShardedTensor whose `data` is a view of the parameter: row-major in both coordinates."""
    strides = [math.prod(piece.global_shape[axis + 1 :]) for axis in range(len(piece.global_shape))]
    start = sum(offset * stride for offset, stride in zip(piece.global_offset, strides))
    data = piece.data
    axes = _merge_axes(list(zip(data.shape, data.stride(), strides[piece.prepend_axis_num :])))
    if axes[-1][1] != 1:
        raise ValueError(f"{where}: its checkpoint entry is transposed; use --param-rounding nearest")
    if axes[-1][2] != 1:  # single columns: neighbours here are never neighbours in the logical tensor
        axes.append((1, 1, 1))
    run = axes.pop()[0]
    rows, stride = 1, run
    if axes and axes[-1][1] == run:  # rows that lie side by side here and `stride` apart in the logical tensor
        rows, _, stride = axes.pop()
    return [
        Segment(
            data.storage_offset() + sum(i * local for i, (_, local, _) in zip(index, axes)),
            rows * run,
            start + sum(i * whole for i, (_, _, whole) in zip(index, axes)),
            stride,
            run,
        )
        for index in itertools.product(*(range(size) for size, _, _ in axes))
    ]


def _merge_axes(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Axes as (size, local stride, global stride), neighbours joined where both strides allow it, sizes of 1 dropped."""
    merged = []
    for size, local, whole in axes:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * local, size * whole):
            merged[-1] = (merged[-1][0] * size, local, whole)
        else:
            merged.append((size, local, whole))
    return merged or [(1, 1, 1)]
