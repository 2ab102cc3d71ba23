"""What a transport is: two ends that move buckets of named tensors, without a word about whether they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Tensors = Sequence[tuple[str, torch.Tensor]]


class Sender(Protocol):
    """The trainer's end. For each bucket: `put`, then the header goes to the engines, and `deliver` runs meanwhile."""

    kind: str

    def spec(self, receiver: int) -> dict:
        """What receiver number `receiver` (from 0) needs to attach; plain values only."""
        ...

    def put(self, number: int, tensors: Tensors) -> dict:
        """Take a bucket and return its header (plain values and bytes). The tensors may change once this returns."""
        ...

    def deliver(self, number: int) -> None:
        """Called while the engines have the header: collective transports send here. Others have nothing to do."""
        ...

    def taken(self, number: int) -> None:
        """The engines no longer need this bucket."""
        ...

    def end(self, good: bool) -> None:
        """The update is over, well or not: no bucket is needed any more."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Receiver(Protocol):
    """The engine's end."""

    def get(self, header: dict) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a bucket, from its header; perhaps views that are valid until the sender's `taken`.

        Raises ValueError for a header that makes no sense, RuntimeError when the bytes do not come.
        """
        ...

    def end(self, good: bool) -> None:
        """The update is over; a good one may be followed by another over the same receiver."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
