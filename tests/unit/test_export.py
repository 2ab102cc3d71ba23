"""Export of the largest name lists, and who exports which family. Real shards on real ranks: tests/rollout/test_export.py."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Qwen3MoeConfig

from megatron_sr.rollout import export, names
from megatron_sr.rollout.adapters import OwnMapping, adapter_for
from tests.tiny_models import hf_config


class OneRank:
    """`ExportGroups` of a job of one rank, which needs no process group."""

    pipeline_size = 1

    def tensor_rank(self, expert):
        return 0, 1

    def expert_rank(self):
        return 0, 1

    def gather_tensor(self, values, expert):
        return [[value] for value in values]

    def gather_experts(self, local):
        return list(local)

    def gather_stages(self, value):
        return {0: value}


class Leaf(torch.nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)


def tree(**children):
    module = torch.nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def megatron_like(config):
    """A module with the parameter names and shapes of Megatron's GPTModel (local spec), without its computation."""
    h, d = config.hidden_size, names.head_dim(config)
    q, kv, f = config.num_attention_heads * d, config.num_key_value_heads * d, config.moe_intermediate_size
    layers = []
    for i in range(config.num_hidden_layers):
        experts = [tree(linear_fc1=Leaf(2 * f, h), linear_fc2=Leaf(h, f)) for _ in range(config.num_experts)]
        layer = tree(
            input_layernorm=Leaf(h),
            self_attention=tree(linear_proj=Leaf(h, q), linear_qkv=Leaf(q + 2 * kv, h), q_layernorm=Leaf(d), k_layernorm=Leaf(d)),
            pre_mlp_layernorm=Leaf(h),
            mlp=tree(router=Leaf(config.num_experts, h), experts=tree(local_experts=torch.nn.ModuleList(experts))),
        )  # fmt: skip
        layer.layer_number = i + 1
        layers.append(layer)
    return tree(
        embedding=tree(word_embeddings=Leaf(config.vocab_size, h)),
        decoder=tree(layers=torch.nn.ModuleList(layers), final_layernorm=Leaf(h)),
        output_layer=Leaf(config.vocab_size, h),
    )


def qwen3_moe(layers, experts):
    return Qwen3MoeConfig(
        vocab_size=64, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        num_experts=experts, moe_intermediate_size=4, decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    )  # fmt: skip


def calls_to_export(layers, experts, monkeypatch):
    """Python calls that an export takes, and the names that it gives."""
    config = qwen3_moe(layers, experts)
    model = megatron_like(config)
    monkeypatch.setattr(export, "ExportGroups", OneRank)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        seen = [name for name, _ in export.export_hf(model, config)]
    finally:
        sys.setprofile(None)
    assert seen == list(names.expected_shapes(config))
    return calls, len(seen)


def test_point_7_the_work_of_an_export_is_linear_in_its_tensors(monkeypatch):
    """Calls, not seconds: twice the layers or experts, at most twice the calls."""
    base, _ = calls_to_export(4, 16, monkeypatch)
    deeper, _ = calls_to_export(8, 16, monkeypatch)
    wider, _ = calls_to_export(4, 32, monkeypatch)
    assert deeper <= 2.05 * base
    assert wider <= 2.05 * base


def test_point_7_the_names_of_qwen3_30b_a3b(monkeypatch):
    """48 layers of 128 experts. `tools/bench_sync.py --names` measures the seconds."""
    calls, tensors = calls_to_export(48, 128, monkeypatch)
    assert tensors == 48 * (9 + 3 * 128) + 3
    assert calls < 150 * tensors


def test_own_families_need_no_bridge():
    assert isinstance(adapter_for(hf_config("qwen3_moe"), "unused"), OwnMapping)


def test_c6_other_families_without_megatron_bridge_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)  # makes the import fail
    with pytest.raises(ValueError, match="'llama' is not one of qwen2, qwen3, qwen3_moe.*pip install megatron-bridge"):
        adapter_for(SimpleNamespace(model_type="llama"), "unused")


def test_other_families_go_through_megatron_bridge(monkeypatch):
    """A mock of megatron-bridge: it shows that its names and tensors pass, not that it works."""
    asked = []

    class AutoBridge:
        @classmethod
        def from_hf_pretrained(cls, directory):
            asked.append(directory)
            return cls()

        def export_hf_weights(self, chunks, cpu, show_progress):
            asked.append(len(chunks))
            yield "model.a.weight", torch.nn.Parameter(torch.ones(2))

    module = ModuleType("megatron.bridge")
    module.AutoBridge = AutoBridge
    monkeypatch.setitem(sys.modules, "megatron.bridge", module)
    adapter = adapter_for(SimpleNamespace(model_type="llama"), "folder")
    ((name, tensor),) = adapter.export(torch.nn.Linear(1, 1))
    assert (name, tensor.requires_grad, asked) == ("model.a.weight", False, ["folder", 1])
    with pytest.raises(ValueError, match="not other values"):
        next(adapter.export(torch.nn.Linear(1, 1), tensors={}))
