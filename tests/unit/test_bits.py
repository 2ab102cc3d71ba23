"""kernels/bits_cpu.py against plain torch."""

import pytest
import torch

from megatron_sr.kernels.bits_cpu import all_finite, list_strided


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_finite_sees_one_bad_element_anywhere(dtype):
    good = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    good = good[good.isfinite()]  # every finite pattern: signed zeros, subnormals, the largest
    assert all_finite(good)
    assert all_finite(good[:0])
    for bad in (float("inf"), float("-inf"), float("nan")):
        for at in (0, 4095, 4096, len(good) - 1):
            spoilt = good.clone()
            spoilt[at] = bad
            assert not all_finite(spoilt)
            assert not all_finite(spoilt.float())
    assert all_finite(good.view(-1, 2)[:, 0])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("sizes, strides, first", [((6, 4), (1, 6), 3), ((2, 3, 4), (12, 1, 3), 0), ((5,), (2,), 1)])
def test_list_strided_is_a_contiguous_copy_of_the_view(dtype, sizes, strides, first):
    flat = torch.arange(40, dtype=dtype)[7:]
    expected = flat.as_strided(sizes, strides, 7 + first).reshape(-1)
    assert torch.equal(list_strided(flat, first, sizes, strides), expected)


@pytest.mark.parametrize(
    "sizes, strides, first", [((6, 4), (1, 6), 10), ((2,), (-1,), 5), ((2,), (1,), -1), ((0,), (1,), 0)]
)
def test_list_strided_refuses_what_leaves_its_memory(sizes, strides, first):
    with pytest.raises(ValueError, match="leaves 33 elements"):
        list_strided(torch.arange(33, dtype=torch.int32), first, sizes, strides)
