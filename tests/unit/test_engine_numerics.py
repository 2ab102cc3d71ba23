"""The trainer's forward pass in the engine's arithmetic: roundings, gradients, and the same function as the plain layers.

That it is vLLM's arithmetic is measured on a live engine: tests/distributed/test_post_training.py, point 9.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sr.rl import engine_numerics as en


@given(st.integers(0, 2**32 - 1))
def test_truncation_cuts_the_lower_half_off(bits):
    x = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)
    expected = torch.tensor([bits >> 16], dtype=torch.int32).to(torch.int16)
    assert torch.equal(en.truncate(x).view(torch.int16), expected)


@pytest.mark.parametrize("rounding", [en.TRUNCATE, en.NEAREST])
def test_gradients_pass_roundings_unchanged(rounding):
    x = torch.randn(100, requires_grad=True)
    y = en.rounding_function(rounding)(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - x).abs().max() < 0.02
    y.float().mul(torch.arange(100.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(100.0))


def test_rms_norm_is_the_plain_one_up_to_the_rounding_before_the_weight():
    norm = torch.nn.RMSNorm(64, eps=1e-6, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    x = torch.randn(8, 64)
    ours, plain = en._rms_norm(norm, x), torch.nn.functional.rms_norm(x, (64,), norm.weight.float(), 1e-6)
    assert ours.dtype == torch.bfloat16
    assert torch.allclose(ours.float(), plain, rtol=2**-7, atol=0)
    assert not torch.equal(ours, plain.to(torch.bfloat16)), "the order of roundings must show"
    ours.float().sum().backward()
    assert norm.weight.grad is not None


def test_attention_is_causal_softmax_attention_with_grouped_queries():
    q, k, v = torch.randn(9, 2, 4, 32), torch.randn(9, 2, 2, 32), torch.randn(9, 2, 2, 32)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    mask = torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
    forward = en._attention(en.rounding_function(en.NEAREST))
    ours = forward(SimpleNamespace(softmax_scale=32**-0.5), q, k, v, mask)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert ours.shape == (9, 2, 128)
    assert torch.allclose(ours.float(), plain.permute(2, 0, 1, 3).flatten(2), rtol=2**-8, atol=1e-6)


def test_rotary_embedding_is_megatron_s_up_to_rounding():
    t, angles = torch.randn(7, 2, 3, 32).to(torch.bfloat16), torch.randn(7, 1, 1, 16)
    freqs = torch.cat([angles, angles], -1)
    rotary = en._rotary(en.rounding_function(en.NEAREST))
    ours = rotary(t, freqs, SimpleNamespace(rotary_interleaved=False)).float()
    first, second = t.float().chunk(2, -1)
    plain = t.float() * freqs.cos() + torch.cat([-second, first], -1) * freqs.sin()
    assert (ours - plain).abs().max() < 0.04
    for wrong in ({"cu_seqlens": torch.zeros(1)}, {"mscale": 2.0}):
        with pytest.raises(ValueError, match="--numerical-parity knows whole, unscaled rotary embeddings"):
            rotary(t, freqs, SimpleNamespace(rotary_interleaved=False), **wrong)


def test_residual_sum_is_fp32_for_the_norm_and_bf16_for_the_next_sum():
    add = en._residual_add(training=True, fused=False)
    output, residual = torch.tensor([0.001953125], dtype=torch.bfloat16), torch.tensor([1.001])
    total = add((output, None), residual, 0.0)
    assert total.dtype == torch.float32
    assert total.item() == 1.0 + 0.001953125  # the residual was read as BF16: 1.0
    with pytest.raises(ValueError, match="without output biases and dropout"):
        add((output, torch.zeros(1)), residual, 0.0)


def test_log_probs_are_those_of_log_softmax():
    logits, targets = torch.randn(2, 5, 11).to(torch.bfloat16), torch.randint(0, 11, (2, 5))
    expected = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.equal(en.log_probs(logits, targets), expected)
