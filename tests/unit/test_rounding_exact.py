"""C3 and C4 on the specification (kernels/reference.py), against the scalar oracle and by enumeration."""

import math

import numpy as np
import pytest
import torch

from megatron_sr import Noise, formats, random_bits, round_to_
from megatron_sr.kernels.reference import round_codes, store_codes_
from tests import oracle
from tests.unit.values import adversarial, bf16_patterns, bits_of, from_bits, random_patterns

ELEMENT_FORMATS = [f for f in formats.FORMATS.values() if f.block_size == 1]
STORED = [(f, dtype) for f in ELEMENT_FORMATS for dtype in f.storage if dtype != torch.uint8]
all_formats = pytest.mark.parametrize("format", ELEMENT_FORMATS, ids=lambda f: f.name)
all_storages = pytest.mark.parametrize("format, dtype", STORED, ids=lambda v: getattr(v, "name", str(v)))


def rounded(x: torch.Tensor, format, dtype, draws: torch.Tensor | None) -> torch.Tensor:
    """x on the format's grid in its storage; the draws are chosen by the test. None: nearest."""
    dst = torch.empty(x.shape, dtype=dtype)
    store_codes_(dst, *round_codes(x, format, draws), format)
    return dst


def same(a: float, b: float) -> bool:
    """Equal as numbers, with the sign of zero; any two NaN of one sign."""
    return (a == b or (math.isnan(a) and math.isnan(b))) and math.copysign(1, a) == math.copysign(1, b)


def sample(seed: int) -> torch.Tensor:
    """About 1200 inputs out of the adversarial ones, all named ones included, and random patterns."""
    x = adversarial()
    thin = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:600]
    return torch.cat([x[thin], x[-50:], x[len(x) // 2 - 50 : len(x) // 2], random_patterns(500, seed)])


@all_storages
@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_reference_equals_the_exact_oracle(format, dtype, mode):
    x = sample(seed=format.mantissa_bits)
    noise = Noise(11, 12, "oracle") if mode == "stochastic" else None
    draws = random_bits(noise, 3, len(x), format.random_bits).tolist() if noise else [None] * len(x)
    dst = round_to_(torch.empty(len(x), dtype=dtype), x, noise=noise, format=format, start=3, backend="reference")
    for value, draw, got in zip(x.tolist(), draws, dst.double().tolist()):
        expected = oracle.round_value(value, format, draw)
        assert same(got, expected), f"{value.hex()} with draw {draw}: {got}, not {expected}"


def test_c3_bf16_probability_is_exact_for_every_random_word():
    """All 65,536 words on inputs of every kind: the number that round up is the discarded 16 bits, as an integer."""
    low = [0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF]
    tops = [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3C23, 0xBC23, 0x3F80, 0x3FFF, 0x7F7E, 0xFF7E]
    draws = torch.arange(65536)
    for top in tops:
        for discarded in low:
            x = from_bits(np.full(65536, top << 16 | discarded))
            code = bits_of(rounded(x, formats.BF16, torch.bfloat16, draws))
            assert set(code.tolist()) <= {top, top + 1}
            assert (code == top + 1).sum().item() == discarded
            assert torch.equal(code == top + 1, draws >= 65536 - discarded)


@all_formats
def test_c3_exact_thresholds(format):
    """Round up starts exactly at draw = 2**R * (1 - fraction): checked one below, at, and at both ends, so P(up) = fraction."""
    span = 2**format.random_bits
    for x in sample(seed=100 + format.mantissa_bits).tolist():
        if not math.isfinite(x) or not format.exact_from <= abs(x) < format.max_finite:
            continue
        below, spacing = oracle.neighbours(x, format)
        fraction = (oracle.Fraction(abs(x)) - below) / spacing
        ups = fraction * span  # how many of the draws round up
        assert ups.denominator == 1, f"{x.hex()}: P(up) = {fraction} is not a multiple of 1/{span}"
        first_up = span - int(ups)
        draws = sorted({0, first_up - 1, min(first_up, span - 1), span - 1} - {-1})
        got = rounded(torch.full((len(draws),), x), format, format.storage[-1], torch.tensor(draws))
        if got.dtype == torch.uint8:
            got = got.view(torch.float8_e4m3fn)
        for draw, value in zip(draws, got.double().abs().tolist()):
            assert value == float(below + spacing if draw >= first_up else below)


@pytest.mark.parametrize("format", [formats.FP16, formats.E4M3], ids=lambda f: f.name)
def test_c3_deep_subnormals_fall_short_of_the_fraction_by_less_than_two_to_minus_32(format):
    """More discarded bits than random ones: P(up) is the fraction cut to 32 bits, and 0 below 2**-32 of the spacing."""
    spacing = format.smallest_subnormal
    for exponent in (-1, -8, -20, -31, -32, -33, -60):
        x = torch.tensor([1.99999988 * 2.0**exponent * spacing])
        ups = oracle.Fraction(x.item()) / oracle.Fraction(spacing) * 2**32 // 1
        assert (
            0
            <= oracle.Fraction(x.item()) / oracle.Fraction(spacing) - oracle.Fraction(ups, 2**32)
            < oracle.Fraction(1, 2**32)
        )
        for draw, up in ((2**32 - ups - 1, False), (2**32 - ups, True)):
            if draw < 2**32:
                got = rounded(x, format, format.storage[0], torch.tensor([draw])).double().item()
                assert got == (spacing if up else 0.0)


@all_storages
def test_c3_representable_values_are_fixed_points_for_all_draws(format, dtype):
    codes = torch.arange(format.max_code + 1)
    codes = (
        codes
        if len(codes) <= 2**16
        else codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(1))[:4096]]
    )
    values = torch.empty(len(codes), dtype=dtype)
    store_codes_(values, torch.zeros_like(codes), codes, format)
    values = torch.cat([values.double(), -values.double()]).float()  # -0.0 is among them
    top = 2**format.random_bits - 1
    for draws in (
        None,
        torch.zeros(len(values), dtype=torch.int64),
        torch.full((len(values),), top),
        torch.arange(len(values)) * 977 % top,
    ):
        got = rounded(values, format, dtype, draws)
        assert torch.equal(bits_of(got.float()), bits_of(values))


def test_c3_all_bf16_patterns_unchanged_and_every_nan_stays_nan():
    x = bf16_patterns()
    for draw in (None, 0, 1, 0x8000, 0xFFFF):
        draws = None if draw is None else torch.full((65536,), draw)
        got = bits_of(rounded(x, formats.BF16, torch.bfloat16, draws))
        quiet = torch.where(x.isnan(), 0x40, 0)  # sign and payload kept, quiet bit set
        assert torch.equal(got, torch.arange(65536) | quiet)


@all_storages
def test_c3_nan_keeps_its_sign_and_its_top_payload_bits(format, dtype):
    patterns = np.array(
        [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FFF8C22, 0x7FA00000, 0x7F812345, 0x7FD55555], dtype=np.uint32
    )
    for draws in (None, torch.full((7,), 2**format.random_bits - 1)):
        positive, negative = (rounded(from_bits(p), format, dtype, draws) for p in (patterns, patterns | 0x80000000))
        assert positive.double().isnan().all()
        sign = 1 << (8 * positive.element_size() - 1)
        assert torch.equal(bits_of(negative), bits_of(positive) | sign)
        if format.infinity:
            m, shift = format.mantissa_bits, format.storage_shift(dtype)
            mantissa = torch.from_numpy((patterns & 0x7FFFFF).astype(np.int64)) >> (23 - m) | 1 << (m - 1)
            assert torch.equal(bits_of(positive) >> shift & (1 << m) - 1, mantissa)
        else:
            assert (bits_of(positive) == 0x7F).all()


@all_storages
def test_c3_finite_never_becomes_infinite_and_infinity_stays(format, dtype):
    flt_max = torch.finfo(torch.float32).max
    x = torch.tensor([flt_max, -flt_max, format.max_finite * 1.0000001, math.inf, -math.inf])
    got = rounded(x, format, dtype, torch.full((5,), 2**format.random_bits - 1)).double()
    top, end = format.max_finite, math.inf if format.infinity else format.max_finite
    assert got.tolist() == [top, -top, top, end, -end]


@all_formats
def test_c3_results_are_neighbours_and_keep_the_sign(format):
    x = torch.cat([adversarial(), random_patterns(50_000, 5)])
    x = x[x.isfinite() & (x.abs() < format.max_finite)]
    dtype = format.storage[0]
    down, up = (rounded(x, format, dtype, torch.full(x.shape, d)).double() for d in (0, 2**format.random_bits - 1))
    drawn = round_to_(
        torch.empty(x.shape, dtype=dtype), x, noise=Noise(1, 1, "n"), format=format, backend="reference"
    ).double()
    assert ((drawn == down) | (drawn == up)).all()
    assert (down.abs() <= x.double().abs()).all()
    assert (up.abs() >= down.abs()).all()
    exact = down == x.double()
    assert torch.equal(up[exact], down[exact])
    assert torch.equal(drawn.signbit(), x.signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_c4_nearest_equals_torch(dtype):
    """Bit for bit; but torch gives BF16 NaN as 0xffff or 0x7fc0, depending on its code path, so there we require NaN."""
    format = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}[dtype]
    x = torch.cat([adversarial(), bf16_patterns(), random_patterns(200_000, 6), torch.randn(10_000)])
    for backend in ("reference", "cpu"):
        got = round_to_(torch.empty(x.shape, dtype=dtype), x, format=format, backend=backend)
        if dtype == torch.bfloat16:
            assert got[x.isnan()].isnan().all()
            got, wanted = got[~x.isnan()], x[~x.isnan()].to(dtype)
        else:
            wanted = x.to(dtype)
        assert torch.equal(bits_of(got), bits_of(wanted))
