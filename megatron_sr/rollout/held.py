"""What a worker was last given, and whether its live weights are still that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megatron_sr.rollout.digest import tensor_digest
from megatron_sr.rollout.manifest import TensorRecord
from megatron_sr.rollout.packing import count_indistinct, values_only


@dataclass(frozen=True)
class LiveView:
    """names: the Hugging Face tensors that it holds; bits: whether `read` gives bits or only values; read: the tensors, in order."""

    names: tuple[str, ...]
    bits: bool
    read: Callable[[], list[torch.Tensor]]


@dataclass
class Held:
    """records: shape, dtype and digest of each tensor's part that a worker was given.

    values_only  names of which only values can be read back; values: the digests of their values.
    indistinct   how many of the elements given in such tensors are -0.0 or subnormal.
    """

    records: dict[str, TensorRecord] = field(default_factory=dict)
    values_only: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    indistinct: int = 0

    def note(self, name: str, part: torch.Tensor, record: TensorRecord | None = None) -> None:
        """Remember what was given. record: of `part`, where it is known."""
        self.records[name] = record or TensorRecord.of(part)
        if name in self.values_only:
            count = count_indistinct(part)
            self.values[name] = tensor_digest(values_only(part)) if count else self.records[name].digest
            self.indistinct += count

    def mismatched(self, views: Iterable[LiveView]) -> list[str]:
        """Names, sorted, of the tensors that a live view shows to be other than those given.

        One view after the other: operators behind a oneDNN handle share scratch memory, and probing two at once gave wrong values
        (16 of 480 reads of a 768 x 128 FP16 layer, two threads; none in turn).
        """
        wrong = set()
        for view in views:
            for name, live in zip(view.names, view.read()):
                record = self.records.get(name)
                if record is None:
                    same = False
                elif view.bits:
                    same = TensorRecord.of(live) == record
                else:
                    same = tuple(live.shape) == record.shape and tensor_digest(values_only(live)) == self.values.get(
                        name
                    )
                if not same:
                    wrong.add(name)
        return sorted(wrong)
