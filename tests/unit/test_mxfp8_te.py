"""Point 1 of the MXFP8 mode: Transformer Engine's tensors get the codes and scales that BF16 stand-ins hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_sr import ParamRounding, Segment
from megatron_sr.megatron import mxfp8_flags, mxfp8_te
from megatron_sr.megatron.identity import Identity
from megatron_sr.megatron.mxfp8_rounding import SecondRounding
from megatron_sr.megatron.support import check_supported
from tests.unit import te_tensors

SHAPE = (96, 160)
IDENTITY = Identity("w", [Segment(0, 96 * 160, 7 * 160)])
STEP = 5


@pytest.fixture(params=["stand-in", "transformer-engine"])
def make(request):
    """make(shape, swizzled, columnwise) -> an MXFP8 tensor."""
    if request.param == "stand-in":
        return te_tensors.StandIn
    module = te_tensors.transformer_engine()
    if module is None:
        pytest.skip("Transformer Engine does not import; set TRANSFORMER_ENGINE_SOURCE to a checkout of it")
    return lambda *args: te_tensors.real(module, *args)


def weight(shape=SHAPE):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()


def quantizer(**config):
    rounding = SecondRounding(ParamRounding(format="mxfp8", **config))
    return lambda w, axis: rounding.quantize(w, IDENTITY, STEP, axis)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("columnwise", [False, True])
def test_point1_mxfp8_adapter_writes_codes_and_padded_scales(make, swizzled, columnwise):
    tensor, w, quantize = make(SHAPE, swizzled, columnwise), weight(), quantizer()
    mxfp8_te.write(tensor, w, quantize)
    for axis in (-1, 0) if columnwise else (-1,):
        got, wanted = mxfp8_te.read(tensor, axis), quantize(w, axis)
        assert torch.equal(got.data, wanted.data)
        assert torch.equal(got.scale, wanted.scale)
        # Padding is zero: a GEMM reads whole tiles.
        padded = tensor._rowwise_scale_inv if axis == -1 else tensor._columnwise_scale_inv
        assert padded.sum(dtype=torch.int64) == wanted.scale.sum(dtype=torch.int64)
    if not columnwise:
        with pytest.raises(ValueError, match="no column-wise copy"):
            mxfp8_te.read(tensor, 0)


def test_point1_mxfp8_adapter_writes_into_a_parameter(make):
    """Megatron hands over an nn.Parameter around the tensor."""
    tensor, w = make(SHAPE, False, True), weight()
    parameter = tensor if isinstance(tensor, te_tensors.StandIn) else torch.nn.Parameter(tensor)
    (member,) = mxfp8_te._members(parameter)
    mxfp8_te.write(member, w, quantizer())
    assert torch.equal(mxfp8_te.read(tensor).data, quantizer()(w, -1).data)


def test_point1_mxfp8_copy_out_of_the_gathered_buffer_is_routed(make, monkeypatch):
    """`copy_tensor_to_quantized_param`, where Megatron looks it up; members of a grouped tensor keep the noise of their place."""
    from megatron.core.distributed import param_and_grad_buffer as upstream

    monkeypatch.setattr(upstream, "copy_tensor_to_quantized_param", lambda param, src: others.append(param))
    others, plain, grouped = [], make(SHAPE, True, True), [make((32, 160), True, False) for _ in range(3)]
    group = SimpleNamespace(quantized_tensors=grouped)
    weights = mxfp8_te.TEWeights.__new__(mxfp8_te.TEWeights)
    names = {_Key(plain): "plain", _Key(group): "grouped"}
    weights.names, weights._identities = names, dict.fromkeys(names, IDENTITY)
    weights._rounding, weights._steps = SecondRounding(ParamRounding(format="mxfp8")), dict.fromkeys(names, 0)
    weights.stale(names, STEP)
    mxfp8_te.route(weights, sites=[])
    w = weight()
    for key in (*names, "another param"):
        upstream.copy_tensor_to_quantized_param(key, w.view(-1))
    assert others == ["another param"]
    wanted = quantizer()(w, -1)
    assert torch.equal(mxfp8_te.read(plain).data, wanted.data)
    assert torch.equal(torch.cat([mxfp8_te.read(member).data for member in grouped]), wanted.data)
    codes, scales = weights.codes(), weights.scales()
    for key in names:
        assert torch.equal(codes[key].view(torch.uint8).view(SHAPE), wanted.data)
        assert torch.equal(scales[key].view(wanted.scale.shape), wanted.scale)


class _Key:
    """A hashable parameter: what `_members` looks at is the tensor's."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)


@pytest.mark.parametrize("columnwise", ["shared", "nearest"])
def test_point1_mxfp8_columnwise_noise(columnwise):
    w, quantize = weight(), quantizer(mxfp8_columnwise=columnwise)
    rows, columns = quantize(w, -1), quantize(w, 0)
    nearest = quantizer(mode="nearest")(w, 0)
    equal_scale = rows.scale.repeat_interleave(32, 1) == columns.scale.repeat_interleave(32, 0)
    assert 0.3 < equal_scale.float().mean() < 0.95
    if columnwise == "shared":
        assert torch.equal(rows.data[equal_scale], columns.data[equal_scale])
        assert not torch.equal(columns.data, nearest.data)
    else:
        assert torch.equal(columns.data, nearest.data)


def test_point1_mxfp8_tiles_make_both_copies_equal():
    quantize = quantizer(mxfp8_scaling="2d")
    rows, columns = (quantize(weight(), axis) for axis in (-1, 0))
    assert torch.equal(rows.data, columns.data)
    assert torch.equal(rows.scale.repeat_interleave(32, 1), columns.scale.repeat_interleave(32, 0))


def test_point1_mxfp8_excluded_and_fixed_noise():
    w = weight()
    assert torch.equal(quantizer(exclude=("w",))(w, -1).data, quantizer(mode="nearest")(w, -1).data)
    fixed = SecondRounding(ParamRounding(format="mxfp8", noise="fixed"))
    steps = [fixed.quantize(w, IDENTITY, step).data for step in (1, 2)]
    assert torch.equal(*steps)
    assert not torch.equal(quantizer()(w, -1).data, steps[0])


def test_point1_mxfp8_adapter_refuses_other_layouts():
    w = weight()
    with pytest.raises(TypeError, match="kFloat8E5M2; MXFP8 weights are E4M3"):
        mxfp8_te.write(te_tensors.StandIn(SHAPE, False, True, te_tensors.StandIn.DType.kFloat8E5M2), w, quantizer())
    tensor = te_tensors.StandIn(SHAPE, False, True)
    tensor._rowwise_scale_inv = tensor._rowwise_scale_inv[:96]
    with pytest.raises(ValueError, match=r"_rowwise_scale_inv \[96, 8\] are not Transformer Engine 2.20's layout"):
        mxfp8_te.write(tensor, w, quantizer())


TE = dict(fp8="e4m3", fp8_recipe="mxfp8", fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_point7_mxfp8_flags_that_go_together(fp8, overlap):
    args = SimpleNamespace(bf16=True, overlap_param_gather=overlap, **(TE | {"fp8": fp8}))
    check_supported(args, format="mxfp8")
    check_supported(SimpleNamespace(bf16=True, fp8=None, fp8_param_gather=False), format="mxfp8")
    with pytest.raises(ValueError, match="does not work with --fp8-param-gather"):
        check_supported(args, format="bf16")


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"fp8_recipe": "delayed"}, "--fp8-recipe delayed, under which weights become another format; use --fp8-recipe mxfp8"),
        ({"fp8_recipe": "blockwise"}, "--fp8-recipe blockwise"),
        ({"fp8_param_gather": False}, "once more, to nearest, at every forward pass; add --fp8-param-gather"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": False}, "without --reuse-grad-buf-for-mxfp8-param-ag"),
        ({"fp4": "e2m1"}, "--fp4-format e2m1"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
    ],
)  # fmt: skip
def test_point7_mxfp8_flags_that_are_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        check_supported(SimpleNamespace(bf16=True, **(TE | changed)), format="mxfp8")


def test_point7_mxfp8_recipe_may_be_an_enum():
    recipe = SimpleNamespace(value="mxfp8")
    assert mxfp8_flags.uses_transformer_engine(lambda field, default: (TE | {"fp8_recipe": recipe}).get(field, default))
