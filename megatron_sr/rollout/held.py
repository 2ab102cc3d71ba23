"""What an engine was last sent, and whether its live weights are still that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron_sr.rollout.digest import tensor_digest
from megatron_sr.rollout.manifest import Manifest, TensorRecord
from megatron_sr.rollout.packing import count_indistinct, values_only


@dataclass(frozen=True)
class LiveView:
    """names: the Hugging Face tensors that it holds; bits: whether `read` gives bits or only values; read: the tensors, in order."""

    names: tuple[str, ...]
    bits: bool
    read: Callable[[], list[torch.Tensor]]


@dataclass(frozen=True)
class Held:
    """manifest: digests of the bits sent. values: for tensors of which only values can be read back, the digest of those.

    indistinct: how many of the elements sent in such tensors are -0.0 or subnormal.
    """

    manifest: Manifest
    values: dict[str, str]
    indistinct: int

    @classmethod
    def of(cls, manifest: Manifest, sent: Mapping[str, torch.Tensor], views: Iterable[LiveView]) -> Held:
        """manifest: of the tensors `sent`, which are all of the model's, by Hugging Face name; views: those of the live model."""
        values, indistinct = {}, 0
        for name in {name for view in views if not view.bits for name in view.names}:
            count = count_indistinct(sent[name])
            values[name] = tensor_digest(values_only(sent[name])) if count else manifest.tensors[name].digest
            indistinct += count
        return cls(manifest, values, indistinct)

    def mismatched(self, views: Iterable[LiveView]) -> list[str]:
        """Names, sorted, of the tensors that a live view shows to be other than those sent."""
        wrong = set()
        for view in views:
            for name, live in zip(view.names, view.read()):
                record = self.manifest.tensors[name]
                if view.bits:
                    same = TensorRecord.of(live) == record
                else:
                    same = tuple(live.shape) == record.shape and tensor_digest(values_only(live)) == self.values[name]
                if not same:
                    wrong.add(name)
        return sorted(wrong)
