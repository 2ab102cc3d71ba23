"""What stochastic rounding cannot do in DeepSpeed: refused at start-up with the setting, the reason and the way out (C6).

Each entry is a place where model params come from something else than FP32 main params, or are changed or read elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from megatron_sr.config import FLAGS, ParamRounding

TESTED = "0.19"


class Refusal(NamedTuple):
    setting: str  # as in the DeepSpeed config
    found: Callable  # of the engine
    reason: str
    way_out: str = "leave it out"


def _offload(engine, kind: str):
    config = getattr(engine, f"zero_offload_{kind}")()
    return config is not None and str(getattr(config.device, "value", config.device))


def _given(*path: str):
    """Whether the DeepSpeed config has a true value there."""

    def found(engine):
        value = engine._config._param_dict
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return found


_REFUSALS = (
    Refusal("torch_autocast", lambda e: e.torch_autocast_enabled(), "params stay in FP32; there are no BF16 params to round to",
            'enable "bf16" instead'),
    Refusal("bf16, fp16", lambda e: not (e.bfloat16_enabled() or e.fp16_enabled()),
            "neither is enabled, so there are no 16-bit model params to round to", 'add "bf16": {"enabled": true}'),
    Refusal("bf16.bf16_master_weights_and_grads", lambda e: e.bf16_master_weights_and_gradients(),
            "it removes the FP32 main params; updates are lost before anything could round them"),
    Refusal("fp16.fp16_master_weights_and_grads", lambda e: e.fp16_master_weights_and_gradients(),
            "it removes the FP32 main params; updates are lost before anything could round them"),
    Refusal("zero_optimization.zenflow", lambda e: e.zenflow_config() is not None,
            "its selective optimizer updates important columns of the BF16 params in place, without FP32 main params"),
    Refusal("zero_optimization.offload_param.device nvme", lambda e: _offload(e, "param") == "nvme",
            "swapped params are cast while they are written to disk", "use cpu"),
    Refusal("zero_optimization.offload_optimizer.device nvme", lambda e: _offload(e, "optimizer") == "nvme",
            "it has not been tested with main params that are swapped to disk", "use cpu"),
    Refusal("zero_optimization.zero_quantized_weights", lambda e: e.zero_quantized_weights(),
            "the all-gather quantizes the rounded params again, to nearest INT8"),
    Refusal("zero_optimization.mics_shard_size", lambda e: (_given("zero_optimization", "mics_shard_size")(e) or -1) > 0,
            "which part of a parameter a rank holds under MiCS has not been tested"),
    Refusal("zero_optimization.elastic_checkpoint", lambda e: e.zero_elastic_checkpoint(),
            "such checkpoints leave out the param groups and with them the rounding state",
            "leave it out and use universal checkpoints to change the number of ranks"),
    Refusal("quantize_training", _given("quantize_training", "enabled"), "it changes weights after the optimizer step"),
    Refusal("compression_training", _given("compression_training", "weight_quantization", "shared_parameters", "enabled"),
            "it changes weights after the optimizer step"),
    Refusal("optimizer.legacy_fusion", lambda e: e.optimizer_legacy_fusion(), "the cast happens inside the fused kernel"),
    Refusal("optimizer.type Lamb", lambda e: not e.zero_optimization() and str(e.optimizer_name()).lower() == "lamb",
            "the cast happens inside the fused kernel", "use Adam or AdamW, or ZeRO"),
    Refusal("MoE layers", lambda e: e.has_moe_layers,
            "experts of different ranks have the same parameter names, so their noise would be the same"),
    Refusal("PipelineModule", lambda e: e.pipeline_parallelism, "pipeline stages have not been tested", "use ZeRO"),
)  # fmt: skip


def check_supported(engine, config: ParamRounding, has_identities: bool) -> None:
    """Raise ValueError for the first thing about a DeepSpeed engine that stochastic rounding does not support."""
    import deepspeed

    if not deepspeed.__version__.startswith(TESTED + "."):
        raise ValueError(
            f"param_rounding: DeepSpeed {deepspeed.__version__} is not supported, its cast sites are known for {TESTED}.x; "
            f'pip install "deepspeed=={TESTED}.*", or use "mode": "nearest"'
        )
    for refusal in _REFUSALS:
        if refusal.found(engine):
            raise ValueError(
                f"param_rounding stochastic does not work with {refusal.setting}: {refusal.reason}; {refusal.way_out}, "
                'or use "mode": "nearest"'
            )
    if _tensor_parallel(engine) > 1 and not has_identities:
        raise ValueError(
            "param_rounding stochastic: with tensor parallelism the name of a parameter does not say which part of the whole tensor "
            "a rank holds; pass identities={param: (key, [Segment, ...])} to megatron_sr.deepspeed.enable"
        )
    for field, default in (("save_model", "full"), ("log_interval", 0), ("verify_interval", 0)):
        if getattr(config, field) != default:
            raise ValueError(
                f"param_rounding.{field} is of the Megatron-Core backend only; leave it out under DeepSpeed"
            )
    if config.format == "mxfp8":
        raise ValueError('param_rounding.format mxfp8 is of the Megatron-Core backend only; use "bf16"')


@contextlib.contextmanager
def config_names():
    """Within it, messages of ValueErrors name settings as the DeepSpeed config does, not as command lines do."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        for field, flag in sorted(FLAGS.items(), key=lambda pair: -len(pair[1])):  # a flag may begin like another
            message = message.replace(flag, f'"{field}"')
        raise ValueError(f"param_rounding: {message}") from None


def _tensor_parallel(engine) -> int:
    if engine.autotp_size() > 1 or engine.mpu is None:
        return engine.autotp_size()
    size = getattr(engine.mpu, "get_tensor_model_parallel_world_size", None) or engine.mpu.get_model_parallel_world_size
    return size()
