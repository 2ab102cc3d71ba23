"""Model params again, from main params, seed and step: compare with what is there.

Rounding has no state, so FP32 main params, the configuration and the step determine every bit of the model params (design: C1). A
checkpoint that was edited, mixed from two or damaged shows as a tensor whose bits are not the rounding of its main params.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import Segment
from megatron_sr.rounding import RoundingPlan


class Piece(NamedTuple):
    """A piece of a logical tensor, as one rank (or one shard of a checkpoint) holds it.

    key       of the whole tensor; segments  where the piece lies in it, as in `RoundingPlan`.
    model     [n] of the model params' dtype, contiguous; main  [n] FP32, contiguous, same device.
    shape     of the piece, if it consists of whole rows of whole MXFP8 blocks; None: not known.
    """

    key: str
    segments: list[Segment]
    model: torch.Tensor
    main: torch.Tensor
    shape: tuple[int, ...] | None = None


class Mismatch(NamedTuple):
    """`differing` of `numel` elements of the tensor `key` are not the rounding of their main params; numel 0: not counted."""

    key: str
    differing: int = 0
    numel: int = 0

    def __str__(self) -> str:
        return f"{self.key} ({self.differing:,} of {self.numel:,} elements)" if self.numel else self.key


@torch.no_grad()
def rounded(piece: Piece, config: ParamRounding, step: int) -> torch.Tensor:
    """What `piece.model` must hold after `step` successful steps under `config`: a new tensor of its dtype and shape [n].

    Mode nearest without a format is the framework's own cast. With noise "fixed" the step does not matter.
    """
    if config.mode == "nearest" and config.format is None:
        return piece.main.to(piece.model.dtype)
    config = config.for_dtype(piece.model.dtype)
    stochastic = config.mode == "stochastic" and config.rounds(piece.key)
    expected = torch.empty_like(piece.model)
    plan = RoundingPlan(
        [expected],
        [piece.main],
        [(piece.key, piece.segments)],
        seed=config.seed if stochastic else None,
        stream=config.stream,
        format="bf16" if config.format == "mxfp8" else config.format,  # MXFP8 codes are made from BF16 model params
    )
    plan.run_(0 if config.noise == "fixed" else step)
    return expected


def mismatches(pieces: Iterable[Piece], config: ParamRounding, step: int) -> list[Mismatch]:
    """The tensors among `pieces` whose model params are not, bit for bit, the rounding of their main params, sorted by key.

    Memory: one piece of the model params' dtype at a time. Nothing is changed, nothing communicated.
    """
    return _by_key((piece.key, piece.model, _expected(piece, config, step)) for piece in pieces)


def _expected(piece: Piece, config: ParamRounding, step: int) -> torch.Tensor:
    """As `rounded`; with format mxfp8 the nearer one of the BF16 and the MXFP8 rounding, of which a tensor has one or the other."""
    expected = rounded(piece, config, step)
    if config.format != "mxfp8" or torch.equal(expected, piece.model):
        return expected
    if piece.shape is None:
        raise ValueError(
            f"{piece.key} is stored in pieces that may cut MXFP8 blocks, so it cannot be recomputed offline; save with "
            "--dist-ckpt-optim-fully-reshardable, or let a load compare it"
        )
    quantized = _second_rounding(expected, piece, config, step)
    return min(expected, quantized, key=lambda candidate: count_differing(candidate, piece.model))


def _second_rounding(first: torch.Tensor, piece: Piece, config: ParamRounding, step: int) -> torch.Tensor:
    """The values of the MXFP8 codes that are made from BF16 params. A matrix whose rows are not whole blocks has none."""
    from megatron_sr.megatron.identity import Identity
    from megatron_sr.megatron.mxfp8_rounding import SecondRounding
    from megatron_sr.mxfp8 import BLOCK

    if len(piece.shape) < 2 or piece.shape[-1] % BLOCK:
        return first
    matrix = first.view(-1, piece.shape[-1])
    blocks = SecondRounding(config).quantize(matrix, Identity(piece.key, piece.segments), step)
    return blocks.dequantize(first.dtype).view(-1)


def differing(pieces: Iterable[Piece], others: Iterable[torch.Tensor]) -> list[Mismatch]:
    """The tensors among `pieces` whose model params differ from those in `others`, one for each piece."""
    return _by_key((piece.key, piece.model, other) for piece, other in zip(pieces, others, strict=True))


def _by_key(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[Mismatch]:
    found: dict[str, list[int]] = {}
    for key, a, b in pairs:
        count = count_differing(a, b)
        if count:
            counts = found.setdefault(key, [0, 0])
            counts[0] += count
            counts[1] += a.numel()
    return [Mismatch(key, *found[key]) for key in sorted(found)]


def count_differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; tensors of one dtype and shape. NaN equals itself, +0 and -0 differ."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.view(as_integers) != b.view(as_integers)).sum())


def listing(wrong: list[Mismatch], most: int = 3) -> str:
    """The first tensors by name, and how many more there are."""
    return ", ".join(map(str, wrong[:most])) + (f" and {len(wrong) - most} more" if len(wrong) > most else "")
