"""A cast site: one inner torch optimizer and the places its main params are rounded to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from megatron_sr import checkpoint
from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import clip
from megatron_sr.megatron import recompute
from megatron_sr.megatron.identity import Identity
from megatron_sr.rounding import RoundingPlan

BATCH = 1 << 24
"""Elements that a measurement or a check handles at a time, or one tensor: bounds its temporary memory to 2 bytes for each."""


class Piece(NamedTuple):
    """A main param and where it is rounded to.

    param     the whole local model param.
    place     the elements that this rank writes: contiguous, in the model params' dtype.
    main      FP32, contiguous, as many elements.
    identity  of these elements.
    """

    param: torch.nn.Parameter
    place: torch.Tensor
    main: torch.Tensor
    identity: Identity


class Site:
    """Rounding for one inner torch optimizer. Subclasses say which pieces it has (`find`) and replace Megatron's cast.

    step      successful steps of the inner optimizer: draws so far.
    pieces    rounded by `round_`, one fused launch for the stochastic and one for the nearest ones.
    observer  called instead of a plain `round_` when set; see `metrics.py`.
    after_round  called with the site after every `round_`: what is derived from the params, MXFP8 values, is out of date.
    """

    kind = "optimizer"

    def __init__(self, inner: torch.optim.Optimizer, identities: dict, config: ParamRounding):
        self.inner, self.identities, self.config = inner, identities, config
        self.step = 0
        self.observer = None
        self.after_round: list[Callable[[Site], None]] = []
        self.rebuild()
        self.set_step(0)
        # Torch's own hooks count: the inner step runs exactly when Megatron has not skipped the step for an overflow.
        inner.register_step_post_hook(lambda *_: self.set_step(self.step + 1))
        checkpoint.on_load(inner, config, loaded=self._loaded)

    def find(self) -> tuple[list[Piece], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The pieces to round, and the (place, main) pairs of FP32 model params, which are copied as they are."""
        raise NotImplementedError

    def rebuild(self) -> None:
        """Make the plans anew, after main params have become other tensors."""
        self.pieces, self.copies = self.find()
        rounded = [piece for piece in self.pieces if self.stochastic(piece)]
        nearest = [piece for piece in self.pieces if not self.stochastic(piece)]
        self._plans = [self.plan(pieces) for pieces in (rounded, nearest) if pieces]

    def stochastic(self, piece: Piece) -> bool:
        return self.config.mode == "stochastic" and self.config.rounds(piece.identity.key)

    def plan(self, pieces: list[Piece]) -> RoundingPlan:
        """A plan for pieces that are all stochastic or all nearest."""
        return RoundingPlan(
            [piece.place for piece in pieces],
            [piece.main for piece in pieces],
            [piece.identity for piece in pieces],
            seed=self.config.seed if self.stochastic(pieces[0]) else None,
            stream=self.config.stream,
            format=storage_format(self.config),
        )

    @property
    def draw(self) -> int:
        """The step that the noise of the current model params was drawn for."""
        return 0 if self.config.noise == "fixed" else self.step

    def set_step(self, step: int) -> None:
        self.step = step
        checkpoint.store(self.inner, checkpoint.rounding_state(self.config, step))

    def _loaded(self, state: dict | None) -> None:
        self.set_step(state["step"] if state else 0)

    @torch.no_grad()
    def round_(self) -> None:
        """Main params into model params; the same bits however often it is called between two steps."""
        if self.observer is None:
            for plan in self._plans:
                plan.run_(self.draw)
        else:
            self.observer(self)
        for place, main in self.copies:
            place.copy_(main)
        for action in self.after_round:
            action(self)

    def batches(self) -> Iterator[list[Piece]]:
        """The pieces in batches of `BATCH` elements or one piece; a batch is all stochastic or all nearest."""
        for kind in (True, False):
            batch, size = [], 0
            for piece in self.pieces:
                if self.stochastic(piece) != kind:
                    continue
                if batch and size + piece.main.numel() > BATCH:
                    yield batch
                    batch, size = [], 0
                batch.append(piece)
                size += piece.main.numel()
            if batch:
                yield batch

    def mismatches(self) -> list[str]:
        """Names of the tensors of which this rank's model params are not the rounding of its main params. Changes nothing."""
        pieces = (
            recompute.Piece(
                piece.identity.key, piece.identity.segments, piece.place.detach().view(-1), piece.main.view(-1)
            )
            for piece in self.pieces
        )
        return [mismatch.key for mismatch in recompute.mismatches(pieces, self.config, self.step)]


def storage_format(config: ParamRounding) -> str:
    """The format that main params are rounded to: for mxfp8 the BF16 that is quantized afterwards."""
    return "bf16" if config.format == "mxfp8" else config.format


def shard_identity(identities: dict, param: torch.nn.Parameter, start: int, end: int) -> Identity:
    """The identity of elements start .. end - 1 of a flat local `param`. ZeRO cuts the flat parameter anywhere, also within a row.

    Raises ValueError when the optimizer holds a parameter that is not in the model.
    """
    if param not in identities:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the given model; "
            "pass every model chunk that the optimizer was made for"
        )
    key, segments = identities[param]
    return Identity(key, clip(segments, start, end))
