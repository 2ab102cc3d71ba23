"""The low-precision parameters of an optimizer with their FP32 main params, and their rounding as one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import Segment
from megatron_sr.fsdp.coordinates import local
from megatron_sr.rounding import RoundingPlan


class Piece(NamedTuple):
    """A model param and its main param.

    param     BF16 or FP16, plain or DTensor.
    main      FP32, placed as `param`.
    key       of the whole tensor.
    segments  where the local elements lie in it.
    """

    param: torch.nn.Parameter
    main: torch.Tensor
    key: str
    segments: list[Segment]


class Rounding:
    """Rounds the local elements of pieces: stochastically those that `config` includes, the others to nearest.

    Follows tensors whose local part has been replaced (FSDP2 does so now and then). Knows whether somebody else has
    written to a model param since.
    """

    def __init__(self, pieces: list[Piece], config: ParamRounding):
        self.pieces, self.config = pieces, config
        self.generation = 0  # how often places have been looked up anew: plans over older ones are out of date
        self._held: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        self._versions: list[int] = []

    def stochastic(self, piece: Piece) -> bool:
        return self.config.mode == "stochastic" and self.config.rounds(piece.key)

    def noise_step(self, step: int) -> int:
        return 0 if self.config.noise == "fixed" else step

    def refresh(self) -> bool:
        """Look up the local tensors. Returns whether any has been replaced since the last time."""
        held = [local(piece.param) for piece in self.pieces]
        if self.generation and all(
            new is old and new.data_ptr() == place.data_ptr() for new, old, place in zip(held, self._held, self._places)
        ):
            return False
        self.generation += 1
        self._held, self._places = held, [t.detach() for t in held]
        places = self._places
        drawn = [i for i, piece in enumerate(self.pieces) if self.stochastic(piece) and places[i].numel()]
        self._nearest = [i for i, piece in enumerate(self.pieces) if not self.stochastic(piece)]
        self._plan = plan_of([self.pieces[i] for i in drawn], self.config)
        return True

    @torch.no_grad()
    def run_(self, step: int) -> None:
        """Write every param: the rounding of its main param at this step."""
        self.refresh()
        self._plan.run_(self.noise_step(step))
        if self._nearest:
            mains = [local(self.pieces[i].main) for i in self._nearest]
            torch._foreach_copy_([self._places[i] for i in self._nearest], mains)
        self.written()

    def written(self) -> None:
        """The params have just been rounded, here or by a fused step."""
        self._versions = [t._version for t in self._places]

    @torch.no_grad()
    def overwritten(self, step: int) -> list[str]:
        """Names of params that somebody else has written to and that are not the rounding of their main params at `step`.

        Costs nothing unless a tensor's version says so. Writes through `.data` leave no trace.
        """
        suspects = [
            piece
            for piece, place, version in zip(self.pieces, self._places, self._versions)
            if place._version != version
        ]
        return [piece.key for piece in suspects if not self._is_rounded(piece, step)]

    def _is_rounded(self, piece: Piece, step: int) -> bool:
        expected = torch.empty_like(local(piece.param.detach()))
        if self.stochastic(piece):
            plan_of([piece], self.config, [expected]).run_(self.noise_step(step))
        else:
            expected.copy_(local(piece.main))
        return torch.equal(expected.view(torch.int16), local(piece.param.detach()).view(torch.int16))


def plan_of(pieces: list[Piece], config: ParamRounding, places: list[torch.Tensor] | None = None) -> RoundingPlan:
    """The launch that rounds these pieces into their params, or into `places`."""
    return RoundingPlan(
        places or [local(piece.param.detach()) for piece in pieces],
        [local(piece.main) for piece in pieces],
        [(piece.key, piece.segments) for piece in pieces],
        seed=config.seed,
        stream=config.stream,
        format=config.format or "bf16",
    )
