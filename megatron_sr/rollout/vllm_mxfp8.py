"""MXFP8 in vLLM on machines without MXFP8 kernels: run on CPU, and read codes and scales back from the live model.

vLLM's own software emulation multiplies the codes by their scales once, at load, and computes in BF16. It is not offered on
CPU, so `emulate_on_cpu` registers it there: linear layers through vLLM's public `register_linear_kernel`, experts as a subclass
of vLLM's method that hands the dequantized weights to vLLM's own BF16 experts of the CPU. Logprobs equal those of an engine that
loads the dequantized weights as BF16. Activations stay BF16: on a GPU with MXFP8 kernels they would be quantized too.

Every value is a code times a power of two that BF16 holds exactly, and the scales stay beside the weights, so the codes that the
live weights stand for can be read back bit for bit. On GPU, kernels keep MXFP8 in layouts of their own; these were never run.
Source: vLLM 0.32 layers/quantization/modelopt.py (`ModelOptMxFp8FusedMoE`), kernels/linear/mxfp8/emulation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megatron_sr import mxfp8
from megatron_sr.rollout.held import LiveView
from megatron_sr.rollout.mxfp8_layout import CODES, SCALE, check_ignore


def prepare(hf_config, tensor_parallel_size: int) -> None:
    """Before an engine of an MXFP8 checkpoint with this config is built in this process. Raises ValueError for what cannot work."""
    check_ignore(hf_config)
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and tensor_parallel_size > 1:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size}: vLLM's workers are processes of their own then, in which MXFP8 is not "
            "emulated on CPU; use one worker"
        )
    emulate_on_cpu()


def emulate_on_cpu() -> None:
    """Make vLLM take MXFP8 checkpoints on CPU. Safe to call twice; changes nothing on other devices."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    if not current_platform.is_cpu() or issubclass(modelopt.ModelOptMxFp8Config.FusedMoEMethodCls, _CPUExperts):
        return
    linear.register_linear_kernel(linear.EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
    method = modelopt.ModelOptMxFp8FusedMoE
    modelopt.ModelOptMxFp8Config.FusedMoEMethodCls = type("CPUMxFp8Experts", (_CPUExperts, method), {})


class _CPUExperts:
    """Mixed into vLLM's `ModelOptMxFp8FusedMoE`: dequantize at load, then vLLM's unquantized experts for the CPU."""

    def __init__(self, quant_config, moe_config):
        from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
        from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend

        FusedMoEMethodBase.__init__(self, moe_config)
        self.weight_block_size, self.quant_config = [1, mxfp8.BLOCK], quant_config
        self.mxfp8_backend = Fp8MoeBackend.EMULATION
        self._unquantized, self.experts_cls = select_unquantized_moe_backend(moe_config=moe_config)

    def process_weights_after_loading(self, layer) -> None:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import make_unquantized_moe_kernel
        from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
        from vllm.model_executor.utils import replace_parameter

        self._check_weight_dtypes(layer)
        for weight in ("w13_weight", "w2_weight"):
            values = dequant_mxfp8_to_bf16(getattr(layer, weight), getattr(layer, weight + SCALE))
            replace_parameter(layer, weight, values)
        if self.moe_kernel is None:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel = make_unquantized_moe_kernel(
                quant_config=self.moe_quant_config,
                moe_config=self.moe,
                backend=self._unquantized,
                experts_cls=self.experts_cls,
                routing_tables=layer._expert_routing_tables(),
            )
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)  # at every reload: packs the weights

    def get_fused_moe_quant_config(self, layer):
        from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

        return FusedMoEQuantConfig.make()


def is_quantized(module: torch.nn.Module) -> bool:
    """Whether a live module (a linear layer, or all routed experts of a layer) holds MXFP8 weights."""
    return any(name.endswith("weight" + SCALE) for name, _ in module.named_parameters(recurse=False))


def code_view(names: tuple[str, ...], read_values, read_scale) -> Iterator[LiveView]:
    """Views of weights and of their scales.

    names        the weights, in the order in which the module holds them.
    read_values  their live values, BF16, or their codes; read_scale: their scales; both callables give a list, in that order.
    """
    yield LiveView(tuple(name + SCALE for name in names), True, read_scale)
    yield LiveView(names, True, lambda: [_codes(v, s) for v, s in zip(read_values(), read_scale(), strict=True)])


def _codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The codes that live values stand for; the values themselves, which no digest of codes equals, when they are no MXFP8 numbers."""
    if values.dtype == CODES:
        return values
    try:
        return mxfp8.encode(values, scale.contiguous()).view(CODES)
    except ValueError:
        return values


def linear_views(module: torch.nn.Module, names: tuple[str, ...], split: Callable) -> Iterator[LiveView]:
    """Views of a live linear layer. split: cuts a tensor of the fused layer into those of `names`, along dim 0."""
    _check_kernel(module.quant_method, names[0])
    scales = tuple(name + SCALE for name in names)
    yield from code_view(
        names, lambda: split(module.weight.data, names), lambda: split(module.weight_scale.data, scales)
    )


def expert_views(module: torch.nn.Module, prefix: str, unpack: Callable) -> Iterator[LiveView]:
    """Views of the routed experts of a layer.

    prefix  Hugging Face name of the experts, "model.layers.0.mlp.experts".
    unpack  (live matrix of one expert, names) -> its BF16 matrices under these names.
    """
    _check_kernel(module.quant_method, prefix)
    for leaf, parts in (("w13_weight", ("gate_proj", "up_proj")), ("w2_weight", ("down_proj",))):
        held, scale = getattr(module, leaf).data, getattr(module, leaf + SCALE).data
        for expert in range(held.shape[0]):
            names = tuple(f"{prefix}.{expert}.{part}.weight" for part in parts)
            yield from code_view(
                names,
                lambda h=held[expert], n=names: unpack(h, n),
                lambda s=scale[expert], n=names: list(s.chunk(len(n))),
            )


def _check_kernel(method, name: str) -> None:
    """Raise ValueError unless the layer's weights are kept as vLLM's emulation keeps them."""
    kernel = type(getattr(method, "kernel", None) or getattr(method, "moe_kernel", None)).__name__
    if not isinstance(method, _CPUExperts) and kernel != "EmulationMxfp8LinearKernel":
        raise ValueError(
            f"vLLM holds {name} in the MXFP8 layout of {kernel}, which cannot be read back yet, so updates could not be verified; "
            "use a BF16 rollout engine, which takes the same values"
        )
