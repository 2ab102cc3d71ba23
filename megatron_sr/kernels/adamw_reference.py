"""The specification of the fused step and of 16-bit remainders, in plain torch, on any device.

Every operation below rounds once, to the nearest FP32 number. `fma(a, b, c)` rounds a * b + c once: torch's own CPU
kernels for lerp and addcmul do so wherever the processor has AVX2, so the moments equal torch.optim.AdamW's bit for bit
there. The square root is the correctly rounded one; torch's may be off by one ulp (MKL), see docs/numerics.md.

    main <- main * decay
    m    <- fma(average, g - m, m)           beta1 <= 0.5: fma(average, g - m, g)
    v    <- fma(square * g, g, v * beta2)
    main <- main + (minus_step * m) / (sqrt(v) / root + eps)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_sr.formats import BF16
from megatron_sr.kernels import reference
from megatron_sr.kernels.adamw import AdamWTable, Update
from megatron_sr.kernels.table import GLOBAL_START, KEY, LENGTH, RUN, STEP, STRIDE, PieceTable
from megatron_sr.noise import U32, random_words, signed

LARGEST = 0x7F7F0000  # bits of the largest BF16 number


def step_table_(table: AdamWTable, update: Update, last_step: int | None) -> None:
    """AdamW and rounding of every piece."""
    for tensor, here, draws in parts(table):
        param, main, grad, exp_avg, exp_avg_sq = (
            t[tensor].detach().view(-1)[here]
            for t in (table.dst, table.src, table.grads, table.exp_avgs, table.exp_avg_sqs)
        )
        if table.remainders:
            remainder, main = main, join(param, main, draws(last_step))
        update_(main, grad.float(), exp_avg, exp_avg_sq, update)
        now = draws(None if not table.stochastic else table.rows[0, STEP], table.format.random_bits)
        if table.remainders:
            split_(param, remainder, main, now)
        else:
            reference.store_codes_(param, *reference.round_codes(main, table.format, now), table.format)


def recode_table_(table: PieceTable, last_step: int | None) -> None:
    """Round main params held as (params, remainders) again. `last_step` None: they are in nearest form."""
    for tensor, here, draws in parts(table):
        param, remainder = (t[tensor].detach().view(-1)[here] for t in (table.dst, table.src))
        main = join(param, remainder, draws(last_step))
        split_(param, remainder, main, draws(table.rows[0, STEP] if table.stochastic else None))


def update_(main, grad, exp_avg, exp_avg_sq, u: Update) -> None:
    """One AdamW step of FP32 tensors of one shape, in place."""
    main.mul_(u.decay)
    exp_avg.copy_(fma(grad - exp_avg, u.average, grad if u.average_from_grad else exp_avg))
    exp_avg_sq.copy_(fma(grad * u.square, grad, exp_avg_sq * u.beta2))
    root = exp_avg_sq.double().sqrt().float()  # rounding twice is harmless here: 53 >= 2 * 24 + 2 bits
    main.add_((exp_avg * u.minus_step) / (root / u.root + u.eps))


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in FP32, rounded once. a, c: FP32 tensors, b: one too, or a number that FP32 holds.

    The product is exact in double precision. The sum is not: rounding it to odd keeps the second rounding right
    (Boldo, Melquiond: "Emulation of a FMA and correctly rounded sums", IEEE TC 2008).
    """
    product, addend = a.double() * (b.double() if isinstance(b, torch.Tensor) else b), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact: Knuth's two-sum
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)  # whether the exact sum's magnitude is above or below the rounded one's
    odd = torch.where(away, bits, bits - 1) | 1
    fix = (error != 0) & total.isfinite() & (bits & 1 == 0)
    return torch.where(fix, odd, bits).view(torch.float64).float()


def join(param: torch.Tensor, remainder: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
    """FP32 main params from BF16 params and int16 remainders. `draws` None: the params are in nearest form."""
    high, low = (t.view(torch.int16).to(torch.int64) & 0xFFFF for t in (param, remainder))
    up = low >> 15 if draws is None else torch.where(high & 0x7F80 == 0x7F80, 0, (low + draws) >> 16)
    return (((high - up) & 0xFFFF) << 16 | low).to(torch.int32).view(torch.float32)


def split_(param: torch.Tensor, remainder: torch.Tensor, main: torch.Tensor, draws: torch.Tensor | None) -> None:
    """The inverse of `join`: writes BF16 params and int16 remainders.

    draws None: Transformer Engine's nearest form, without loss. Otherwise finite main params beyond the largest BF16
    number saturate there first.
    """
    bits = main.view(torch.int32).to(torch.int64) & U32
    if draws is None:
        param.view(torch.int16).copy_(((bits >> 16) + (bits >> 15 & 1)) & 0xFFFF)
    else:
        magnitude = bits & 0x7FFFFFFF
        bits = torch.where((magnitude > LARGEST) & (magnitude < 0x7F800000), bits & 0x80000000 | LARGEST, bits)
        kept = bits.to(torch.int32).view(torch.float32)
        reference.store_codes_(param, *reference.round_codes(kept, BF16, draws), BF16)
    remainder.copy_(bits & 0xFFFF)


def parts(table: PieceTable) -> Iterator[tuple]:
    """(tensor, elements, draws) for each part of each piece; draws(step, bits=16) gives their draws, None for None."""
    for row, tensor, offset in zip(table.rows.tolist(), table.tensor.tolist(), table.offset.tolist()):
        key = row[KEY] & U32, row[KEY] >> 32
        for at in range(0, row[LENGTH], reference.CHUNK):
            i = torch.arange(at, min(at + reference.CHUNK, row[LENGTH]), device=table.dst[tensor].device)
            index = (i // row[RUN]) * row[STRIDE] + i % row[RUN] + signed(row[GLOBAL_START])

            def draws(step, bits=16, key=key, index=index):
                return None if step is None else random_words(key, int(step), index, bits)

            yield tensor, slice(offset + at, offset + at + len(i)), draws
