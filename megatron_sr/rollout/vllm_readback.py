"""The weights that a live vLLM model computes with, under Hugging Face names, whatever layout its kernels keep them in.

| held in | read by | gives |
|---|---|---|
| plain parameters (embedding, norms, biases; every linear on GPU) | a look at the tensor | bits |
| CPU linears packed for AMX (`convert_weight_packed`, up to 1 MiB) | undoing the learnt permutation | bits |
| CPU linears behind a oneDNN handle (and any other operator) | probing the live operator with the identity | values |
| CPU linears too large to be probed (`vllm_faults.keep_large_linears_plain`), or where oneDNN has no BF16 | a look at the tensor | bits |
| CPU MoE experts (`prepack_moe_weight`: amx, vec, neon, vsx) | undoing the learnt permutation | bits |
| MoE experts of the Triton backend on GPU | a look at the tensor | bits |
| MXFP8 linears and experts of vLLM's emulation, and their scales | the codes that the values stand for: `vllm_mxfp8` | bits |

Values means that -0.0 and subnormals are not told from +0.0: see `packing`. Sources: vLLM 0.32 model_executor/layers/utils.py
(dispatch_cpu_unquantized_gemm), layers/fused_moe/experts/cpu_moe.py, layers/fused_moe/unquantized_fused_moe_method.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch

from megatron_sr.rollout import vllm_mxfp8
from megatron_sr.rollout.held import LiveView
from megatron_sr.rollout.packing import Permutation, probe_linear

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def live_views(
    model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16
) -> list[LiveView]:
    """Every place where the live model holds a weight; a tensor may be held in two (a tied or an untied head's table and operator).

    shapes: the Hugging Face names and shapes expected (`names.expected_shapes`); dtype: the model's, BF16 or FP16.
    Kernels replace their layouts at a reload, so take fresh views after each.
    Raises ValueError when a parameter has no name here, or a name has no place.
    """
    views = [view for path, module in model.named_modules() for view in _module_views(path, module, shapes, dtype)]
    held = {name for view in views for name in view.names}
    if held != set(shapes):
        raise ValueError(
            f"cannot read the engine's weights back: no place found for {sorted(set(shapes) - held)[:8]}, "
            f"places without a tensor {sorted(held - set(shapes))[:8]}"
        )
    return views


def _module_views(path: str, module: torch.nn.Module, shapes, dtype: torch.dtype) -> Iterator[LiveView]:
    parameters = dict(module.named_parameters(recurse=False))
    if vllm_mxfp8.is_quantized(module):
        yield from _mxfp8_views(path, module, parameters, shapes)
        return
    if "w13_weight" in parameters:
        yield from _expert_views(path, module, shapes)
        return
    for leaf, parameter in parameters.items():
        names = _hf_names(path, leaf, shapes)
        # The embedding's own operator is never called: look-ups use the table, and a tied head is seen at its own module.
        operator = (
            getattr(module, "cpu_linear", None) if leaf == "weight" and not path.endswith("embed_tokens") else None
        )
        if parameter.numel() and not getattr(operator, "__closure__", None):
            operator = None  # it holds nothing of its own: it computes with the parameter that it is given
        if parameter.numel() or operator is None:
            yield LiveView(names, True, lambda p=parameter, n=names: _split(_narrow(p.data, dtype), n, shapes))
        if operator is not None:
            yield _operator_view(module, operator, names, shapes, dtype)


def _hf_names(path: str, leaf: str, shapes) -> tuple[str, ...]:
    prefix, _, last = path.rpartition(".")
    names = tuple(f"{prefix}.{part}.{leaf}" for part in _FUSED.get(last, (last,))) if prefix else (f"{path}.{leaf}",)
    if names == ("lm_head.weight",) and "lm_head.weight" not in shapes:
        return ("model.embed_tokens.weight",)  # tied
    if lacking := [name for name in names if name not in shapes]:
        raise ValueError(
            f"the engine's parameter {path}.{leaf} would hold {lacking}, which its Hugging Face config does not name"
        )
    return names


def _split(whole: torch.Tensor, names, shapes) -> list[torch.Tensor]:
    """Cut a fused tensor along dim 0; rows beyond the last tensor are the vocabulary's padding."""
    out, at = [], 0
    for name in names:
        out.append(whole[at : at + shapes[name][0]])
        at += shapes[name][0]
    return out


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights that a kernel keeps widened to FP32 (AMX: biases, under 16 rows), narrowed to `dtype` again where that loses nothing."""
    narrow = tensor.to(dtype)
    return narrow if tensor.dtype == torch.float32 and torch.equal(narrow.float(), tensor) else tensor


def _operator_view(module, operator, names, shapes, dtype: torch.dtype) -> LiveView:
    rows, columns = sum(shapes[name][0] for name in names), shapes[names[0]][1]
    closure = dict(zip(operator.__code__.co_freevars, (cell.cell_contents for cell in operator.__closure__ or ())))
    packed = closure.get("packed_weight")
    if packed is not None:
        rows = closure["N"]  # the vocabulary's padding is packed too
        return LiveView(names, True, lambda: _split(_unpack_linear(packed, (rows, columns), dtype), names, shapes))
    weight = module.weight  # only the fall-back torch operator looks at it
    return LiveView(
        names, False, lambda: _split(probe_linear(lambda x: operator(x, weight, None), columns, dtype), names, shapes)
    )


def _unpack_linear(packed: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    if packed.dtype == torch.float32:  # under 16 rows: transposed and widened
        return _narrow(packed, dtype).t()
    return _linear_permutation(shape, dtype).undo(packed)


@lru_cache(maxsize=64)
def _linear_permutation(shape: tuple[int, int], dtype: torch.dtype) -> Permutation:
    return Permutation(torch.ops._C.convert_weight_packed, shape, dtype)


@lru_cache(maxsize=64)
def _expert_permutation(shape: tuple[int, int], isa: str, dtype: torch.dtype) -> Permutation:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return Permutation(lambda weight: cpu_prepack_moe_weight(weight[None], isa)[0], shape, dtype)


def _expert_views(path: str, module, shapes) -> Iterator[LiveView]:
    method = module.quant_method
    backend = method.unquantized_backend.name
    if backend == "CPU":
        experts = method.moe_kernel.fused_experts
        isa = None if experts._use_zentorch else experts.isa
    elif backend in ("TRITON", "BATCHED_TRITON"):
        isa = None
    else:
        raise ValueError(
            f"vLLM holds the experts of {path} in the layout of its {backend} MoE backend, which cannot be read back; "
            f"choose the Triton backend (moe_backend='triton')"
        )
    prefix = path.removesuffix(".routed_experts")
    for leaf, parts in (("w13_weight", ("gate_proj", "up_proj")), ("w2_weight", ("down_proj",))):
        held = getattr(module, leaf).data
        for expert in range(held.shape[0]):
            names = tuple(f"{prefix}.{expert}.{part}.weight" for part in parts)
            yield LiveView(names, True, lambda h=held, e=expert, n=names: _expert(h[e], isa, [shapes[x] for x in n]))


def _mxfp8_views(path: str, module, parameters, shapes) -> Iterator[LiveView]:
    """Codes and scales of MXFP8 layers; biases beside them as they are."""
    if "w13_weight" in parameters:
        experts = module.quant_method.moe_kernel.fused_experts
        isa = None if getattr(experts, "_use_zentorch", False) else getattr(experts, "isa", None)
        unpack = lambda held, names: _expert(held, isa, [shapes[name] for name in names])
        yield from vllm_mxfp8.expert_views(module, path.removesuffix(".routed_experts"), unpack)
        return
    for leaf, parameter in parameters.items():
        names = _hf_names(path, leaf, shapes)
        if leaf == "weight":
            yield from vllm_mxfp8.linear_views(module, names, lambda whole, n: _split(whole, n, shapes))
        elif leaf != "weight_scale":
            yield LiveView(names, True, lambda p=parameter, n=names: _split(p.data, n, shapes))


def _expert(held: torch.Tensor, isa: str | None, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """One expert's matrices, without the kernel's padding of the intermediate size (rows of each part, or columns of down)."""
    whole = held if isa is None else _expert_permutation(tuple(held.shape), isa, held.dtype).undo(held)
    return [_without_padding(part, shape) for part, shape in zip(whole.chunk(len(shapes)), shapes)]


def _without_padding(part: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The part proper; all of it, which then has a wrong shape, when the padding is not zero."""
    rows, columns = shape
    for padding in (part[rows:], part[:rows, columns:]):
        if padding.numel() and torch.count_nonzero(padding.contiguous().view(torch.int16)):
            return part
    return part[:rows, :columns]
