"""Weight sticking: how many weights an optimizer step leaves exactly where they were (Table 1 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

# Percent of weights unchanged since the start after optimizer steps 1 to 4: Table 1 of the paper.
PAPER_TABLE_1 = {"BF16": (99.42, 99.23, 98.93, 98.84), "FP16": (95.35, 93.86, 91.51, 90.79)}


class UnchangedCount:
    """Counts elements whose bits equal those in `start` (same names, shapes and dtypes, 16 bit), as tensors pass by."""

    def __init__(self, start: Mapping[str, torch.Tensor]):
        self._start, self._unchanged, self._total = start, 0, 0

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same pairs, counted."""
        for name, tensor in tensors:
            self._unchanged += (tensor.view(torch.int16) == self._start[name].view(torch.int16)).sum().item()
            self._total += tensor.numel()
            yield name, tensor

    @property
    def fraction(self) -> float:
        return self._unchanged / self._total


def unchanged_fraction(tensors: Iterable[tuple[str, torch.Tensor]], start: Mapping[str, torch.Tensor]) -> float:
    """Fraction of elements whose bits equal those in `start`, over all tensors; see `UnchangedCount`."""
    count = UnchangedCount(start)
    for _ in count.passing(tensors):
        pass
    return count.fraction
