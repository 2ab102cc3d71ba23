"""The trainer's forward pass in the arithmetic of vLLM's kernels, for `--numerical-parity`.

Equal weights do not give equal log-probabilities: Megatron's local layers and vLLM round at different places. Here the places are
vLLM's (0.32, sources: vllm/ir/ops/layernorm.py, csrc/cpu/pos_encoding.cpp, csrc/cpu/cpu_attn_impl.hpp, v1/sample/sampler.py):

    residual sum        FP32 into the norm, BF16 into the next sum
    RMSNorm             FP32, rounded before the multiplication with the weight
    rotary embedding    FP32 products of BF16 cosines, rounded once
    attention           scores, softmax and sums in FP32, rounded once
    log-softmax         FP32

Matrix products, the embedding and SiLU need nothing: both sides give the same bits (measured, `operator_report`).
The last two roundings are the CPU kernels' own: without AVX512-BF16 they cut the lower half of the FP32 number off instead of rounding
to nearest. `engine_rounding` finds out which by asking the kernel. Gradients go straight through roundings.
"""

from __future__ import annotations

import types

import torch

NEAREST, TRUNCATE = "nearest", "truncate"


class _Truncate(torch.autograd.Function):
    """FP32 -> BF16 toward zero; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, x):
        return truncate(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.float()


def truncate(x: torch.Tensor) -> torch.Tensor:
    """FP32 -> BF16, the lower 16 bits cut off."""
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)


def rounding_function(rounding: str):
    """FP32 -> BF16 by "nearest" or "truncate", with gradient."""
    return _Truncate.apply if rounding == TRUNCATE else lambda x: x.to(torch.bfloat16)


def engine_rounding() -> str:
    """How vLLM's own kernels store FP32 results as BF16 on this machine: "truncate" or "nearest". vLLM must be imported.

    Asks its rotary embedding. Raises RuntimeError when its answer is neither.
    """
    if torch.cuda.is_available():
        return NEAREST
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(64, 32, generator=generator).to(torch.bfloat16)
    cache = torch.rand(64, 32, generator=generator).to(torch.bfloat16)
    cos, sin = cache.float().chunk(2, -1)
    expected = _rotate(query.float(), cos.repeat(1, 2), sin.repeat(1, 2))
    found, key = query.clone(), query.clone()
    torch.ops._C.rotary_embedding(torch.arange(64), found, key, 32, cache, True)
    for rounding in (TRUNCATE, NEAREST):
        if torch.equal(rounding_function(rounding)(expected), found):
            return rounding
    raise RuntimeError(
        "vLLM's rotary embedding neither truncates nor rounds to nearest here; --numerical-parity does not know its arithmetic"
    )


def use_engine_numerics(gpt: torch.nn.Module, rounding: str) -> None:
    """Give a GPTModel of megatron.core (local layer spec) the arithmetic above, in place; parameters stay where they are.

    The rotary embedding is replaced for the whole process. Without tensor parallelism only: see `numerical_parity.check`.
    """
    import megatron.core.transformer.attention as attention

    round_ = rounding_function(rounding)
    for module in gpt.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.forward = types.MethodType(_rms_norm, module)
        elif type(module).__name__ == "DotProductAttention":
            module.forward = types.MethodType(_attention(round_), module)
        elif type(module).__name__ == "TransformerLayer":
            module.self_attn_bda = module.mlp_bda = _residual_add
    attention.apply_rotary_pos_emb = _rotary(round_)


def log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log p(targets) [B, S], FP32, of whole-vocabulary logits [B, S, V], as vLLM's sampler computes it."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, targets[..., None]).squeeze(-1)


def _rms_norm(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    normed = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
    # The product of two BF16 numbers is exact in FP32, so this is a BF16 product, with its gradient in FP32.
    return (normed.to(self.weight.dtype).float() * self.weight.float()).to(self.weight.dtype)


def _residual_add(training: bool, fused: bool):
    def add(output_with_bias, residual, dropout):
        output, bias = output_with_bias
        if bias is not None or (training and dropout):
            raise ValueError("--numerical-parity knows layers without output biases and dropout only")
        # FP32, not rounded: the norm that follows reads the sum, the next sum reads it in BF16.
        return output.float() + residual.to(torch.bfloat16).float()

    return add


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _rotary(round_):
    def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, **kwargs):
        """t [sequence, batch, heads, head size], freqs [sequence, 1, 1, head size] in radians."""
        if cu_seqlens is not None or mscale != 1.0 or config.rotary_interleaved or freqs.shape[-1] != t.shape[-1]:
            raise ValueError("--numerical-parity knows whole, unscaled rotary embeddings of unpacked sequences only")
        cos, sin = (f(freqs).to(torch.bfloat16).float() for f in (torch.cos, torch.sin))
        return round_(_rotate(t.float(), cos, sin))

    return apply_rotary_pos_emb


def _attention(round_):
    def forward(self, query, key, value, attention_mask, *args, **kwargs):
        """query [S, B, heads, d]; key, value [S, B, groups, d]; mask: True hides. Returns [S, B, heads * d]."""
        repeat = query.shape[2] // key.shape[2]
        q, k, v = (x.float().permute(1, 2, 0, 3) for x in (query, key, value))
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * self.softmax_scale).masked_fill(attention_mask, float("-inf"))
        context = round_(scores.softmax(-1) @ v)
        return context.permute(2, 0, 1, 3).flatten(2)

    return forward
