"""Round FP32 tensors to a number format: the checks, then one kernel launch.

`round_to_`        one tensor.
`round_segments_`  many tensors or pieces of tensors, once.
`RoundingPlan`     the same pieces at every optimizer step: the table is built once, only the step changes.

With noise, rounding is stochastic: up with a probability equal to the discarded fraction, decided by (seed, stream,
step, tensor key, element index in the whole tensor) alone. Without, it is to the nearest, ties to even, as
`src.to(dtype)`. kernels/reference.py says what happens to NaN, infinities and overflow; formats.py for which values
the probability is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sr import formats, kernels
from megatron_sr.coordinates import Segment
from megatron_sr.formats import Format
from megatron_sr.kernels.table import PieceTable
from megatron_sr.noise import Noise, check_range, check_u64, philox_key


def round_to_(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    noise: Noise | None = None,
    format: str | Format = "bf16",
    start: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Round `src` to `format` into `dst`, in place. Returns `dst`.

    dst      contiguous, in a storage dtype of the format, of src's shape and device. FP32 `dst` (simulated formats)
             may be `src` itself.
    src      FP32, any shape; if it is not contiguous, a contiguous copy is made first.
    noise    None rounds to nearest, ties to even.
    start    global index of the first element in its whole tensor; the elements are consecutive, row-major.
    backend  auto, reference, cpu or triton; all give the same bits.

    Raises TypeError or ValueError for a dtype, shape, device, layout, format, start or backend that does not fit.
    """
    format = formats.get(format)
    src = _check_src(src, "src").contiguous()
    _check_pair(dst, src, format, "dst", "src")
    if dst.shape != src.shape:
        raise ValueError(f"dst has shape {tuple(dst.shape)}, src {tuple(src.shape)}; they must be equal")
    check_range(start, src.numel())
    if noise is not None and not isinstance(noise, Noise):
        raise TypeError(f"noise must be a Noise or None (nearest), not {type(noise).__name__}")
    table = PieceTable([dst], [src], format, stochastic=noise is not None)
    table.add(0, Segment(0, src.numel(), start), *_key_and_step(noise))
    _launch(table.seal(), backend)
    return dst


def round_segments_(
    dst: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor | Sequence[torch.Tensor],
    noises_and_segments: Sequence[tuple[Noise | None, Segment | Sequence[Segment]]],
    format: str | Format = "bf16",
    backend: str = "auto",
) -> None:
    """Round affine pieces of many logical tensors in one launch.

    Either `dst` and `src` are one tensor each, for example a param buffer and the main shard, and
    `noises_and_segments` lists any number of (noise, segments), one for each logical tensor that lies in it; or they
    are equally long lists of tensors with one (noise, segments) for each. A segment's `local_start` counts elements
    of the flat `dst` and of the flat `src` alike; elements that no segment names are left as they are; no two
    segments may write the same element.

    dst, src contiguous, otherwise as in `round_to_`; dst and src of a pair may differ in shape. All on one device.
    The noises are all None (nearest) or all `Noise`. Raises as `round_to_` does, naming the list position.
    """
    format = formats.get(format)
    noises_and_segments = list(noises_and_segments)
    if isinstance(dst, torch.Tensor) and isinstance(src, torch.Tensor):
        dst, src, owner = [dst], [src], [0] * len(noises_and_segments)
    else:
        dst, src, owner = list(dst), list(src), list(range(len(noises_and_segments)))
        _check_lengths(dst, src, owner)
    stochastic = any(noise is not None for noise, _ in noises_and_segments)
    table = PieceTable(*_check_pairs(dst, src, format), format, stochastic)
    for i, (noise, segments) in zip(owner, noises_and_segments):
        if isinstance(noise, Noise) != stochastic or not isinstance(noise, Noise | None):
            raise TypeError(
                f"noises_and_segments: every noise must be a Noise, or every one None (nearest); found {noise!r}"
            )
        key, step = _key_and_step(noise)
        for segment in check_segments(segments, dst[i], src[i], i):
            table.add(i, segment, key, step)
    _launch(table.seal(), backend)


class RoundingPlan:
    """Rounding of the same tensors at every optimizer step, as one launch.

    dst, src           equally long lists of contiguous tensors, as in `round_segments_`.
    keys_and_segments  one (tensor key, [Segment, ...]) for each pair.
    seed, stream       of the noise; see `Noise`. seed None: to nearest, ties to even; keys and steps then do not matter.

    The segments and the Philox keys are prepared here, once. The cpu backend needs no temporary memory. Tensors are
    held by reference: a tensor whose storage moves (`.data = ...`) is followed. Raises TypeError or ValueError as
    `round_segments_` does.
    """

    def __init__(
        self,
        dst: Sequence[torch.Tensor],
        src: Sequence[torch.Tensor],
        keys_and_segments: Sequence[tuple[str, Sequence[Segment]]],
        *,
        seed: int | None,
        stream: int = 0,
        format: str | Format = "bf16",
        backend: str = "auto",
    ):
        format = formats.get(format)
        if seed is not None:
            check_u64("seed", seed)
        check_u64("stream", stream)
        dst, src, keys_and_segments = list(dst), list(src), list(keys_and_segments)
        _check_lengths(dst, src, keys_and_segments)
        self._table = PieceTable(*_check_pairs(dst, src, format), format, stochastic=seed is not None)
        for i, (key, segments) in enumerate(keys_and_segments):
            if not isinstance(key, str):
                raise TypeError(f"keys_and_segments[{i}]: the key must be a str, not {type(key).__name__}")
            words = philox_key(seed, key, stream) if seed is not None else (0, 0)
            for segment in check_segments(segments, dst[i], src[i], i):
                self._table.add(i, segment, words, 0)
        self._table.seal()
        self._backend = kernels.load(backend, dst[0].device) if dst else None

    def run_(self, step: int) -> None:
        """Round every tensor with the noise of this step (0 .. 2**64 - 1).

        Raises RuntimeError if a tensor's shape, dtype, device or contiguity has changed since the plan was made.
        """
        self._table.set_step(check_u64("step", step))
        if self._backend is not None:
            _run(self._table, self._backend)


def _launch(table: PieceTable, backend: str) -> None:
    if table.dst:
        _run(table, kernels.load(backend, table.dst[0].device))


def _run(table: PieceTable, backend) -> None:
    table.refresh()
    backend.round_table_(table)
    # Kernels write through addresses: tell autograd that the tensors have changed.
    torch.autograd.graph.increment_version(table.versioned)


def _key_and_step(noise: Noise | None) -> tuple[tuple[int, int], int]:
    return (noise.philox_key(), noise.step) if noise is not None else ((0, 0), 0)


def _check_lengths(dst: list, src: list, noises: list) -> None:
    if not len(dst) == len(src) == len(noises):
        raise ValueError(
            f"{len(dst)} dst tensors, {len(src)} src tensors and {len(noises)} entries with segments were given; "
            "lists must be equally long"
        )


def _check_src(src: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(src, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(src).__name__}")
    if src.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {src.dtype}; rounding starts from torch.float32 main params")
    return src


def _check_pair(dst: torch.Tensor, src: torch.Tensor, format: Format, dst_name: str, src_name: str) -> None:
    _check_src(src, src_name)
    if not isinstance(dst, torch.Tensor):
        raise TypeError(f"{dst_name} must be a torch.Tensor, not {type(dst).__name__}")
    format.check_storage(dst.dtype, dst_name)
    if dst.device != src.device:
        raise ValueError(f"{dst_name} is on {dst.device}, {src_name} on {src.device}; they must be on one device")
    for tensor, name in ((dst, dst_name), (src, src_name)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous (strides {tensor.stride()}); pass a contiguous tensor")
    _check_overlap(dst, src, dst_name, src_name)


def _check_overlap(dst: torch.Tensor, src: torch.Tensor, dst_name: str, src_name: str) -> None:
    """In place is fine (the same elements of the same size); a partial overlap would be read after it was written."""
    at, to = dst.data_ptr(), src.data_ptr()
    if not (at and to) or (at == to and dst.dtype == src.dtype):  # no memory (empty, meta), or in place
        return
    if at < to + src.numel() * src.element_size() and to < at + dst.numel() * dst.element_size():
        raise ValueError(
            f"{dst_name} and {src_name} overlap in memory; pass separate tensors, or one FP32 tensor as both"
        )


def _check_pairs(dst: list[torch.Tensor], src: list[torch.Tensor], format: Format):
    for i, (d, s) in enumerate(zip(dst, src)):
        _check_pair(d, s, format, f"dst[{i}]", f"src[{i}]")
        if d.device != dst[0].device:
            raise ValueError(f"dst[{i}] is on {d.device}, dst[0] on {dst[0].device}; one launch serves one device")
    return dst, src


def check_segments(segments, dst: torch.Tensor, src: torch.Tensor, i: int):
    """Yield the segments that are not empty; raise ValueError for one that leaves its tensors or the global indices."""
    numel = min(dst.numel(), src.numel())
    for segment in [segments] if isinstance(segments, Segment) else segments:
        local, length, global_start, stride, run = segment
        if local < 0 or length < 0 or local + length > numel:
            raise ValueError(f"{segment} of tensor pair {i} leaves its {numel} elements")
        if run < 1 or stride < 0:
            raise ValueError(f"{segment} of tensor pair {i}: run must be at least 1 and stride at least 0")
        check_range(
            global_start, (length - 1) // run * stride + min(run, length) if length else 0, f"{segment}: global start"
        )
        if length:
            yield segment
