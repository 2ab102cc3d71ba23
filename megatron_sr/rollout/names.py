"""Which Hugging Face tensors a Megatron parameter holds, for the Qwen2, Qwen3 and Qwen3-MoE families.

Both of Megatron's layer specs are known: the local one (`input_layernorm`) and Transformer Engine's, which moves the norms into the
linears (`linear_qkv.layer_norm_weight`) and numbers the experts of a grouped GEMM (`experts.linear_fc1.weight7`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FAMILIES = ("qwen2", "qwen3", "qwen3_moe")

# How the ranks of a tensor-parallel group hold a parameter.
REPLICATED = "replicated"
ROWS = "rows"  # split along dim 0
COLUMNS = "columns"  # split along dim 1
QKV = "qkv"  # rows; per query group: its query heads, its key head, its value head
GATE_UP = "gate_up"  # rows of the gate, then rows of the up projection, both split along dim 0
VOCABULARY = "vocabulary"  # rows, padded at the end


@dataclass(frozen=True)
class Entry:
    """hf: the Hugging Face names, in the order in which the parameter holds them. layout: one of the constants above."""

    hf: tuple[str, ...]
    layout: str
    expert: bool = False


_OUTSIDE = {
    "embedding.word_embeddings.weight": Entry(("model.embed_tokens.weight",), VOCABULARY),
    "decoder.final_layernorm.weight": Entry(("model.norm.weight",), REPLICATED),
    "output_layer.weight": Entry(("lm_head.weight",), VOCABULARY),
}

_INSIDE = {
    "input_layernorm.weight": (("input_layernorm.weight",), REPLICATED),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), REPLICATED),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), QKV),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), QKV),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), REPLICATED),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), REPLICATED),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), COLUMNS),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), REPLICATED),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), REPLICATED),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), COLUMNS),
    "mlp.router.weight": (("mlp.gate.weight",), REPLICATED),
}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")


def entry(name: str, *, layer: int | None = None, first_expert: int = 0) -> Entry:
    """The Hugging Face side of a GPTModel's parameter.

    name          as in `GPTModel.named_parameters()`; its layer and expert numbers are those of this rank
    layer         the layer's number in the whole model, from 0; None: as in `name`
    first_expert  number, in the whole model, of this rank's first expert

    Raises ValueError for a parameter outside the supported families.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if found := _LAYER.fullmatch(name):
        number, inside = int(found[1]) if layer is None else layer, found[2]
        if inside in _INSIDE:
            hf, layout = _INSIDE[inside]
            return Entry(tuple(f"model.layers.{number}.{x}" for x in hf), layout)
        if e := _EXPERT.fullmatch(inside):
            expert, fc = (e[1], e[2]) if e[1] else (e[4], e[3])
            prefix = f"model.layers.{number}.mlp.experts.{first_expert + int(expert)}."
            if fc == "1":
                return Entry((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), GATE_UP, expert=True)
            return Entry((f"{prefix}down_proj.weight",), COLUMNS, expert=True)
    raise ValueError(
        f"Megatron parameter {name!r} has no Hugging Face name here. Supported are the {', '.join(FAMILIES)} families with the local "
        f"or the Transformer Engine layer spec; other architectures need megatron-bridge"
    )


def layer_number(hf_name: str) -> int | None:
    """The decoder layer that a Hugging Face tensor belongs to; None outside the layers."""
    found = re.match(r"model\.layers\.(\d+)\.", hf_name)
    return int(found[1]) if found else None


def is_moe_layer(hf_config, layer: int) -> bool:
    """Whether decoder layer `layer` (from 0) holds experts. Source: transformers, modeling_qwen3_moe.Qwen3MoeDecoderLayer."""
    return (
        hf_config.model_type == "qwen3_moe"
        and layer not in (hf_config.mlp_only_layers or [])
        and hf_config.num_experts > 0
        and (layer + 1) % hf_config.decoder_sparse_step == 0
    )


def head_dim(hf_config) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads


def expected_shapes(hf_config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this config, in export order: embedding, layers, final norm, head.

    A tied model has no lm_head. Raises ValueError for a family that is not supported.
    """
    check_family(hf_config)
    c, d = hf_config, head_dim(hf_config)
    h, q, kv = c.hidden_size, c.num_attention_heads * d, c.num_key_value_heads * d
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, h)}
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = (h,)
        for x, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{p}self_attn.{x}_proj.weight"] = (rows, h)
        if c.model_type == "qwen2":
            for x, rows in (("q", q), ("k", kv), ("v", kv)):
                out[f"{p}self_attn.{x}_proj.bias"] = (rows,)
        else:
            out[p + "self_attn.q_norm.weight"] = (d,)
            out[p + "self_attn.k_norm.weight"] = (d,)
        out[p + "self_attn.o_proj.weight"] = (h, q)
        out[p + "post_attention_layernorm.weight"] = (h,)
        if is_moe_layer(c, i):
            out[p + "mlp.gate.weight"] = (c.num_experts, h)
            for e in range(c.num_experts):
                _add_mlp(out, f"{p}mlp.experts.{e}.", c.moe_intermediate_size, h)
        else:
            _add_mlp(out, p + "mlp.", c.intermediate_size, h)
    out["model.norm.weight"] = (h,)
    if not c.tie_word_embeddings:
        out["lm_head.weight"] = (c.vocab_size, h)
    return out


def _add_mlp(out: dict, prefix: str, intermediate: int, hidden: int) -> None:
    out[prefix + "gate_proj.weight"] = (intermediate, hidden)
    out[prefix + "up_proj.weight"] = (intermediate, hidden)
    out[prefix + "down_proj.weight"] = (hidden, intermediate)


def check_family(hf_config) -> None:
    """Raise ValueError unless the config's family is supported."""
    if hf_config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type {hf_config.model_type!r} is not supported; supported families: {', '.join(FAMILIES)}"
        )
