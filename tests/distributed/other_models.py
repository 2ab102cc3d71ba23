"""Megatron models beyond Qwen, built from local specs (no Transformer Engine): what their parameters are called and how they are cut.

Kernels of other packages are never run here. Where a module asks for one only to be constructed (FLA for Gated DeltaNet, mamba_ssm for
Mamba, Transformer Engine's attention for MLA), that question is answered by a stand-in: names, shapes and sharding stay Megatron's.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_sr.megatron.model import Layout

_MOE = dict(
    num_moe_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2, moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="none", moe_shared_expert_intermediate_size=48, moe_shared_expert_gate=True,
)  # fmt: skip
_MLA = dict(
    multi_latent_attention=True,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
)
_GDN = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=4, deterministic_mode=True,
)  # fmt: skip
_MAMBA = dict(mamba_state_dim=16, mamba_head_dim=16, mamba_num_groups=2, mamba_num_heads=8)


def make(kind: str, layout: Layout):
    """(model, its configuration): this rank's part of a two-layer model in BF16."""
    config, model = {"shared experts": _shared_experts, "MLA": _mla, "MTP": _mtp, "GDN": _gdn, "Mamba": _mamba}[kind](
        layout
    )
    return model.to(torch.bfloat16), config


def _config(layout: Layout, cls=TransformerConfig, **fields):
    moe = "num_moe_experts" in fields
    return cls(
        num_layers=2, hidden_size=64, num_attention_heads=4, kv_channels=16, ffn_hidden_size=96, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=True,
        persist_layer_norm=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert, sequence_parallel=moe and layout.tensor > 1, **fields,
    )  # fmt: skip


def _gpt(config, spec, **options) -> GPTModel:
    return GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **options,
    )


def _shared_experts(layout):
    config = _config(layout, **_MOE)
    return config, _gpt(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False))


class _Attention(DotProductAttention):
    """MLA hands over sizes of keys and values that only Transformer Engine's attention takes; it has no parameters."""

    def __init__(self, *args, k_channels=None, v_channels=None, **options):
        super().__init__(*args, **options)


def _mla(layout):
    config = _config(layout, MLATransformerConfig, **_MLA, **_MOE, moe_layer_freq=[0, 1])
    spec = copy.deepcopy(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = _Attention
    return config, _gpt(config, spec)


def _mtp(layout):
    config = _config(layout, mtp_num_layers=1)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return config, _gpt(config, spec, mtp_block_spec=mtp)


def _gdn(layout):
    """Gated DeltaNet and attention in turn, over experts: the shape of Qwen3-Next and Qwen3.5."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common

    common.HAVE_FLA = True
    config, local = _config(layout, **_MOE, **_GDN), LocalSpecProvider()
    config.linear_attention_freq = [1, 0]  # after its own checks, which ask for Transformer Engine
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec.layer_specs = [copy.deepcopy(layer) for layer in spec.layer_specs]
    if parallel_state.is_pipeline_first_stage():
        spec.layer_specs[0].submodules.self_attention = ModuleSpec(
            module=GatedDeltaNet,
            submodules=common.GatedDeltaNetSubmodules(
                in_proj=local.column_parallel_linear(),
                out_norm=local.layer_norm(rms_norm=True, for_qk=False),
                out_proj=local.row_parallel_linear(),
            ),
        )
    return config, _gpt(config, spec)


def _mamba(layout):
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules

    mamba_mixer.HAVE_MAMBA_SSM = True
    config, local = _config(layout, **_MAMBA), LocalSpecProvider()
    mixer = ModuleSpec(
        module=mamba_mixer.MambaMixer,
        params={"expand": 2, "rmsnorm": False},
        submodules=mamba_mixer.MambaMixerSubmodules(
            in_proj=local.column_parallel_linear(), out_proj=local.row_parallel_linear()
        ),
    )
    layer = MambaLayerSubmodules(
        norm=local.layer_norm(rms_norm=True, for_qk=False), mixer=mixer, mamba_bda=get_bias_dropout_add
    )
    stack = HybridStackSubmodules(mamba_layer=ModuleSpec(module=MambaLayer, submodules=layer))
    spec = ModuleSpec(module=HybridStack, params={"post_layer_norm": False}, submodules=stack)
    pattern = "M|M" if layout.pipeline == 2 else "MM"
    model = HybridModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=32,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    return config, model
