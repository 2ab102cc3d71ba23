"""Noise shows no dependence between neighbouring elements, tensors, steps, streams and seeds.

Every statistic below is compared with a bound that ideal random bits exceed with a probability below 1e-9 (6 standard deviations, or the
matching chi-square quantile). Some 150 statistics are computed, so ideal bits would fail this file with a probability below 1e-6; the
seeds are fixed, so it never fails by chance from one run to the next.
"""

import math

import pytest
import torch

from megatron_sr import Noise, random_bits, round_to_

COUNT = 1 << 18
SIGMAS = 6.0
BASE = Noise(seed=42, step=100, key="decoder.layers.0.mlp.linear_fc1.weight")
RELATED = {
    "next step": Noise(42, 101, BASE.key),
    "far step": Noise(42, 100 + 2**32, BASE.key),
    "next layer": Noise(42, 100, "decoder.layers.1.mlp.linear_fc1.weight"),
    "other tensor": Noise(42, 100, "w"),
    "next seed": Noise(43, 100, BASE.key),
    "far seed": Noise(42 + 2**63, 100, BASE.key),
    "next stream": Noise(42, 100, BASE.key, stream=1),
    "seed and stream swapped": Noise(0, 100, BASE.key, stream=42),
}


def chi_square_bound(freedom: int) -> float:
    """The Wilson-Hilferty quantile at 6 sigma."""
    a = 2 / (9 * freedom)
    return freedom * (1 - a + SIGMAS * math.sqrt(a)) ** 3


def assert_uniform(cells: torch.Tensor, kinds: int) -> None:
    """Chi-square test that `cells`, values 0 .. kinds - 1, are equally frequent."""
    counts = torch.bincount(cells.flatten(), minlength=kinds).double()
    expected = cells.numel() / kinds
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(kinds - 1)


def assert_uncorrelated(a: torch.Tensor, b: torch.Tensor, bits: int) -> None:
    """Correlation of the values, of each pair of equal bit positions, and chi-square of the joint top and bottom four bits."""
    n = a.numel()
    x, y = (v.double() / 2**bits - 0.5 for v in (a, b))
    assert abs((x * y).mean() * 12) < SIGMAS / math.sqrt(n)
    for position in range(bits):
        differ = ((a ^ b) >> position & 1).double().mean()
        assert abs(differ - 0.5) < SIGMAS * 0.5 / math.sqrt(n)
    for shift in (0, bits - 4):
        assert_uniform((a >> shift & 15) * 16 + (b >> shift & 15), 256)


@pytest.mark.parametrize("bits", [16, 32])
def test_draws_are_uniform(bits):
    drawn = random_bits(BASE, 0, COUNT, bits).long()
    for shift in range(0, bits, 8):
        assert_uniform(drawn >> shift & 255, 256)
    assert_uniform(drawn >> (bits - 12), 4096)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 64, 4096])
def test_neighbouring_elements_are_independent(lag, bits):
    drawn = random_bits(BASE, 0, COUNT, bits).long()
    assert_uncorrelated(drawn[:-lag], drawn[lag:], bits)


@pytest.mark.parametrize("other", RELATED.values(), ids=RELATED.keys())
def test_tensors_steps_streams_and_seeds_are_independent(other):
    assert_uncorrelated(random_bits(BASE, 0, COUNT).long(), random_bits(other, 0, COUNT).long(), 16)


def test_bf16_draws_and_the_second_rounding_are_independent():
    """MXFP8 draws 32 bits from stream 1 after BF16 drew 16 bits from stream 0."""
    second = random_bits(RELATED["next stream"], 0, COUNT, 32)
    assert_uncorrelated(random_bits(BASE, 0, COUNT).long(), second >> 16, 16)


def test_rounding_is_unbiased_over_steps():
    """The mean over steps of a rounded tensor is the tensor: each element's mean has variance p (1 - p) / steps."""
    x = torch.linspace(1, 1 + 2**-7, 4097)[:-1]  # all fractions i / 4096 of one BF16 spacing
    steps = 400
    ups = torch.zeros(4096)
    dst = torch.empty(4096, dtype=torch.bfloat16)
    for step in range(steps):
        ups += round_to_(dst, x, noise=Noise(1, step, "mean")).float() > 1
    p = torch.arange(4096).double() / 4096
    deviation = (ups.double() - steps * p).sum() / (steps * p * (1 - p)).sum().sqrt()
    assert abs(deviation) < SIGMAS
    # The squared deviations of the elements in the middle have mean 1 and variance about 2: no element drifts.
    middle = slice(1024, 3072)
    squared = ((ups.double() - steps * p) ** 2 / (steps * p * (1 - p)))[middle]
    assert abs(squared.mean() - 1) < SIGMAS * math.sqrt(2 / 2048)
