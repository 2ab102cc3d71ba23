"""C6 without Megatron: the table of refusals, and layouts that do not fit the ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_sr.megatron.model import Layout
from megatron_sr.megatron.support import check_supported

SUPPORTED = dict(
    use_megatron_fsdp=False, use_torch_fsdp2=False,
    optimizer_cuda_graph=False,
    fp8=None, fp8_param_gather=False, fp4=None, fp4_param_gather=False, qk_clip=False,
)  # fmt: skip


def test_the_supported_setting_passes():
    check_supported(SimpleNamespace(**SUPPORTED))


@pytest.mark.parametrize("field", SUPPORTED)
def test_c6_each_unsupported_value_is_refused_alone(field):
    """Naming a flag, its value, a reason and a way out."""
    flipped = {"fp8": "hybrid", "fp4": "e2m1"}.get(field, not SUPPORTED[field])
    with pytest.raises(ValueError, match=r"^--param-rounding stochastic does not work with --\S+ \S+: .+; .+nearest$"):
        check_supported(SimpleNamespace(**SUPPORTED | {field: flipped}))


@pytest.mark.parametrize("bf16, fp16, works", [(True, False, True), (False, True, True), (False, False, False)])
def test_c6_fp32_model_params_are_refused(bf16, fp16, works):
    settings = SimpleNamespace(**SUPPORTED, bf16=bf16, fp16=fp16)
    if works:
        check_supported(settings)
    else:
        with pytest.raises(ValueError, match="--bf16 off: .*; add --bf16 or --fp16, or use --param-rounding nearest"):
            check_supported(settings)


def test_the_first_setting_that_has_a_field_answers():
    optimizer_config = SimpleNamespace(bf16=True)
    check_supported(optimizer_config, SimpleNamespace(**SUPPORTED | {"bf16": False}))
    with pytest.raises(ValueError, match="--qk-clip on"):
        check_supported(optimizer_config, SimpleNamespace(**SUPPORTED | {"qk_clip": True}))


@pytest.mark.parametrize(
    "layout, ranks, message",
    [
        (Layout(tensor=2, pipeline=2), 6, "needs a multiple of 4 ranks, but there are 6; change --nproc-per-node"),
        (Layout(tensor=4), 2, "needs a multiple of 4 ranks, but there are 2"),
        (Layout(expert=4), 2, "--expert-model-parallel-size 4 does not divide the 2 ranks"),
    ],
)
def test_c6_ranks_that_a_layout_does_not_allow(layout, ranks, message):
    with pytest.raises(ValueError, match=message):
        layout.data(ranks)


def test_data_parallel_size_is_what_the_model_leaves():
    assert Layout(tensor=2, pipeline=2).data(8) == 2
    assert Layout(expert=2).data(2) == 2
