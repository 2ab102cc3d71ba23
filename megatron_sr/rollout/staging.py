"""Incoming weights, checked one by one before anything of the engine is touched, and handed to its workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from megatron_sr.kernels.bits_cpu import all_finite
from megatron_sr.rollout.engine import UpdateRefused
from megatron_sr.rollout.manifest import Manifest, TensorRecord
from megatron_sr.rollout.mxfp8_layout import has_nan

Wanted = Mapping[
    str, tuple[tuple[int, ...], torch.dtype]
]  # Hugging Face name -> shape and dtype of every tensor of the model

_MOST = 8  # names listed in a message


def check_tensor(name: str, tensor: torch.Tensor, wanted: Wanted) -> str | None:
    """What is wrong with an incoming tensor, or None. The one place that knows which shapes, dtypes and values an engine takes."""
    if name not in wanted:
        return "is not a tensor of the model"
    shape, dtype = wanted[name]
    if tuple(tensor.shape) != shape:
        return f"has shape {list(tensor.shape)}, the model {list(shape)}"
    if tensor.dtype != dtype:
        return f"is {tensor.dtype}, the model {dtype}"
    if dtype.is_floating_point and dtype.itemsize > 1:
        return None if all_finite(tensor) else "has NaN or infinite elements"
    return "has NaN elements" if has_nan(tensor) else None


@dataclass
class Incoming:
    """The tensors of one update, digested and checked as they pass; `check` tells at the end whether they are whole.

    wanted    every tensor of the model
    expected  digests that the sender stated, where it did: looked up when a tensor passes, so it may fill on the way
    """

    wanted: Wanted
    expected: Mapping[str, TensorRecord] | None = None
    records: dict[str, TensorRecord] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same pairs, each after its check. A tensor with a problem is noted and passes too; `tensors` is used up."""
        for name, tensor in tensors:
            record = TensorRecord.of(tensor)
            if name in self.records:
                self.problems.append(f"{name} was sent twice")
            elif problem := check_tensor(name, tensor, self.wanted):
                self.problems.append(f"{name} {problem}")
            elif self.expected is not None and self.expected.get(name) != record:
                stated = self.expected.get(name)
                self.problems.append(f"{name} was damaged on the way: digest {record.digest}, " + (
                    f"the sender's is {stated.digest}" if stated else "the sender stated none"
                ))  # fmt: skip
            self.records[name] = record
            yield name, tensor

    def check(self, version: int) -> None:
        """Raise UpdateRefused, listing what is wrong, unless every tensor of the model passed once and in order."""
        problems = self.problems[:_MOST]
        if len(self.problems) > _MOST:
            problems.append(f"{len(self.problems) - _MOST} more")
        missing = [name for name in self.wanted if name not in self.records]
        if missing:
            problems.append(f"missing tensors: {missing[:_MOST]} ({len(missing)} in all)")
        if problems:
            raise UpdateRefused(f"update to version {version} refused: {'; '.join(problems)}")

    def manifest(self, version: int) -> Manifest:
        """Of all tensors that passed."""
        return Manifest(version, dict(self.records))
