"""Weight sticking: how many weights an optimizer step leaves exactly where they were (Table 1 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Percent of weights unchanged since the start after optimizer steps 1 to 4: Table 1 of the paper.
PAPER_TABLE_1 = {"BF16": (99.42, 99.23, 98.93, 98.84), "FP16": (95.35, 93.86, 91.51, 90.79)}


def unchanged_fraction(tensors: Iterable[tuple[str, torch.Tensor]], start: dict[str, torch.Tensor]) -> float:
    """Fraction of elements whose bits equal those in `start`, over all tensors. Same names, shapes and dtypes (16 bit)."""
    unchanged = total = 0
    for name, tensor in tensors:
        unchanged += (tensor.view(torch.int16) == start[name].view(torch.int16)).sum().item()
        total += tensor.numel()
    return unchanged / total
