"""The interface: checks, layouts, segments and plans."""

import subprocess
import sys

import pytest
import torch

import megatron_sr as sr
from megatron_sr import Noise, RoundingPlan, Segment, round_segments_, round_to_
from tests.unit.values import bits_of

NOISE = Noise(seed=1, step=2, key="w")


def rounded(x, **kwargs):
    return round_to_(torch.empty(x.shape, dtype=torch.bfloat16), x, **{"noise": NOISE, **kwargs})


def test_round_to_returns_dst_and_accepts_any_shape():
    x = torch.randn(3, 4, 5)
    dst = torch.empty(3, 4, 5, dtype=torch.bfloat16)
    assert round_to_(dst, x, noise=NOISE) is dst
    assert torch.equal(dst.flatten(), rounded(x.flatten()))
    assert rounded(torch.randn(())).shape == ()
    assert rounded(torch.empty(0, 3)).numel() == 0


def test_non_contiguous_src_is_rounded_in_its_logical_order():
    x = torch.randn(6, 8)
    for view in (x.t(), x[:, ::2], x[1:4, 3:7], x[0].expand(5, 8)):
        assert torch.equal(rounded(view), rounded(view.contiguous()))


def test_start_places_a_shard_in_its_tensor():
    x = torch.randn(1000)
    assert torch.equal(rounded(x)[300:], rounded(x[300:], start=300))
    assert not torch.equal(rounded(x)[300:], rounded(x[300:]))


def test_simulated_formats_round_in_place():
    x = torch.randn(1000)
    y = round_to_(torch.empty_like(x), x, noise=NOISE, format="e8m4")
    assert round_to_(x, x, noise=NOISE, format="e8m4") is x
    assert torch.equal(x, y)


def test_e8m7_equals_bf16():
    x = torch.randn(1000)
    assert torch.equal(rounded(x, format="e8m7"), rounded(x))
    assert torch.equal(round_to_(torch.empty(1000), x, noise=NOISE, format="e8m7"), rounded(x).float())


def test_e4m3_bytes_and_float8_are_the_same():
    x = torch.randn(1000)
    as_bytes = round_to_(torch.empty(1000, dtype=torch.uint8), x, noise=NOISE, format="e4m3")
    as_float8 = round_to_(torch.empty(1000, dtype=torch.float8_e4m3fn), x, noise=NOISE, format="e4m3")
    assert torch.equal(as_bytes, as_float8.view(torch.uint8))


def test_parameters_round_without_autograd_but_tell_it():
    dst = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    src = torch.nn.Parameter(torch.randn(10))
    version = dst._version
    for backend in ("cpu", "reference"):
        round_to_(dst, src, noise=NOISE, backend=backend)
    assert dst._version > version
    assert dst.grad_fn is None
    with torch.inference_mode():
        rounded(torch.randn(10))


def test_one_buffer_with_many_logical_tensors():
    """A flat main shard and param buffer: pieces of three tensors, a gap, one cut in the middle of rows."""
    src, dst = torch.randn(1000), torch.full((1200,), 7.0, dtype=torch.bfloat16)
    a, b, c = (Noise(1, 2, key) for key in "abc")
    pieces = [
        (a, Segment(0, 100, 0)),
        (b, [Segment(100, 200, 40, 16, 8), Segment(300, 50, 900)]),
        (c, [Segment(400, 600, 17)]),
    ]
    round_segments_(dst, src, pieces)
    assert torch.equal(dst[:100], rounded(src[:100], noise=a))
    assert torch.equal(dst[300:350], rounded(src[300:350], noise=b, start=900))
    assert torch.equal(dst[400:1000], rounded(src[400:], noise=c, start=17))
    for row in range(25):
        at = slice(100 + 8 * row, 108 + 8 * row)
        assert torch.equal(dst[at], rounded(src[at], noise=b, start=40 + 16 * row))
    assert (dst[350:400] == 7).all(), "wrote where no segment lies"
    assert (dst[1000:] == 7).all(), "wrote where no segment lies"


def test_c2_column_and_row_shards_of_a_matrix_give_the_whole():
    whole = torch.randn(48, 40)
    wanted = rounded(whole)
    left, right = whole[:, :16].contiguous(), whole[:, 16:].contiguous()
    outs = [torch.empty(t.shape, dtype=torch.bfloat16) for t in (left, right)]
    segments = [(NOISE, Segment(0, 48 * 16, 0, 40, 16)), (NOISE, Segment(0, 48 * 24, 16, 40, 24))]
    round_segments_(outs, [left, right], segments)
    assert torch.equal(torch.cat(outs, 1), wanted)
    top, bottom = rounded(whole[:20]), rounded(whole[20:], start=20 * 40)
    assert torch.equal(torch.cat([top, bottom]), wanted)


def test_nearest_segments():
    src, dst = torch.randn(100), torch.zeros(100, dtype=torch.bfloat16)
    round_segments_(dst, src, [(None, Segment(10, 50, 0))])
    assert torch.equal(dst[10:60], src[10:60].bfloat16())


def test_plan_equals_single_calls_at_every_step():
    src = [torch.randn(n) for n in (100, 3, 257)]
    dst = [torch.empty(s.shape, dtype=torch.bfloat16) for s in src]
    plan = RoundingPlan(dst, src, [(f"t{i}", [Segment(0, s.numel(), i)]) for i, s in enumerate(src)], seed=5, stream=3)
    for step in (0, 1, 2**64 - 1, 1):
        plan.run_(step)
        for i, (d, s) in enumerate(zip(dst, src)):
            assert torch.equal(d, rounded(s, noise=Noise(5, step, f"t{i}", 3), start=i))


def test_plan_follows_moved_storage_and_refuses_changed_shapes():
    src, dst = torch.randn(100), torch.empty(100, dtype=torch.bfloat16)
    plan = RoundingPlan([dst], [src], [("w", [Segment(0, 100, 0)])], seed=1)
    plan.run_(2)
    old, new = dst.clone(), torch.randn(100)
    dst.data, src.data = torch.zeros(100, dtype=torch.bfloat16), new
    plan.run_(2)
    assert torch.equal(dst, rounded(new))
    assert not torch.equal(dst, old)
    dst.data = torch.zeros(101, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"dst\[0\] has changed since the plan was made.*make a new plan"):
        plan.run_(3)


def test_empty_plan_and_empty_segments():
    RoundingPlan([], [], [], seed=1).run_(0)
    round_segments_([], [], [])
    dst = torch.zeros(4, dtype=torch.bfloat16)
    RoundingPlan([dst], [torch.ones(4)], [("w", [Segment(0, 0, 0)])], seed=1).run_(0)
    assert not dst.any()


BF16 = torch.zeros(4, dtype=torch.bfloat16)
FP32 = torch.zeros(4)


@pytest.mark.parametrize(
    "dst, src, kwargs, error, message",
    [
        (
            BF16,
            FP32.double(),
            {},
            TypeError,
            "src has dtype torch.float64; rounding starts from torch.float32 main params",
        ),
        (FP32, FP32, {}, TypeError, "dst has dtype torch.float32, but format 'bf16' is stored as torch.bfloat16"),
        (BF16, [1.0], {}, TypeError, "src must be a torch.Tensor, not list"),
        (None, FP32, {}, TypeError, "dst must be a torch.Tensor, not NoneType"),
        (BF16, FP32[:3], {}, ValueError, r"dst has shape \(4,\), src \(3,\); they must be equal"),
        (BF16.view(2, 2), FP32, {}, ValueError, r"dst has shape \(2, 2\), src \(4,\)"),
        (torch.zeros(8, dtype=torch.bfloat16)[::2], FP32, {}, ValueError, r"dst is not contiguous \(strides \(2,\)\)"),
        (BF16.to("meta"), FP32, {}, ValueError, "dst is on meta, src on cpu; they must be on one device"),
        (BF16.to("meta"), FP32.to("meta"), {}, ValueError, "no kernel serves tensors on meta"),
        (BF16, FP32, {"format": "bf17"}, ValueError, "format 'bf17' is not known"),
        (BF16, FP32, {"format": "mxfp8"}, TypeError, "use megatron_sr.mxfp8.quantize"),
        (
            BF16,
            FP32,
            {"backend": "cuda"},
            ValueError,
            "backend 'cuda' is not known; choose one of: auto, reference, cpu",
        ),
        (BF16, FP32, {"start": -1}, ValueError, "start is -1; it must lie in 0"),
        (BF16, FP32, {"start": 2**64 - 3}, ValueError, "leaves the global indices"),
        (BF16, FP32, {"start": 1.5}, TypeError, "start must be an int, not float"),
        (BF16, FP32, {"noise": 7}, TypeError, r"noise must be a Noise or None \(nearest\), not int"),
    ],
)
def test_c6_round_to_refuses(dst, src, kwargs, error, message):
    with pytest.raises(error, match=message):
        round_to_(dst, src, **kwargs)


@pytest.mark.parametrize(
    "dst, src, work, error, message",
    [
        ([BF16], [FP32, FP32], [(NOISE, Segment(0, 4, 0))], ValueError, "1 dst tensors, 2 src tensors and 1 entries"),
        (BF16, FP32, [(NOISE, Segment(2, 3, 0))], ValueError, "of tensor pair 0 leaves its 4 elements"),
        (BF16, FP32, [(NOISE, Segment(-1, 3, 0))], ValueError, "of tensor pair 0 leaves its 4 elements"),
        (BF16, FP32, [(NOISE, Segment(0, 4, -4))], ValueError, "global start is -4"),
        (BF16, FP32, [(NOISE, Segment(0, 4, 2**64 - 5, 4, 2))], ValueError, "leaves the global indices"),
        (BF16, FP32, [(NOISE, Segment(0, 4, 0, 1, 0))], ValueError, "run must be at least 1"),
        (
            BF16,
            FP32,
            [(NOISE, Segment(0, 2, 0)), (None, Segment(2, 2, 2))],
            TypeError,
            "every noise must be a Noise, or",
        ),
        (BF16, FP32, [("w", Segment(0, 2, 0))], TypeError, "every noise must be a Noise, or"),
        ([BF16, FP32], [FP32, FP32], [(NOISE, [])] * 2, TypeError, r"dst\[1\] has dtype torch.float32"),
        ([BF16], [FP32.view(2, 2).t()], [(NOISE, [])], ValueError, r"src\[0\] is not contiguous"),
    ],
)
def test_c6_round_segments_refuses(dst, src, work, error, message):
    with pytest.raises(error, match=message):
        round_segments_(dst, src, work)


def test_c6_plan_refuses():
    work = [("w", [Segment(0, 4, 0)])]
    with pytest.raises(ValueError, match="seed is -1"):
        RoundingPlan([BF16], [FP32], work, seed=-1)
    with pytest.raises(ValueError, match="stream is -1"):
        RoundingPlan([BF16], [FP32], work, seed=1, stream=-1)
    with pytest.raises(TypeError, match=r"keys_and_segments\[0\]: the key must be a str, not int"):
        RoundingPlan([BF16], [FP32], [(1, [])], seed=1)
    with pytest.raises(ValueError, match="step is -1"):
        RoundingPlan([BF16], [FP32], work, seed=1).run_(-1)


def test_importing_the_package_is_light():
    heavy = "'megatron.core', 'megatron.training', 'vllm', 'ray', 'triton', 'transformers'"
    code = f"import sys, megatron_sr; print([m for m in ({heavy}) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert set(sr.__all__) <= set(dir(sr))
    assert bits_of(torch.ones(1, dtype=torch.bfloat16)).item() == 0x3F80


def test_partial_overlap_is_refused_and_in_place_is_not():
    x = torch.randn(64)
    for dst, src in ((x[1:], x[:-1]), (x[:-1], x[1:]), (x.view(torch.bfloat16)[:64], x)):
        with pytest.raises(ValueError, match="overlap in memory"):
            sr.round_to_(dst, src, noise=NOISE, format="e8m4" if dst.dtype == torch.float32 else "bf16")
    expected = sr.round_to_(torch.empty(64), x, noise=NOISE, format="e8m4")
    assert torch.equal(sr.round_to_(x, x, noise=NOISE, format="e8m4"), expected)
    sr.round_to_(x[:32], x[32:], noise=NOISE, format="e8m4")  # neighbours do not overlap


def test_plan_refuses_a_tensor_whose_memory_was_freed():
    dst, src = torch.empty(64, dtype=torch.bfloat16), torch.randn(64)
    plan = sr.RoundingPlan([dst], [src], [("w", [sr.Segment(0, 64, 0)])], seed=1)
    plan.run_(1)
    dst.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"dst\[0\] has no memory .*; allocate it before rounding"):
        plan.run_(2)
    dst.untyped_storage().resize_(128)
    plan.run_(2)
    assert torch.equal(dst, sr.round_to_(torch.empty_like(dst), src, noise=sr.Noise(1, 2, "w")))


@pytest.mark.parametrize("format", ["bf16", "fp16", "e8m4"])
def test_a_plan_without_a_seed_rounds_to_nearest_at_any_step(format):
    src = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 33, 4099)]
    dtype = torch.float16 if format == "fp16" else torch.bfloat16
    dst = [torch.empty(len(s), dtype=dtype) for s in src]
    plan = RoundingPlan(
        dst, src, [(f"t{i}", [Segment(0, len(s), 0)]) for i, s in enumerate(src)], seed=None, format=format
    )
    for step in (0, 7):
        plan.run_(step)
        for d, s in zip(dst, src):
            assert torch.equal(d, round_to_(torch.empty_like(d), s, format=format))
            assert format == "e8m4" or torch.equal(d, s.to(dtype))
