"""The collectives of an export, over Megatron's process groups. Tensors travel as bytes, one buffer per collective, dtypes mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

_ALIGNMENT = 16  # bytes; keeps every tensor of a buffer aligned for any dtype


class ExportGroups:
    """The tensor-, expert- and pipeline-parallel groups of this rank. Megatron's parallel state must be initialised."""

    def __init__(self):
        from megatron.core import parallel_state as ps

        self._pipeline = ps.get_pipeline_model_parallel_group()
        self.pipeline_size = ps.get_pipeline_model_parallel_world_size()
        self._tensor = {False: ps.get_tensor_model_parallel_group(), True: ps.get_expert_tensor_parallel_group()}
        self._expert = ps.get_expert_model_parallel_group()

    def tensor_rank(self, expert: bool) -> tuple[int, int]:
        """Rank and size in the tensor-parallel group of the experts, or of all other parameters."""
        return dist.get_rank(self._tensor[expert]), dist.get_world_size(self._tensor[expert])

    def expert_rank(self) -> tuple[int, int]:
        """Rank and size in the expert-parallel group."""
        return dist.get_rank(self._expert), dist.get_world_size(self._expert)

    def gather_tensor(self, values: Sequence[torch.Tensor], expert: bool) -> list[list[torch.Tensor]]:
        """For each value, the tensors of all ranks of its tensor-parallel group, in rank order."""
        return _gather(values, self._tensor[expert])

    def gather_experts(self, local: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """The named tensors of all expert-parallel ranks. Ranks hold equally many, of equal shapes, in one order."""
        size = dist.get_world_size(self._expert)
        if size == 1:
            return list(local)
        names: list = [None] * size
        dist.all_gather_object(names, [name for name, _ in local], group=self._expert)
        gathered = _gather([tensor for _, tensor in local], self._expert)
        return [(names[rank][i], gathered[i][rank]) for rank in range(size) for i in range(len(local))]

    def gather_stages(self, value) -> dict[int, object]:
        """A picklable value of every pipeline stage, by the global rank of that stage in this rank's pipeline."""
        ranks = dist.get_process_group_ranks(self._pipeline)
        if self.pipeline_size == 1:
            return {ranks[0]: value}
        values: list = [None] * len(ranks)
        dist.all_gather_object(values, value, group=self._pipeline)
        return dict(zip(ranks, values))

    def broadcast(
        self,
        tensors: Mapping[str, torch.Tensor] | None,
        what: Mapping[str, tuple[Sequence[int], torch.dtype]],
        source: int,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Tensors from the stage that holds them (global rank `source`) to this pipeline's other stages, which give None.

        what: shape and dtype of each, in one order on all ranks.
        """
        if tensors is not None:
            buffer = _pack([tensors[name] for name in what])
        else:
            buffer = torch.empty(sum(_bytes(*item) for item in what.values()), dtype=torch.uint8, device=device)
        dist.broadcast(buffer, source, group=self._pipeline)
        return dict(tensors) if tensors is not None else dict(zip(what, _unpack(buffer, list(what.values()))))


def _gather(values: Sequence[torch.Tensor], group) -> list[list[torch.Tensor]]:
    """All-gather tensors (same shapes and dtypes on all ranks) with one collective: per value, its tensors in rank order."""
    size = dist.get_world_size(group)
    if size == 1 or not values:
        return [[value] for value in values]
    buffer = _pack(values)
    buffers = [torch.empty_like(buffer) for _ in range(size)]
    dist.all_gather(buffers, buffer, group=group)
    per_rank = [_unpack(b, [(v.shape, v.dtype) for v in values]) for b in buffers]
    return [[tensors[i] for tensors in per_rank] for i in range(len(values))]


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = [_bytes(t.shape, t.dtype) for t in tensors]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for place, tensor in zip(_unpack(buffer, [(t.shape, t.dtype) for t in tensors]), tensors):
        place.copy_(tensor)
    return buffer


def _unpack(buffer: torch.Tensor, what: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """Views of the tensors in a buffer."""
    out, at = [], 0
    for shape, dtype in what:
        out.append(buffer[at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape))
        at += _bytes(shape, dtype)
    return out
