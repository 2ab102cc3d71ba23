import math

import numpy as np
import pytest
import torch

from megatron_sr import Noise, Segment, mxfp8, round_to_
from tests.unit.values import from_bits, random_patterns

NOISE = Noise(seed=1, step=2, key="w", stream=1)
AXES = pytest.mark.parametrize("axis", [-1, 0])


def te_scale(amax: np.float32) -> int:
    """Transformer Engine's `float_to_e8m0(amax * max_norm_rcp)`, transcribed with its own branches."""
    value = np.float32(amax) * np.uint32(0x3B124925).view(np.float32)
    if np.isnan(value):
        return 0xFF
    if np.isinf(value):
        return 0xFE
    if value == 0:
        return 0
    bits = int(value.view(np.uint32))
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if mantissa > 0 and exponent != 0xFE and not (exponent == 0 and mantissa <= 0x400000):
        exponent += 1
    return exponent


def wide(shape, seed=0):
    """FP32 of many magnitudes, blocks of zeros among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 30, shape, generator=g).float())
    x[:32, :32] = 0
    return x


def test_scale_equals_transformer_engine():
    named = [
        0,
        1,
        0x400000,
        0x400001,
        0x7FFFFF,
        0x800000,
        0x43E00000,
        0x43E00001,
        0x43DFFFFF,
        0x7F7FFFFF,
        0x7F800000,
        0x7FC00000,
    ]
    powers = [(e << 23) + d for e in range(1, 255) for d in (0, 1, 0x600000, 0x600001)]
    amax = torch.cat([from_bits(named + powers), random_patterns(20_000, 3).abs()])
    with np.errstate(all="ignore"):
        wanted = [te_scale(a) for a in amax.numpy()]
    assert mxfp8.block_scale(amax).tolist() == wanted


@AXES
def test_blocks_lie_along_the_axis_and_ignore_nan(axis):
    x = wide((64, 96))
    x[40, 50] = math.nan
    quantized = mxfp8.quantize(x, axis=axis)
    assert quantized.scale.shape == ((64, 3) if axis == -1 else (2, 96))
    for i in (0, 1, 40, 63):
        for j in (0, 33, 50, 95):
            block = x[i, j // 32 * 32 :][:32] if axis == -1 else x[i // 32 * 32 :, j][:32]
            scale = quantized.scale[i, j // 32] if axis == -1 else quantized.scale[i // 32, j]
            assert scale == te_scale(np.nanmax(block.abs().numpy()))
    assert quantized.data[40, 50] & 0x7F == 0x7F
    assert quantized.dequantize()[40, 50].isnan()
    assert quantized.dequantize().isnan().sum() == 1


@AXES
def test_nearest_is_the_saturating_cast_of_the_scaled_values(axis):
    x = wide((64, 96))
    quantized = mxfp8.quantize(x, axis=axis)
    scale = torch.exp2(quantized.scale.double() - 127).repeat_interleave(32, dim=axis)
    wanted = (x.double() / scale).float().to(torch.float8_e4m3fn)
    assert torch.equal(quantized.data, wanted.view(torch.uint8))
    assert torch.equal(quantized.dequantize().double(), wanted.double() * scale)


@AXES
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_c3_stochastic_results_are_neighbours_and_never_past_448(axis, backend):
    x = wide((64, 96), seed=1)
    x[7] = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))  # scaled to just above 448
    quantized = mxfp8.quantize(x, noise=NOISE, axis=axis, backend=backend)
    assert (quantized.data & 0x7F).max() == 0x7E
    scale = torch.exp2(quantized.scale.double() - 127).repeat_interleave(32, dim=axis)
    scaled = (x.double() / scale).clamp(-448, 448)
    got = quantized.data.view(torch.float8_e4m3fn).double()
    spacing = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    assert ((got - scaled).abs() < spacing).all()
    grid = scaled == scaled.float().to(torch.float8_e4m3fn).double()
    assert torch.equal(got[grid], scaled[grid])
    assert torch.equal(quantized.data >> 7 == 1, x.signbit())


@AXES
def test_c1_backends_agree_on_data_and_scale(axis):
    x = random_patterns(64 * 128, 9).view(64, 128)
    a, b = (mxfp8.quantize(x, noise=NOISE, axis=axis, backend=name) for name in ("reference", "cpu"))
    assert torch.equal(a.data, b.data)
    assert torch.equal(a.scale, b.scale)


def test_row_and_column_copies_share_their_noise():
    """Where both copies have the same scale they have the same code."""
    x = torch.randn(128, 128)
    rows, columns = (mxfp8.quantize(x, noise=NOISE, axis=axis) for axis in (-1, 0))
    equal_scale = rows.scale.repeat_interleave(32, 1) == columns.scale.repeat_interleave(32, 0)
    assert 0.3 < equal_scale.float().mean() < 0.95
    assert torch.equal(rows.data[equal_scale], columns.data[equal_scale])


def test_c2_shards_quantize_as_the_whole():
    x = torch.randn(64, 128)
    whole = mxfp8.quantize(x, noise=NOISE)
    top = mxfp8.quantize(x[:32], noise=NOISE)
    right = mxfp8.quantize(x[:, 64:], noise=NOISE, segments=[Segment(0, 64 * 64, 64, 128, 64)])
    assert torch.equal(top.data, whole.data[:32])
    assert torch.equal(right.data, whole.data[:, 64:])
    assert torch.equal(right.scale, whole.scale[:, 2:])


def test_bf16_input_and_bf16_output_are_exact():
    x = torch.randn(32, 64).bfloat16()
    quantized = mxfp8.quantize(x, noise=NOISE)
    assert torch.equal(quantized.data, mxfp8.quantize(x.float(), noise=NOISE).data)
    assert torch.equal(quantized.dequantize(torch.bfloat16).float(), quantized.dequantize())


def test_three_dimensional_tensors():
    """Stacked experts: blocks along the last axis of each, or along the first."""
    x = torch.randn(32, 8, 64)
    rows = mxfp8.quantize(x, noise=NOISE)
    assert rows.scale.shape == (32, 8, 2)
    assert torch.equal(rows.data[0], mxfp8.quantize(x[0], noise=NOISE).data)
    columns = mxfp8.quantize(x, noise=NOISE, axis=0)
    assert columns.scale.shape == (1, 8, 64)
    flat = mxfp8.quantize(x.view(32, -1), noise=NOISE, axis=0)
    assert torch.equal(columns.data.view(32, -1), flat.data)


def test_infinity_saturates_and_zero_stays():
    x = torch.zeros(1, 64)
    x[0, 3], x[0, 40] = math.inf, -0.0
    quantized = mxfp8.quantize(x, noise=NOISE)
    assert quantized.scale.tolist() == [[0xFE, 0]]
    assert quantized.data[0, 3] == 0x7E
    assert quantized.data[0, 40] == 0x80
    assert (quantized.data[0, 41:] == 0).all()


@AXES
@pytest.mark.parametrize("shape", [(32, 32), (96, 160), (256, 4096), (160, 288)])
def test_padded_and_swizzled_layouts_convert_back(shape, axis):
    scale = mxfp8.quantize(torch.randn(shape), axis=axis).scale
    padded = mxfp8.pad_scale(scale, axis)
    tile = (128, 4) if axis == -1 else (4, 128)
    assert [n % t for n, t in zip(padded.shape, tile)] == [0, 0]
    assert padded.sum(dtype=torch.int64) == scale.sum(dtype=torch.int64)
    swizzled = mxfp8.swizzle_scale(padded, axis)
    assert swizzled.shape == padded.shape
    assert torch.equal(mxfp8.unswizzle_scale(swizzled, axis), padded)
    assert torch.equal(mxfp8.unpad_scale(padded, shape, axis), scale)


@AXES
def test_swizzled_bytes_lie_where_transformer_engine_looks(axis):
    """cast/mxfp8/swizzle.cuh, `gemm_swizzled_scale_idx(i, j, num_tiles_X)`."""
    rows, blocks = 256, 12
    matrix = torch.randint(0, 255, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flat = mxfp8.swizzle_scale(matrix if axis == -1 else matrix.t().contiguous(), axis).flatten()
    for i, j in [(0, 0), (1, 0), (33, 2), (127, 3), (128, 4), (200, 11), (255, 11)]:
        index = (i // 128 * (blocks // 4) + j // 4) * 512 + (i % 128 % 32) * 16 + (i % 128 // 32) * 4 + j % 4
        assert flat[index] == matrix[i, j]


@pytest.mark.parametrize(
    "x, kwargs, error, message",
    [
        (torch.zeros(32, 33), {}, ValueError, r"axis -1 of shape \(32, 33\) must be divisible by the block size 32"),
        (torch.zeros(31, 32), {"axis": 0}, ValueError, r"axis 0 of shape \(31, 32\) must be divisible"),
        (torch.zeros(()), {}, ValueError, "must be divisible"),
        (torch.zeros(32, 32), {"axis": 1}, ValueError, "axis is 1; MXFP8 blocks lie along the last axis"),
        (
            torch.zeros(32, dtype=torch.float64),
            {},
            TypeError,
            "x must be a float32 or bfloat16 tensor, not torch.float64",
        ),
        (torch.zeros(32), {"segments": [Segment(0, 33, 0)]}, ValueError, "segments of x: segments cover .* of 32"),
    ],
)
def test_c6_quantize_refuses(x, kwargs, error, message):
    with pytest.raises(error, match=message):
        mxfp8.quantize(x, noise=NOISE, **kwargs)


FLOWS = {"RN/RN": (False, False), "SR/RN": (True, False), "RN/SR": (False, True), "SR/SR": (True, True)}
DRAWS = 400


def flow_errors(w, flow, draws=DRAWS):
    """Yield, for each draw, the error of FP32 `w` -> BF16 -> MXFP8 in FP64. flow: stochastic or not, for either rounding."""
    bf16 = torch.empty(w.shape, dtype=torch.bfloat16)
    for step in range(draws):
        first, second = (Noise(1, step, "w", stream) if on else None for stream, on in enumerate(flow))
        round_to_(bf16, w, noise=first)
        yield mxfp8.quantize(bf16, noise=second, min_scale=mxfp8.BF16_MIN_SCALE).dequantize().double() - w.double()


def spacing(w):
    """The distance of neighbouring MXFP8 numbers around each element of `w`, FP64."""
    scale = torch.exp2(mxfp8.quantize(w, min_scale=3).scale.double() - 127).repeat_interleave(32, dim=1)
    return torch.exp2(torch.floor(torch.log2((w.double() / scale).abs().clamp(min=2.0**-6))) - 3) * scale


def hard_blocks():
    """FP32 [64, 64] by name: what shards, scales and E4M3's subnormals make hard."""
    normal = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    edge = normal.clamp(-0.01, 0.01)
    # The largest magnitude lies just below 448 * 2**-15, between two BF16 numbers: the first rounding decides on the scale.
    edge[:, ::32] = torch.nextafter(torch.tensor(448 * 2.0**-15 * (1 + 2.0**-9)), torch.tensor(0.0))
    zero = normal.clone()
    zero[:32] = 0
    outlier = normal * 1e-4
    outlier[:, 7::32] = 1.0  # everything else falls among E4M3's subnormals under this scale
    return {
        "normal": normal,
        "amax at a binade edge": edge,
        "all-zero blocks": zero,
        "one outlier in a block": outlier,
        "tiny blocks": normal * 2.0**-125,  # below the smallest scale; some weights are BF16's subnormals
        "large blocks": normal * 2.0**120,
    }


@pytest.mark.parametrize("name", list(hard_blocks()))
def test_point2_mxfp8_mean_over_draws_is_the_main_param(name):
    """If the mean error is zero, the squared mean errors sum to variance / draws, whatever the variances are.

    Errors of different elements are independent but for the scale, so their ratio has a standard deviation of about sqrt(2 / n), n the
    elements that vary, times up to 1.3 for the spread of the variances: the bound is 6.5 of them, a false-alarm rate below 1e-9.
    """
    w = hard_blocks()[name]
    total, squares, unit = torch.zeros(64, 64).double(), torch.zeros(64, 64).double(), spacing(w)
    for error in flow_errors(w, FLOWS["SR/SR"]):
        total += error / unit
        squares += (error / unit) ** 2
    mean = total / DRAWS
    variance = squares / DRAWS - mean**2
    nearest = next(flow_errors(w, FLOWS["RN/RN"], 1))
    assert (mean[nearest == 0] == 0).all()  # zeros, and whatever is representable, never move
    ratio = (mean**2).sum() / (variance / DRAWS).sum()
    varies = (variance > 0).sum()
    assert varies > 0.4 * w.numel()
    assert abs(ratio - 1) < 6.5 * 1.3 * (2 / varies).sqrt()


def test_point2_mxfp8_only_two_stochastic_roundings_are_unbiased():
    """The table of docs/mxfp8.md: root mean square of the mean error, in MXFP8 spacings, of the four flows.

    With one rounding to nearest the bias does not shrink with the draws: between BF16 and nearest E4M3 it stays near 0.29, the spread of
    a uniform error; nearest to BF16 alone leaves 1/16 of it, more than six times the noise of SR/SR after 400 draws if averaged.
    """
    w = hard_blocks()["normal"]
    unit, rms, mean = spacing(w), {}, {}
    for flow, kinds in FLOWS.items():
        draws = DRAWS if any(kinds) else 1
        mean[flow] = sum(error / unit for error in flow_errors(w, kinds, draws)) / draws
        rms[flow] = mean[flow].square().mean().sqrt().item()
    assert rms["RN/RN"] > 0.25
    assert rms["SR/RN"] > 0.2
    assert rms["SR/SR"] < 0.03
    # What RN/SR leaves is the error of BF16 itself, known exactly: the mean error follows it element by element.
    first = (w.bfloat16().double() - w.double()) / unit
    for flow, slope in (("RN/SR", 1.0), ("SR/SR", 0.0)):
        found = ((mean[flow] * first).sum() / first.square().sum()).item()
        # Standard deviation of the slope: noise of one mean (0.5 spacings / 20) over the length of `first`; 6 of them.
        assert abs(found - slope) < 6 * 0.025 / first.square().sum().sqrt().item()


@AXES
@pytest.mark.parametrize("tile", [False, True])
def test_point6_mxfp8_codes_come_back_from_values_and_scales(axis, tile):
    """BF16 params and scales hold the codes: -0.0, subnormals, the largest and the smallest scales."""
    x = wide((64, 96), seed=4).bfloat16()
    x[0, :3] = torch.tensor([-0.0, 0.0, -1e-30])
    x[:, 64:] *= 2.0**-150
    blocks = mxfp8.quantize(x, noise=NOISE, axis=axis, tile=tile, min_scale=mxfp8.BF16_MIN_SCALE)
    assert blocks.scale.min() == mxfp8.BF16_MIN_SCALE
    values = blocks.dequantize(torch.bfloat16)
    assert torch.equal(values.float(), blocks.dequantize())
    assert torch.equal(mxfp8.encode(values, blocks.scale, axis), blocks.data)
    again = mxfp8.quantize(values, noise=NOISE, axis=axis, tile=tile, min_scale=mxfp8.BF16_MIN_SCALE)
    assert torch.equal(
        again.dequantize(), blocks.dequantize()
    )  # values are fixed points, whatever becomes of the scales
    values.view(-1)[values.abs().argmax()] *= 1.01
    with pytest.raises(ValueError, match="1 of 6144 values are not MXFP8 numbers"):
        mxfp8.encode(values, blocks.scale, axis)


def test_point1_mxfp8_tiles_share_a_scale():
    x = wide((64, 96), seed=5)
    rows, columns = (mxfp8.quantize(x, noise=NOISE, axis=axis, tile=True) for axis in (-1, 0))
    assert torch.equal(rows.data, columns.data)
    tiles = x.abs().view(2, 32, 3, 32).amax((1, 3))
    assert torch.equal(rows.scale.view(2, 32, 3), mxfp8.block_scale(tiles)[:, None].expand(2, 32, 3))
    with pytest.raises(ValueError, match="tiles need a matrix"):
        mxfp8.quantize(torch.zeros(16, 32), tile=True)


def test_segments_that_leave_elements_out_are_refused():
    with pytest.raises(ValueError, match="segments of x"):
        mxfp8.quantize(torch.randn(64), segments=[Segment(0, 32, 0)])
