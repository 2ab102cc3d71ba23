"""The fused optimizer step on the GPU: adamw_reference.py, bit for bit, in one launch over all pieces.

Launch it with enable_fp_fusion=False: the multiply-adds that round once are written out, the compiler must add none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_sr.kernels import triton_device as device
from megatron_sr.kernels.adamw import AdamWTable, Update
from megatron_sr.kernels.gpu_chunks import CHUNK, DeviceTables
from megatron_sr.kernels.table import PieceTable
from megatron_sr.kernels.triton_device import draws, open_chunk, round_bits
from megatron_sr.noise import signed

_tables = DeviceTables()


@triton.jit(do_not_specialize=["step", "last_step"])
def adamw_chunks(
    pieces,
    chunks,
    step: tl.int64,
    last_step: tl.int64,
    decay: tl.float32,
    average: tl.float32,
    beta2: tl.float32,
    square: tl.float32,
    root: tl.float32,
    eps: tl.float32,
    minus_step: tl.float32,
    F: tl.constexpr,
    STORAGE: tl.constexpr,
    GRAD: tl.constexpr,
    average_from_grad: tl.constexpr,
    REMAINDERS: tl.constexpr,
    LAST_STOCHASTIC: tl.constexpr,
    SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """AdamW and rounding of chunk number program_id; see gpu_chunks.Launch for the tables.

    The extra addresses are those of (grad, exp_avg, exp_avg_sq). GRAD is the gradient's type, or None to round (params,
    remainders) again without a step and without extra addresses.
    """
    GROUP: tl.constexpr = 128 // F.random_bits
    TILE: tl.constexpr = BLOCK * GROUP
    MAIN: tl.constexpr = tl.int16 if REMAINDERS else tl.float32
    program = tl.program_id(0)
    row = pieces + tl.load(chunks + program).to(tl.int64) * (9 if GRAD is None else 12)
    first, low, high, place = open_chunk(row, program, step, GROUP, SCATTERED, CHUNK)
    last_place = (place[0], place[1], place[2], place[3], place[4], place[5] + (last_step - step).to(tl.uint64))
    param_at = tl.load(row) + first * (F.width // 8)
    main_at = tl.load(row + 1) + first * (MAIN.primitive_bitwidth // 8)
    every_address = param_at | main_at
    param = param_at.to(tl.pointer_type(STORAGE))
    main = main_at.to(tl.pointer_type(MAIN))
    if GRAD is None:
        grad, exp_avg, exp_avg_sq = main, main, main
    else:
        grad_at = tl.load(row + 9) + first * (GRAD.primitive_bitwidth // 8)
        exp_avg_at = tl.load(row + 10) + first * 4
        exp_avg_sq_at = tl.load(row + 11) + first * 4
        every_address = every_address | grad_at | exp_avg_at | exp_avg_sq_at
        grad = grad_at.to(tl.pointer_type(GRAD))
        exp_avg = exp_avg_at.to(tl.pointer_type(tl.float32))
        exp_avg_sq = exp_avg_sq_at.to(tl.pointer_type(tl.float32))
    update = (decay, average, beta2, square, root, eps, minus_step)
    if (low == 0) & (high == CHUNK) & ((every_address & 15) == 0) & (not SCATTERED):
        param, main, grad = tl.multiple_of(param, 16), tl.multiple_of(main, 16), tl.multiple_of(grad, 16)
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
        for at in range(0, CHUNK, TILE):
            i = at + tl.arange(0, TILE)
            where = (param + i, main + i, grad + i, exp_avg + i, exp_avg_sq + i)
            now, last = _two_draws(at, place, last_place, F, REMAINDERS and LAST_STOCHASTIC, SCATTERED, BLOCK, CHUNK)
            _step_tile(where, None, update, now, last, F, GRAD, average_from_grad, REMAINDERS, LAST_STOCHASTIC)
    else:
        for at in range(0, high, TILE):
            i = at + tl.arange(0, TILE)
            inside = (i >= low) & (i < high)
            where = (param + i, main + i, grad + i, exp_avg + i, exp_avg_sq + i)
            now, last = _two_draws(at, place, last_place, F, REMAINDERS and LAST_STOCHASTIC, SCATTERED, BLOCK, CHUNK)
            _step_tile(where, inside, update, now, last, F, GRAD, average_from_grad, REMAINDERS, LAST_STOCHASTIC)


@triton.jit
def _two_draws(
    at,
    place,
    last_place,
    F: tl.constexpr,
    LAST: tl.constexpr,
    SCATTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Draws of this rounding and of the last one; a zero where there is none."""
    now = tl.zeros([1], tl.uint32)
    last = now
    if F.stochastic:
        now = draws(at, place, F.random_bits, SCATTERED, BLOCK, CHUNK)
    if LAST:
        last = draws(at, last_place, F.random_bits, SCATTERED, BLOCK, CHUNK)
    return now, last


@triton.jit
def _step_tile(
    where,
    inside,
    update,
    now,
    last,
    F: tl.constexpr,
    GRAD: tl.constexpr,
    AVERAGE_FROM_GRAD: tl.constexpr,
    REMAINDERS: tl.constexpr,
    LAST_STOCHASTIC: tl.constexpr,
):
    param, main, grad, exp_avg, exp_avg_sq = where
    value = tl.load(main, mask=inside)
    if REMAINDERS:
        value = join(tl.load(param, mask=inside), value, last, LAST_STOCHASTIC)
    if GRAD is not None:
        value, m, v = adamw(
            value,
            tl.load(grad, mask=inside).to(tl.float32),
            tl.load(exp_avg, mask=inside),
            tl.load(exp_avg_sq, mask=inside),
            update,
            AVERAGE_FROM_GRAD,
        )
        tl.store(exp_avg, m, mask=inside)
        tl.store(exp_avg_sq, v, mask=inside)
    bits = value.to(tl.uint32, bitcast=True)
    if REMAINDERS:
        if F.stochastic:
            bits = saturate_at_bf16(bits)
            rounded = round_bits(bits, now, F)
        else:
            rounded = (bits >> 16) + ((bits >> 15) & 1)
        tl.store(main, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)
    else:
        tl.store(main, value, mask=inside)
        rounded = round_bits(bits, now, F)
    tl.store(param, rounded.to(param.dtype.element_ty), mask=inside)


@triton.jit
def adamw(main, grad, exp_avg, exp_avg_sq, update, AVERAGE_FROM_GRAD: tl.constexpr):
    """One step of FP32 values: (main, exp_avg, exp_avg_sq) after it."""
    decay, average, beta2, square, root, eps, minus_step = update
    m = tl.fma(grad - exp_avg, average + tl.zeros_like(grad), grad if AVERAGE_FROM_GRAD else exp_avg)
    v = tl.fma(square * grad, grad, exp_avg_sq * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(v), root + tl.zeros_like(v)) + eps
    return main * decay + tl.div_rn(minus_step * m, denominator), m, v


@triton.jit
def join(param, remainder, last, LAST_STOCHASTIC: tl.constexpr):
    """FP32 main params from the patterns of BF16 params and int16 remainders."""
    high = param.to(tl.uint32)
    low = remainder.to(tl.uint16, bitcast=True).to(tl.uint32)
    if LAST_STOCHASTIC:
        up = tl.where((high & 0x7F80) == 0x7F80, 0, (low + (last >> 16)) >> 16)
    else:
        up = low >> 15
    return (((high - up) << 16) | low).to(tl.float32, bitcast=True)


@triton.jit
def saturate_at_bf16(bits):
    """Finite values beyond the largest BF16 number become it."""
    magnitude = bits & 0x7FFFFFFF
    return tl.where((magnitude > 0x7F7F0000) & (magnitude < 0x7F800000), (bits & 0x80000000) | 0x7F7F0000, bits)


def step_table_(table: AdamWTable, update: Update, last_step: int | None) -> None:
    """AdamW and rounding of every piece."""
    _launch(table, table.state_addresses(), update, table.grads[0].dtype, last_step)


def recode_table_(table: PieceTable, last_step: int | None) -> None:
    """Round main params held as (params, remainders) again."""
    nothing = Update(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False)
    _launch(table, None, nothing, None, last_step)


def _launch(table: PieceTable, extra, update: Update, grad: torch.dtype | None, last_step: int | None) -> None:
    where = table.dst[0].device
    device.check_device(where)
    if not len(table.rows):
        return
    remainders = table.src[0].dtype == torch.int16
    launch = _tables.get(table, where, extra)
    with device.guard(where):
        for (dtype, scattered), chunks in launch.chunks.items():
            rounding = device.rounding(table.format, dtype, table.stochastic, device.use_cvt_rs(where))
            adamw_chunks[(len(chunks),)](
                **arguments(
                    launch.pieces, chunks, launch.step, last_step, update, rounding, dtype, grad, remainders, scattered
                )
            )


def arguments(
    pieces,
    chunks,
    step: int,
    last_step: int | None,
    update: Update,
    rounding: device.Rounding,
    dtype: torch.dtype,
    grad: torch.dtype | None,
    remainders: bool,
    scattered: bool,
) -> dict:
    """What `adamw_chunks` is launched with. pieces, chunks: tensors, or stand-ins (tools/compile_gpu.py)."""
    return dict(
        pieces=pieces,
        chunks=chunks,
        step=signed(step),
        last_step=signed(last_step or 0),
        **update._asdict(),
        F=rounding,
        STORAGE=device.unsigned(dtype),
        GRAD={torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, None: None}[grad],
        REMAINDERS=remainders,
        LAST_STOCHASTIC=last_step is not None,
        SCATTERED=scattered,
        BLOCK=device.BLOCK,
        CHUNK=CHUNK,
        num_warps=device.NUM_WARPS,
        enable_fp_fusion=False,
    )
