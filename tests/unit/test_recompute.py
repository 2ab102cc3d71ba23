"""Recomputing model params from main params: against `round_to_`, for every kind of configuration, and what a mismatch says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sr import Noise, ParamRounding, mxfp8, round_to_
from megatron_sr.coordinates import Segment
from megatron_sr.megatron.recompute import Mismatch, Piece, count_differing, listing, mismatches, rounded

KEY = "decoder.layers.mlp.linear_fc1.weight"


def piece(numel: int = 64, start: int = 10, dtype=torch.bfloat16, seed: int = 0, key: str = KEY) -> Piece:
    main = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) / 50
    return Piece(key, [Segment(0, numel, start)], torch.zeros(numel, dtype=dtype), main)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**40),
    numel=st.integers(1, 200),
    format=st.sampled_from([("bf16", torch.bfloat16), ("fp16", torch.float16), ("e8m4", torch.bfloat16), (None, torch.float16)]),
    noise=st.sampled_from(["step", "fixed"]),
)  # fmt: skip
def test_rounded_is_round_to_of_the_same_elements(seed, step, start, numel, format, noise):
    name, dtype = format
    p = piece(numel, start, dtype)
    config = ParamRounding(seed=seed, format=name, noise=noise)
    expected = torch.empty(numel, dtype=dtype)
    draw = Noise(seed, 0 if noise == "fixed" else step, KEY)
    round_to_(expected, p.main, noise=draw, format=name or "fp16", start=start, backend="reference")
    assert torch.equal(rounded(p, config, step).view(torch.int16), expected.view(torch.int16))
    assert not p.model.any()  # nothing is written


@pytest.mark.parametrize(
    "config, expected",
    [
        (ParamRounding(mode="nearest"), lambda main: main.bfloat16()),
        (ParamRounding(exclude=("*fc1*",)), lambda main: main.bfloat16()),
        (ParamRounding(include=("*norm*",)), lambda main: main.bfloat16()),
        (ParamRounding(mode="nearest", format="e8m4"), lambda main: round_to_(torch.empty(64, dtype=torch.bfloat16), main, format="e8m4")),
    ],
)  # fmt: skip
def test_nearest_and_excluded_tensors_are_rounded_to_nearest(config, expected):
    p = piece()
    assert torch.equal(rounded(p, config, 3), expected(p.main))


def test_mxfp8_model_params_start_from_the_bf16_rounding():
    p = piece()
    assert torch.equal(rounded(p, ParamRounding(format="mxfp8"), 3), rounded(p, ParamRounding(format="bf16"), 3))


@pytest.mark.parametrize("scaling", ["1d", "2d"])
def test_mxfp8_values_of_a_matrix_are_recognised(scaling):
    """A checkpoint holds BF16 params with MXFP8 values for linear layers, plain BF16 ones for norms: either is right."""
    config, shape = ParamRounding(seed=2, format="mxfp8", mxfp8_scaling=scaling), (1, 32, 64)
    p = piece(32 * 64)._replace(segments=[Segment(0, 32 * 64, 0)], shape=shape)
    first = rounded(p, config, 3)
    blocks = mxfp8.quantize(
        first.view(32, 64), noise=Noise(2, 3, KEY, stream=1), segments=p.segments, tile=scaling == "2d", min_scale=3
    )
    values = blocks.dequantize(torch.bfloat16).view(-1)
    assert count_differing(first, values)
    for model in (first, values):
        assert mismatches([p._replace(model=model)], config, 3) == []
    values.view(torch.int16)[5] ^= 1
    assert mismatches([p._replace(model=values)], config, 3) == [Mismatch(KEY, 1, 32 * 64)]


def test_mismatches_name_the_tensors_and_count_over_their_pieces():
    config, step = ParamRounding(seed=3), 5
    pieces = []
    for key, start in ((KEY, 0), (KEY, 64), ("b.weight", 0), ("a.weight", 0)):
        p = piece(start=start, seed=start, key=key)
        pieces.append(p._replace(model=rounded(p, config, step)))
    assert mismatches(pieces, config, step) == []
    pieces[0].model.view(torch.int16)[7] ^= 1
    pieces[1].model.view(torch.int16)[:2] ^= 1
    pieces[3].model.view(torch.int16)[0] ^= 1
    assert mismatches(pieces, config, step) == [Mismatch("a.weight", 1, 64), Mismatch(KEY, 3, 128)]
    assert len(mismatches(pieces, config, step + 1)) == 3  # another step is another draw


def test_bits_are_compared_not_values():
    zeros = torch.zeros(2, dtype=torch.bfloat16)
    assert count_differing(zeros, -zeros) == 2
    nan = torch.full((3,), torch.nan)
    assert count_differing(nan, nan.clone()) == 0


def test_listing_shows_the_first_and_counts_the_rest():
    wrong = [Mismatch(f"t{i}", 1, 1000) for i in range(5)]
    assert listing(wrong) == "t0 (1 of 1,000 elements), t1 (1 of 1,000 elements), t2 (1 of 1,000 elements) and 2 more"
    assert listing([Mismatch("t")]) == "t"
