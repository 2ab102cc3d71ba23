"""Names and shards between Megatron and Hugging Face, without ranks: the mapping itself, both ways."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_sr.rollout import names, shards
from tests.tiny_models import hf_config, make_checkpoint

FAMILIES = [("qwen2", {"hidden": 128}), ("qwen3", {}), ("qwen3", {"tied": True}), ("qwen3_moe", {})]


def megatron_names(config, transformer_engine):
    """GPTModel's parameter names for a config, by layer spec (megatron.core 0.19, models/gpt/gpt_layer_specs.py)."""
    out = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    out += [] if config.tie_word_embeddings else ["output_layer.weight"]
    for i in range(config.num_hidden_layers):
        p, moe = f"decoder.layers.{i}.", names.is_moe_layer(config, i)
        out += [p + "self_attention.linear_qkv.weight", p + "self_attention.linear_proj.weight"]
        if config.model_type == "qwen2":
            out += [p + "self_attention.linear_qkv.bias"]
        else:
            out += [p + "self_attention.q_layernorm.weight", p + "self_attention.k_layernorm.weight"]
        out += [p + ("self_attention.linear_qkv.layer_norm_weight" if transformer_engine else "input_layernorm.weight")]
        if moe:
            out += [p + "pre_mlp_layernorm.weight", p + "mlp.router.weight"]
            for e in range(config.num_experts):
                for fc in (1, 2):
                    grouped, single = f"linear_fc{fc}.weight{e}", f"local_experts.{e}.linear_fc{fc}.weight"
                    out += [p + "mlp.experts." + (grouped if transformer_engine else single)]
        else:
            out += [p + ("mlp.linear_fc1.layer_norm_weight" if transformer_engine else "pre_mlp_layernorm.weight")]
            out += [p + "mlp.linear_fc1.weight", p + "mlp.linear_fc2.weight"]
    return out


@pytest.mark.parametrize("family, arguments", FAMILIES)
def test_expected_shapes_are_those_of_a_saved_checkpoint(family, arguments, tmp_path):
    saved = load_file(make_checkpoint(tmp_path, family, **arguments) / "model.safetensors")
    expected = names.expected_shapes(hf_config(family, **arguments))
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == expected


@pytest.mark.parametrize("transformer_engine", [False, True])
@pytest.mark.parametrize("family, arguments", FAMILIES)
def test_every_tensor_has_exactly_one_megatron_parameter(family, arguments, transformer_engine):
    config = hf_config(family, **arguments)
    found = [hf for name in megatron_names(config, transformer_engine) for hf in names.entry(name).hf]
    assert sorted(found) == sorted(names.expected_shapes(config))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_cut_then_join_is_the_identity(family, size, dtype, transformer_engine):
    config = hf_config(family[0], **{**family[1], "heads": 8, "kv_heads": 4})
    shapes = names.expected_shapes(config)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    for name in megatron_names(config, transformer_engine):
        entry = names.entry(name)
        whole = [weights[x] for x in entry.hf]
        rows = sum(t.shape[0] for t in whole) // size
        pieces = [shards.cut(entry, whole, config, rank, size, rows) for rank in range(size)]
        if size > 1 and entry.layout != names.REPLICATED:
            assert sum(p.numel() for p in pieces) == sum(t.numel() for t in whole), name
        for a, b in zip(whole, shards.join(entry, pieces, config)):
            assert torch.equal(a, b), name


def test_query_groups_are_interleaved_as_megatron_stores_them():
    """linear_qkv holds, per query group, its query heads, its key head, its value head (facts: linear_qkv viewed)."""
    config = hf_config("qwen3", heads=4, kv_heads=2)
    entry = names.entry("decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (torch.full((heads * 32, 64), float(tag)) for heads, tag in ((4, 0), (2, 10), (2, 20)))
    q += torch.arange(4.0).repeat_interleave(32)[:, None]
    k += torch.arange(2.0).repeat_interleave(32)[:, None]
    v += torch.arange(2.0).repeat_interleave(32)[:, None]
    whole = shards.cut(entry, [q, k, v], config, 0, 1, 256)
    assert whole[::32, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_padded_vocabulary_is_filled_with_zeros_and_stripped():
    config = hf_config("qwen3", vocab=250)
    entry = names.entry("embedding.word_embeddings.weight")
    table = torch.randn(250, 64)
    pieces = [shards.cut(entry, [table], config, rank, 2, 128) for rank in (0, 1)]
    assert [tuple(p.shape) for p in pieces] == [(128, 64)] * 2
    assert pieces[1][122:].count_nonzero() == 0
    assert torch.equal(shards.join(entry, pieces, config)[0], table)


def test_layer_and_expert_numbers_are_those_of_the_whole_model():
    entry = names.entry("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", layer=5, first_expert=8)
    assert entry.hf == ("model.layers.5.mlp.experts.9.gate_proj.weight", "model.layers.5.mlp.experts.9.up_proj.weight")


def test_dense_layers_of_a_mixture_follow_the_config():
    config = hf_config("qwen3_moe", layers=4)
    config.mlp_only_layers, config.decoder_sparse_step = [1], 2
    assert [names.is_moe_layer(config, i) for i in range(4)] == [False, False, False, True]
    assert "model.layers.1.mlp.up_proj.weight" in names.expected_shapes(config)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.weight1",
        "decoder.layers.0.self_attention.linear_proj.bias",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_unknown_parameters_are_named_with_what_is_supported(name):
    with pytest.raises(ValueError, match=f"{name}.*qwen2, qwen3, qwen3_moe"):
        names.entry(name)


def test_unknown_families_are_named_with_what_is_supported():
    config = hf_config("qwen3")
    config.model_type = "llama"
    with pytest.raises(ValueError, match="'llama' is not supported; supported families: qwen2, qwen3, qwen3_moe"):
        names.expected_shapes(config)
