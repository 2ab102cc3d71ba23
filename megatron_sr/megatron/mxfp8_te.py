"""MXFP8 params that Transformer Engine holds (`MXFP8Tensor`): our codes and scales written where its cast kernel would write its own.

Megatron gathers BF16 params in the gradient buffer (--reuse-grad-buf-for-mxfp8-param-ag) and then calls
`copy_tensor_to_quantized_param(param, gathered)`, looked up in megatron.core.distributed.param_and_grad_buffer. There `route` takes
over for the params it knows. Tested on CPU against Transformer Engine's own Python class where it imports, otherwise against a
stand-in with its fields; no GPU has run it.
Source: Transformer Engine 2.20 pytorch/tensor/mxfp8_tensor.py, Megatron-Core 0.19 fp8_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from megatron_sr import mxfp8
from megatron_sr.config import ParamRounding
from megatron_sr.coordinates import clip
from megatron_sr.megatron.identity import Identity
from megatron_sr.megatron.mxfp8_layers import bf16_layers, check_blocks, mxfp8_parameters
from megatron_sr.megatron.mxfp8_rounding import SecondRounding

Quantize = Callable[[torch.Tensor, int], mxfp8.MXFP8Blocks]
"""(BF16 weight, axis) -> codes and scales of its row-wise (axis -1) or column-wise (axis 0) copy."""

_COPIES = {-1: ("_rowwise_data", "_rowwise_scale_inv"), 0: ("_columnwise_data", "_columnwise_scale_inv")}


def write(tensor, weight: torch.Tensor, quantize: Quantize) -> None:
    """Quantize `weight` into the copies that an `MXFP8Tensor` has: codes, and scales padded (and swizzled, if its flag says so).

    tensor  anything with `MXFP8Tensor`'s fields; a copy whose data is None is left out.
    weight  BF16, of its shape. Raises TypeError for E5M2 codes, ValueError when a field's shape is not what its layout asks for.
    """
    kind = getattr(tensor._fp8_dtype, "name", str(tensor._fp8_dtype))  # kFloat8E4M3
    if "E4M3" not in kind:
        raise TypeError(f"the MXFP8 tensor holds {kind}; MXFP8 weights are E4M3 (--fp8-format e4m3 or hybrid)")
    for axis, (data, scale) in _COPIES.items():
        codes, scales = getattr(tensor, data), getattr(tensor, scale)
        if codes is None:
            continue
        blocks = quantize(weight, axis)
        padded = mxfp8.pad_scale(blocks.scale, axis)
        if tensor._with_gemm_swizzled_scales:
            padded = mxfp8.swizzle_scale(padded, axis)
        if codes.shape != blocks.data.shape or scales.shape != padded.shape:
            raise ValueError(
                f"{data} {list(codes.shape)} and {scale} {list(scales.shape)} are not Transformer Engine 2.20's layout of a "
                f"{list(weight.shape)} weight, {list(blocks.data.shape)} and {list(padded.shape)}"
            )
        codes.copy_(blocks.data)
        scales.copy_(padded)


def read(tensor, axis: int = -1) -> mxfp8.MXFP8Blocks:
    """The codes and compact scales of one copy of an `MXFP8Tensor`. Raises ValueError if it has no such copy."""
    data, scale = (getattr(tensor, field) for field in _COPIES[axis])
    if data is None:
        raise ValueError(f"the MXFP8 tensor has no {'row' if axis == -1 else 'column'}-wise copy")
    if tensor._with_gemm_swizzled_scales:
        scale = mxfp8.unswizzle_scale(scale, axis)
    return mxfp8.MXFP8Blocks(data, mxfp8.unpad_scale(scale, data.shape, axis), axis)


class TEWeights:
    """The params of a model that are `MXFP8Tensor`s (as `mxfp8.MXFP8Weights`, which is for BF16 params that hold MXFP8 values)."""

    def __init__(self, model, identities: Mapping[torch.nn.Parameter, Identity], config: ParamRounding):
        self.names, self.bf16_layers = mxfp8_parameters(model), bf16_layers(model)
        self._identities, self._rounding = identities, SecondRounding(config)
        self._steps: dict[torch.nn.Parameter, int] = dict.fromkeys(self.names, 0)
        for parameter, name in self.names.items():
            check_blocks(parameter, name, identities[parameter], config.mxfp8_scaling == "2d")
            for member in _members(parameter):
                if not hasattr(member, "_rowwise_scale_inv"):
                    raise ValueError(f"{name} is {type(member).__name__}, not Transformer Engine's MXFP8Tensor")

    def stale(self, parameters: Iterable[torch.nn.Parameter], step: int) -> None:
        """The gathered BF16 values of `parameters` are of the first rounding after `step` steps from now on."""
        self._steps |= dict.fromkeys((p for p in parameters if p in self.names), step)

    @torch.no_grad()
    def quantize(self, parameter: torch.nn.Parameter, gathered: torch.Tensor) -> None:
        """Write the MXFP8 codes and scales of `gathered` (BF16, flat) into the parameter's tensor, or its grouped tensors."""
        step, (key, segments) = self._steps[parameter], self._identities[parameter]
        members = _members(parameter)
        size = gathered.numel() // len(members)
        for i, member in enumerate(members):
            part = Identity(key, clip(segments, i * size, (i + 1) * size))
            weight = gathered[i * size : (i + 1) * size].view(member.shape)
            write(member, weight, lambda w, axis, part=part: self._rounding.quantize(w, part, step, axis))

    def codes(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Parameter -> its row-wise E4M3 codes (float8_e4m3fn), live."""
        return {p: _stack([read(m).data for m in _members(p)]).view(torch.float8_e4m3fn) for p in self.names}

    def scales(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Parameter -> uint8 scales [out, in / 32] of its row-wise blocks."""
        return {p: _stack([read(m).scale for m in _members(p)]) for p in self.names}


def route(weights: TEWeights, sites) -> None:
    """From now on the cast sites fill the gathered buffer, and Megatron's copies out of it go through `weights.quantize`.

    sites: `DistributedSite`s. Megatron calls `_copy_main_params_to_param_buffer` of their optimizers once a step, or, when the
    all-gather overlaps with the forward pass, before each of them; then `reset_param_sync_dispatch_state` as its own method does.
    """
    from megatron.core.distributed import param_and_grad_buffer as upstream

    for site in sites:
        site.optimizer._copy_main_params_to_param_buffer = _into_buffer(site)
    original = upstream.copy_tensor_to_quantized_param

    def copy_tensor_to_quantized_param(param, src):
        if param in weights.names:
            weights.quantize(param, src)
        else:
            original(param, src)

    upstream.copy_tensor_to_quantized_param = copy_tensor_to_quantized_param


def _into_buffer(site) -> Callable[[], None]:
    def copy_main_params_to_param_buffer():
        site.round_()
        for chunk in site.optimizer.model_chunks:
            chunk.reset_param_sync_dispatch_state()

    return copy_main_params_to_param_buffer


def _members(parameter) -> list:
    """The MXFP8Tensors of a parameter: itself, or those of a grouped GEMM's one tensor."""
    tensor = parameter.data if isinstance(parameter, torch.nn.Parameter) else parameter
    members = getattr(parameter, "quantized_tensors", None)
    return list(members) if members else [tensor]


def _stack(members: list[torch.Tensor]) -> torch.Tensor:
    return members[0] if len(members) == 1 else torch.stack(members)
