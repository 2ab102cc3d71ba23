"""FP32 main params held as BF16 model params and 16-bit remainders, under nearest and stochastic rounding.

Transformer Engine's and Apex's FusedAdam (`store_param_remainders`) need no FP32 copy of a BF16 param: its upper 16 bits
are the param before it was rounded, its lower 16 bits are an int16 remainder.

    main       | s eeeeeeee mmmmmmm | llllllllllllllll |
                  high               low = remainder
    param      = high + up,  up in {0, 1}

    nearest form     up = 1 if low >= 0x8000 (ties away from zero)     Transformer Engine: common/multi_tensor/adam.cu
    stochastic form  up = 1 if low + draw >= 0x10000, draw = the 16 random bits of (seed, step, key, element)

Either way high = param - up, so the main param comes back exactly: the draw is not stored but computed again. Reading
one form as the other changes a quarter of all main params by one BF16 ulp: whoever holds a pair must know its form.

Bits: `int16` holds low's pattern. Nearest form is without loss for every pattern, and FLT_MAX becomes Inf as in
Transformer Engine. In stochastic form finite stays finite: main params beyond the largest BF16 number saturate there,
and NaN becomes quiet; all else comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sr.coordinates import Segment, check_cover
from megatron_sr.formats import BF16
from megatron_sr.kernels import adamw, adamw_reference
from megatron_sr.kernels.table import PieceTable
from megatron_sr.noise import Noise, check_u64, philox_key
from megatron_sr.rounding import check_segments


def split_(
    param: torch.Tensor,
    remainder: torch.Tensor,
    main_param: torch.Tensor,
    *,
    noise: Noise | None = None,
    segments: Sequence[Segment] | None = None,
) -> None:
    """Write an FP32 main param as a BF16 param and an int16 remainder.

    noise     None writes nearest form; otherwise stochastic form, `param` being `round_to_` of the main param.
    segments  where the elements lie in their whole tensor; default: they are the whole tensor.

    All of one shape and device, contiguous. Plain torch: for checkpoints and first steps. Raises TypeError or
    ValueError for tensors or segments that do not fit.
    """
    _check_main(main_param, param)
    table = _table([param], [remainder], noise, segments)
    for _, here, draws in adamw_reference.parts(table):
        adamw_reference.split_(
            param.detach().view(-1)[here],
            remainder.view(-1)[here],
            main_param.detach().view(-1)[here],
            None if noise is None else draws(noise.step),
        )


def join(
    param: torch.Tensor,
    remainder: torch.Tensor,
    *,
    noise: Noise | None = None,
    segments: Sequence[Segment] | None = None,
) -> torch.Tensor:
    """The FP32 main param of a BF16 param and its int16 remainder: the inverse of `split_`, same arguments.

    noise  the noise that `param` was rounded with; None: the pair is in nearest form.
    """
    table = _table([param], [remainder], noise, segments)
    main = torch.empty(param.shape, dtype=torch.float32, device=param.device)
    for _, here, draws in adamw_reference.parts(table):
        main.view(-1)[here] = adamw_reference.join(
            param.detach().view(-1)[here],
            remainder.view(-1)[here],
            None if noise is None else draws(noise.step),
        )
    return main


class RemainderPlan:
    """Params and remainders of the same tensors, turned from one form into the other in place, as one launch.

    Around a step of Transformer Engine's FusedAdam, which knows only nearest form:

        plan.to_nearest_(step)             # before: undo the rounding of the last step
        optimizer.step()
        plan.to_stochastic_(step + 1)      # after

    params             BF16, contiguous.
    remainders         int16, as many elements.
    keys_and_segments  one (tensor key, [Segment, ...]) for each pair.
    seed, stream       of the noise.
    backend            auto, reference, cpu or triton.

    Raises TypeError or ValueError as `RoundingPlan` does.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        remainders: Sequence[torch.Tensor],
        keys_and_segments: Sequence[tuple[str, Sequence[Segment]]],
        *,
        seed: int,
        stream: int = 0,
        backend: str = "auto",
    ):
        check_u64("seed", seed)
        check_u64("stream", stream)
        words = [(philox_key(seed, key, stream), segments) for key, segments in keys_and_segments]
        self._table = _make_table(list(params), list(remainders), words)
        self._backend = adamw.load(backend, params[0].device) if params else None

    def to_nearest_(self, last_step: int) -> None:
        """Stochastic form of step `last_step` -> nearest form, without loss."""
        self._recode(check_u64("last_step", last_step), None)

    def to_stochastic_(self, step: int, last_step: int | None = None) -> None:
        """Nearest form, or stochastic form of step `last_step`, -> stochastic form of step `step`."""
        self._recode(None if last_step is None else check_u64("last_step", last_step), check_u64("step", step))

    def _recode(self, last_step: int | None, step: int | None) -> None:
        if self._backend is None:
            return
        table = self._table
        table.stochastic = step is not None
        table.set_step(step or 0)
        table.refresh()
        self._backend.recode_table_(table, last_step)
        torch.autograd.graph.increment_version([t for t in (*table.dst, *table.src) if not t.is_inference()])


def _table(params: list, remainders: list, noise: Noise | None, segments) -> PieceTable:
    if noise is not None and not isinstance(noise, Noise):
        raise TypeError(f"noise must be a Noise or None (nearest form), not {type(noise).__name__}")
    numel = params[0].numel()
    if segments is None:
        segments = [Segment(0, numel, 0)] if numel else []
    check_cover(segments, numel, "segments")
    return _make_table(params, remainders, [((0, 0) if noise is None else noise.philox_key(), segments)])


def _make_table(params: list, remainders: list, words_and_segments: list) -> PieceTable:
    if not len(params) == len(remainders) == len(words_and_segments):
        raise ValueError(
            f"{len(params)} params, {len(remainders)} remainders and {len(words_and_segments)} entries with segments "
            "were given; lists must be equally long"
        )
    for i, (param, remainder) in enumerate(zip(params, remainders)):
        found = [getattr(t, "dtype", type(t).__name__) for t in (param, remainder)]
        if found != [torch.bfloat16, torch.int16]:
            raise TypeError(
                f"pair {i} has dtypes {found[0]} and {found[1]}; it must be a bfloat16 param and an int16 remainder"
            )
        if param.numel() != remainder.numel() or len({param.device, remainder.device, params[0].device}) > 1:
            raise ValueError(
                f"pair {i}: param {tuple(param.shape)} on {param.device} and remainder {tuple(remainder.shape)} on "
                f"{remainder.device} must be equally large and all on {params[0].device}"
            )
        if not (param.is_contiguous() and remainder.is_contiguous()):
            raise ValueError(f"pair {i} is not contiguous; pass contiguous tensors")
    table = PieceTable(params, remainders, BF16, stochastic=True)
    for i, (words, segments) in enumerate(words_and_segments):
        for segment in check_segments(segments, params[i], remainders[i], i):
            table.add(i, segment, words, 0)
    return table.seal()


def _check_main(main_param: torch.Tensor, param: torch.Tensor) -> None:
    if main_param.dtype != torch.float32:
        raise TypeError(f"main_param has dtype {main_param.dtype}; it must be torch.float32")
    if main_param.shape != param.shape or main_param.device != param.device or not main_param.is_contiguous():
        raise ValueError(
            f"main_param {tuple(main_param.shape)} on {main_param.device} must be contiguous, of param's shape "
            f"{tuple(param.shape)} and on {param.device}"
        )
