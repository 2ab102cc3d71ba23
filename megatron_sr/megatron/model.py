"""A Megatron-Core GPT model, its DDP wrapper and its optimizer from a Hugging Face config (Qwen2, Qwen3, Qwen3-MoE shapes).

Source of the settings: megatron.core 0.19 `TransformerConfig`, `GPTModel`, `get_megatron_optimizer`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Layout:
    """Model-parallel sizes, by Megatron's names. The data-parallel size follows from the world size."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def data(self, world_size: int) -> int:
        """Data-parallel size. Raises ValueError when `world_size` ranks cannot be laid out so."""
        model = self.tensor * self.pipeline
        if world_size % model:
            raise ValueError(
                f"--tensor-model-parallel-size {self.tensor} x --pipeline-model-parallel-size {self.pipeline} needs a multiple of "
                f"{model} ranks, but there are {world_size}; change --nproc-per-node or the sizes"
            )
        if (world_size // self.pipeline) % self.expert:
            raise ValueError(
                f"--expert-model-parallel-size {self.expert} does not divide the {world_size // self.pipeline} ranks of a pipeline "
                f"stage; choose a divisor"
            )
        return world_size // model


def initialize_model_parallel(layout: Layout, seed: int) -> None:
    """Megatron's process groups and random states. torch.distributed must be initialised. Raises ValueError as `Layout.data`."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    layout.data(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def transformer_config(hf, layout: Layout, dtype: torch.dtype = torch.bfloat16):
    """megatron.core TransformerConfig of a Hugging Face config.

    Raises ValueError for an architecture outside the Qwen2, Qwen3 and Qwen3-MoE families, and for sizes the layout cannot split.
    """
    families = ("qwen2", "qwen3", "qwen3_moe")
    if hf.model_type not in families:
        raise ValueError(
            f"model_type {hf.model_type!r} is not one of {', '.join(families)}; use a model of these families"
        )
    _check_function(hf)
    for what, size, parts in (
        ("num_attention_heads", hf.num_attention_heads, layout.tensor),
        ("num_key_value_heads", hf.num_key_value_heads, layout.tensor),
        ("vocab_size", hf.vocab_size, layout.tensor),
        ("num_hidden_layers", hf.num_hidden_layers, layout.pipeline),
        ("num_experts", getattr(hf, "num_experts", layout.expert), layout.expert),
    ):
        if size % parts:
            raise ValueError(
                f"{what}={size} of the model cannot be split into {parts} equal parts; choose another layout"
            )
    is_moe = hf.model_type == "qwen3_moe"
    moe = (
        dict(
            num_moe_experts=hf.num_experts,
            moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_router_topk=hf.num_experts_per_tok,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
            moe_grouped_gemm=False,
            moe_router_pre_softmax=False,
            expert_model_parallel_size=layout.expert,
        )
        if is_moe
        else {}
    )
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type != "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=is_moe and layout.tensor > 1,  # Megatron requires it for MoE with tensor parallelism
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **moe,
    )


def _check_function(hf) -> None:
    """Raise ValueError for a field of the config that changes the function and that `transformer_config` does not carry over.

    Equal weights would then be another model in the trainer than in the engine, and no comparison of bits would show it.
    """
    rope = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    supported = {
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        "hidden_act": (hf.hidden_act, "silu"),
        "use_sliding_window": (bool(getattr(hf, "use_sliding_window", False)), False),
        "layer_types": (sorted(set(getattr(hf, "layer_types", None) or [])) or ["full_attention"], ["full_attention"]),
    }
    if hf.model_type != "qwen2":  # Qwen2 has biases in its attention, always
        supported["attention_bias"] = (bool(getattr(hf, "attention_bias", False)), False)
    if hf.model_type == "qwen3_moe":
        supported |= {
            "norm_topk_prob": (hf.norm_topk_prob, True),
            "mlp_only_layers": (list(hf.mlp_only_layers or []), []),
            "decoder_sparse_step": (hf.decoder_sparse_step, 1),
        }
    for field, (value, only) in supported.items():
        if value != only:
            raise ValueError(
                f"config.json has {field}={value!r}, but the Megatron model built here computes {field}={only!r}: trainer and engine "
                f"would be two different models; use a model with {field}={only!r}"
            )


def gpt_model(hf, config):
    """megatron.core GPTModel (local layer spec) of this rank's pipeline stage, its parameters in `config.params_dtype`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    rope = getattr(hf, "rope_parameters", None) or {}
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=rope.get("rope_theta", getattr(hf, "rope_theta", 10000.0)),
    ).to(config.params_dtype)


def wrap_ddp(model, config):
    """Megatron's DistributedDataParallel (FP32 gradient reduction, distributed-optimizer buffers) around a GPTModel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
    )
    ddp = DistributedDataParallel(config, ddp_config, Float16Module(config, model))
    ddp.broadcast_params()
    return ddp


def build_optimizer(ddp, config, lr: float, clip_grad: float = 0.0, weight_decay: float = 0.0, **loss_scale):
    """Megatron's distributed Adam(W) over `ddp`, with the hooks that the pipeline schedules need set on `config`.

    loss_scale  for FP16 params: fields of `OptimizerConfig` for the dynamic loss scale (initial_loss_scale, min_loss_scale,
                loss_scale_window, hysteresis); Megatron's defaults for those left out.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr,
            weight_decay=weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            clip_grad=clip_grad,
            **loss_scale,
        ),
        [ddp],
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer
