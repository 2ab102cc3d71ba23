"""Tiny random Qwen2 / Qwen3 / Qwen3-MoE checkpoints with a byte-level tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch


def hf_config(
    family: str = "qwen3", *, vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, tied=False, experts=4, moe_width=64
):
    """A Hugging Face config with head size 32 (the least that vLLM's CPU attention takes)."""
    from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

    common = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        rope_theta=1e4,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-6,
        attention_dropout=0.0,
        initializer_range=0.05,
        eos_token_id=vocab - 1,
        bos_token_id=None,
        pad_token_id=vocab - 1,
    )
    if family == "qwen2":
        return Qwen2Config(intermediate_size=128, head_dim=32, **common)
    if family == "qwen3":
        return Qwen3Config(intermediate_size=128, head_dim=32, **common)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            intermediate_size=128,
            moe_intermediate_size=moe_width,
            head_dim=32,
            num_experts=experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            **common,
        )
    raise ValueError(family)


def make_checkpoint(directory: Path, family: str = "qwen3", seed: int = 0, **kwargs) -> Path:
    """Save a random BF16 checkpoint (config.json, model.safetensors) to `directory` and return it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(family, **kwargs)).to(torch.bfloat16)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # norms and biases too: replicas must be told apart from their initial 1 and 0
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(directory)
    return Path(directory)


def byte_tokenizer():
    """A byte-level tokenizer of 260 tokens with a small chat template; `<|end|>` ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    fast.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return fast
