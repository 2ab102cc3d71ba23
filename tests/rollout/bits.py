"""Weights that are hard to hand over unharmed."""

import torch


def hard_weights(base, seed):
    """New BF16 weights near `base`: all mantissa bits at random, and zeros of both signs, subnormals, full mantissas."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([-0x8000, 0, 1, -0x7FFF, 0x7F, -0x7F81, 0x3CFF, -0x4301], dtype=torch.int16)
    out = {}
    for name, tensor in base.items():
        bits = (
            (tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator))
            .bfloat16()
            .view(torch.int16)
            .reshape(-1)
        )
        bits ^= torch.randint(0, 128, bits.shape, generator=generator, dtype=torch.int16)
        at = torch.randperm(bits.numel(), generator=generator)[: len(special)]
        bits[at] = special
        out[name] = bits.view(torch.bfloat16).view(tensor.shape)
    return out


def shuffled(weights, seed):
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed)).tolist()
    items = list(weights.items())
    return [items[i] for i in order]
