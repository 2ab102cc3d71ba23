"""MXFP8 weights under Hugging Face names, in the layout that vLLM calls `modelopt_mxfp8`.

    X.weight        float8_e4m3fn [out, in]         E4M3 codes
    X.weight_scale  uint8         [out, in / 32]    E8M0 scales

config.json says which layers: `quantization_config` with `quant_algo` MXFP8 and `ignore`, the modules that stay BF16. Here an
entry of `ignore` is a module's whole name, that of a module above it, or a glob (fnmatch) of one. vLLM 0.32 also takes an entry for a
piece of a name: "mlp.gate" then keeps "mlp.gate_up_proj" in BF16 too. So `ignored` writes whole names only, and `mxfp8_audit`
compares what came of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch

from megatron_sr.mxfp8 import BLOCK, MXFP8Blocks
from megatron_sr.rollout import names

SCALE = "_scale"  # added to a weight's name
CODES = torch.float8_e4m3fn
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_LINEAR = re.compile(r"model\.layers\.\d+\..+_proj\.weight")


def is_mxfp8(hf_config) -> bool:
    """Whether the config is of an MXFP8 checkpoint in this layout. Raises ValueError for another quantization."""
    quantization = _quantization(hf_config)
    if not quantization:
        return False
    if str(quantization.get("quant_algo", "")).upper() != "MXFP8":
        kind = quantization.get("quant_algo") or quantization.get("quant_method")
        raise ValueError(
            f"config.json has quantization {kind!r}: weights are exchanged and verified in BF16 and MXFP8 only; use the unquantized "
            "model, or one converted by megatron_sr.rollout.mxfp8_checkpoint"
        )
    return True


def expected_tensors(hf_config, dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of every tensor of a checkpoint with this config, in export order; a scale follows its weight.

    dtype: of the weights where the checkpoint is not MXFP8.

    Raises ValueError for an unsupported family or quantization, and for a weight whose rows blocks of 32 do not divide.
    """
    shapes = names.expected_shapes(hf_config)
    if not is_mxfp8(hf_config):
        return {name: (shape, dtype) for name, shape in shapes.items()}
    ignore = _quantization(hf_config).get("ignore") or []
    quantized = {name for name in shapes if is_linear(name) and not _is_ignored(name, ignore)}
    return with_scales(shapes, quantized)


def is_linear(name: str) -> bool:
    """Whether the tensor is the weight of a linear layer that MXFP8 quantizes: attention, MLP and experts of the decoder layers."""
    return _LINEAR.fullmatch(name) is not None


def with_scales(
    shapes: Mapping[str, tuple[int, ...]], quantized: set[str]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) when the weights `quantized` are MXFP8 and the others BF16."""
    out = {}
    for name, shape in shapes.items():
        if name not in quantized:
            out[name] = shape, torch.bfloat16
            continue
        if shape[-1] % BLOCK:
            raise ValueError(f"{name} has {shape[-1]} columns, which MXFP8's blocks of {BLOCK} do not divide")
        out[name] = shape, CODES
        out[name + SCALE] = (*shape[:-1], shape[-1] // BLOCK), torch.uint8
    return out


def check_ignore(hf_config) -> None:
    """Raise ValueError when vLLM would read an entry of `ignore` as a piece of the name of a layer that is MXFP8."""
    ignore = _quantization(hf_config).get("ignore") or []
    for name, (_, dtype) in expected_tensors(hf_config).items():
        if dtype != CODES:
            continue
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        live = f"{prefix}.{_FUSED.get(last, last)}"
        for entry in ignore:
            if entry in live:
                raise ValueError(
                    f"quantization_config in config.json ignores {entry!r}, which names no module above {name}; but vLLM takes it for "
                    f"a piece of the name of {live}, and would leave that in BF16 too: write whole names of modules"
                )


def dequantized(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The BF16 weights, exact, that tensors in this layout stand for; scales are used up."""
    return {
        name: MXFP8Blocks(tensor.view(torch.uint8), tensors[name + SCALE], -1).dequantize(torch.bfloat16)
        if tensor.dtype == CODES
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether E4M3 codes, or E8M0 scales (uint8), hold a NaN."""
    if tensor.dtype == CODES:
        return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return tensor.dtype == torch.uint8 and bool((tensor == 0xFF).any())


def quantization_config(hf_config, bf16_layers: set[int] = frozenset()) -> dict:
    """The `quantization_config` of an MXFP8 version of a BF16 model. bf16_layers: layers, from 0, that stay BF16."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
        "ignore": list(ignored(hf_config, bf16_layers)),
    }


def ignored(hf_config, bf16_layers: set[int] = frozenset()) -> Iterator[str]:
    """Whole names of the modules that MXFP8 leaves alone although vLLM would quantize them: head, routers, BF16 layers."""
    yield "lm_head"
    for name in names.expected_shapes(hf_config):
        module, layer = name.removesuffix(".weight"), names.layer_number(name)
        if module.endswith(".mlp.gate"):
            yield module
        elif layer in bf16_layers and is_linear(name):
            if ".mlp.experts." not in module:
                yield module
            elif module.endswith(".experts.0.gate_proj"):  # vLLM has one module for all experts of a layer
                yield module.removesuffix(".0.gate_proj")


def _quantization(hf_config) -> dict | None:
    found = getattr(hf_config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found


def _is_ignored(name: str, ignore: list[str]) -> bool:
    module = name.removesuffix(".weight")
    above = [module] + [module[:i] for i, c in enumerate(module) if c == "."]
    return any(entry in above or fnmatchcase(module, entry) for entry in ignore)
