import math

import pytest
import torch

from megatron_sr import formats


@pytest.mark.parametrize(
    "name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("e4m3", torch.float8_e4m3fn)]
)
def test_numbers_are_those_of_torch(name, dtype):
    f, info = formats.get(name), torch.finfo(dtype)
    assert f.max_finite == info.max
    assert 2.0**f.min_exponent == info.smallest_normal
    assert f.smallest_subnormal == info.smallest_normal * info.eps
    assert f.storage[0] == dtype
    pattern = torch.tensor([f.max_code], dtype=torch.int64).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    assert pattern.view(dtype).item() == f.max_finite


@pytest.mark.parametrize("m", range(4, 11))
def test_simulated_formats_keep_the_exponent_of_bf16(m):
    f = formats.get(f"e8m{m}")
    assert (f.exponent_bits, f.mantissa_bits, f.bias, f.min_exponent) == (8, m, 127, -126)
    assert f.max_finite == float(2**128 - 2 ** (127 - m))
    assert (torch.bfloat16 in f.storage) == (m <= 7)
    assert torch.float32 in f.storage


@pytest.mark.parametrize("f", formats.FORMATS.values(), ids=str)
def test_c3_random_bits_cover_the_discarded_bits_where_documented(f):
    """A value of exponent E has its lowest bit at 2**(E - 23); the grid there has a spacing of 2**(max(E, min) - m)."""
    if f.exact_from == 0:
        first = -126  # FP32 subnormals have the same lowest bit
    else:
        first = int(math.log2(f.exact_from))
        assert max(first - 1, f.min_exponent) - f.mantissa_bits - (first - 1 - 23) > f.random_bits
    for exponent in range(first, 128):
        assert max(exponent, f.min_exponent) - f.mantissa_bits - (exponent - 23) <= f.random_bits


def test_which_formats_are_exact_everywhere():
    assert {f.name for f in formats.FORMATS.values() if f.exact_from == 0} == {
        "bf16",
        *(f"e8m{m}" for m in range(4, 11)),
    }
    assert formats.FP16.exact_from == 2.0**-33
    assert formats.E4M3.exact_from == 2.0**-18


def test_get_returns_formats_by_name_and_refuses_others():
    assert formats.get("e8m4") is formats.E8M4
    assert formats.get(formats.BF16) is formats.BF16
    with pytest.raises(ValueError, match="format 'bf8' is not known; choose one of: bf16, fp16"):
        formats.get("bf8")


def test_storage_is_checked():
    formats.E4M3.check_storage(torch.uint8)
    with pytest.raises(TypeError, match=r"dst has dtype torch.float16, but format 'bf16' is stored as torch.bfloat16"):
        formats.BF16.check_storage(torch.float16)
    with pytest.raises(TypeError, match=r"'e8m8' is stored as torch.float32"):
        formats.E8M8.check_storage(torch.bfloat16)
    with pytest.raises(TypeError, match="use megatron_sr.mxfp8.quantize"):
        formats.MXFP8.check_storage(torch.uint8)
