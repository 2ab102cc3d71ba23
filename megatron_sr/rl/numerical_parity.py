"""`--numerical-parity`: trainer and engine compute one function, deterministically, and what still differs is named.

For controlled comparisons (of roundings, of formats) the trainer-engine gap must not be a third variable. The mode turns on
deterministic algorithms in torch and Megatron, batch-invariant kernels in vLLM on CUDA, FP32 attention in vLLM on CPU, and gives
the trainer's forward pass the engine's arithmetic (`engine_numerics`). At start-up every kind of operator is compared: both
sides' own, on equal inputs taken from the live engine.
"""

from __future__ import annotations

import os

import torch

from megatron_sr.rl import engine_numerics

_CUDA_ENVIRONMENT = {
    "VLLM_BATCH_INVARIANT": "1",
    "NCCL_ALGO": "Ring",  # as Megatron's --deterministic-mode demands
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def check(args) -> None:
    """Raise ValueError for flags with which the comparison would mean nothing."""
    if not args.numerical_parity:
        return
    for flag, value, reason in (
        ("--tensor-model-parallel-size", args.tensor_model_parallel_size, "sums over ranks are in another order than the engine's"),
        ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size, "residuals cross stages in BF16"),
        ("--expert-model-parallel-size", args.expert_model_parallel_size, "expert outputs are summed in another order"),
    ):  # fmt: skip
        if value > 1:
            raise ValueError(f"--numerical-parity with {flag} {value}: {reason}; use 1 (data parallelism is fine)")
    if args.max_staleness:
        raise ValueError(
            f"--numerical-parity with --max-staleness {args.max_staleness}: older weights generate, at times that differ from run to run; "
            f"use 0"
        )
    if args.rollout_engine != "in-process":
        raise ValueError(
            f"--numerical-parity with --rollout-engine {args.rollout_engine}: operators are compared inside the engine; use in-process"
        )
    if (args.param_rounding_format or "bf16") == "mxfp8":
        raise ValueError(
            "--numerical-parity with --param-rounding-format mxfp8: the engine's MXFP8 arithmetic is not known; use bf16"
        )
    for name, value in _CUDA_ENVIRONMENT.items():
        if torch.cuda.is_available() and os.environ.get(name, value) != value:
            raise ValueError(f"--numerical-parity needs {name}={value}, but {name}={os.environ[name]} is set; unset it")


def prepare() -> None:
    """Before process groups and the engine: deterministic algorithms, the environment that they need on CUDA, no AMX on CPU."""
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available():
        os.environ.update(_CUDA_ENVIRONMENT)
    else:
        # vLLM chooses its CPU attention by this function. The kernel for AMX rounds the attention probabilities to BF16, which nothing
        # in the trainer does; the other one computes in FP32.
        torch.cpu._is_amx_tile_supported = lambda: False


def install(policy) -> str:
    """Give the trainer's forward pass the engine's arithmetic, once the engine exists; returns how the engine rounds."""
    rounding = engine_numerics.engine_rounding()
    engine_numerics.use_engine_numerics(policy.gpt, rounding)
    policy.token_log_probs = engine_numerics.log_probs
    return rounding


def compare_operators(policy, engine, prompts: list[list[int]]) -> list[dict]:
    """Run the trainer's operators on the inputs that the live engine's own had while it read `prompts`, and compare the bits.

    engine: a `VLLMEngine` in this process. Returns per kind: operator, elements, equal (share with the same bits), max_difference.
    """
    from megatron_sr.rollout.vllm_recording import record_modules

    calls = record_modules(
        getattr(engine, "engine", engine), prompts
    )  # without what `--weight-sync delta` puts around it
    found: dict[str, list] = {}
    with torch.no_grad():
        for path, inputs, output in calls:
            for kind, ours, theirs in _pairs(policy, path, inputs, output):
                ours, theirs = ours.reshape(theirs.shape), theirs.to(ours.dtype)
                row = found.setdefault(kind, [0, 0, 0.0])
                row[0] += theirs.numel()
                row[1] += int((ours == theirs).sum())
                row[2] = max(row[2], float((ours.float() - theirs.float()).abs().max()))
    return [
        {"operator": kind, "elements": count, "equal": equal / count, "max_difference": largest}
        for kind, (count, equal, largest) in found.items()
    ]


def operator_table(rows: list[dict]) -> str:
    """The comparison for people; what is not exact comes with its share and largest difference."""
    lines = ["numerical parity: operators of trainer and engine on equal inputs"]
    for row in rows:
        verdict = (
            "equal bits"
            if row["equal"] == 1
            else f"{100 * row['equal']:.2f} % equal, differs by up to {row['max_difference']:.3g}"
        )
        lines.append(f"  {row['operator']:<24} {row['elements']:>9,} elements   {verdict}")
    return "\n".join(lines)


def _pairs(policy, path: str, inputs: list, output):
    """(kind, the trainer's result, the engine's) of one call of one module of vLLM's model."""
    gpt, layer, kind = policy.gpt, None, path
    if path.startswith("model.layers.") and path.count(".") > 2:
        _, _, number, kind = path.split(".", 3)
        layer = gpt.decoder.layers[int(number)]
    first = output[0] if isinstance(output, tuple) else output
    if kind == "model.embed_tokens":
        yield "embedding", gpt.embedding.word_embeddings(inputs[0][None].long())[0], first
    elif kind == "logits_processor":
        yield "output layer", gpt.output_layer(inputs[1][:, None], weight=_head(gpt))[0], first
        targets = torch.zeros(len(first), 1, dtype=torch.int64)
        yield (
            "log-softmax",
            policy.token_log_probs(first[:, None], targets),
            first.log_softmax(-1, dtype=torch.float32)[:, :1],
        )
    elif kind in ("input_layernorm", "post_attention_layernorm", "model.norm"):
        norm = gpt.decoder.final_layernorm if layer is None else {
            "input_layernorm": layer.input_layernorm, "post_attention_layernorm": layer.pre_mlp_layernorm}[kind]  # fmt: skip
        summed = inputs[0] if len(inputs) == 1 else inputs[0].float() + inputs[1].float()
        yield "RMSNorm", norm(summed), first
        if len(inputs) == 2:
            yield "residual sum", summed.to(torch.bfloat16), output[1]
    elif kind in ("self_attn.q_norm", "self_attn.k_norm"):
        attention = layer.self_attention
        yield "RMSNorm of q, k", (attention.q_layernorm if "q_" in kind else attention.k_layernorm)(inputs[0]), first
    elif kind == "self_attn.qkv_proj":
        ours, _ = layer.self_attention.linear_qkv(inputs[0][:, None])
        yield "linear", _split_qkv(ours[:, 0], policy.hf_config), first
    elif kind == "self_attn.rotary_emb":
        yield from _rotary_pairs(gpt, inputs, output)
    elif kind == "self_attn.attn":
        yield "attention", _attention(layer, inputs, policy.hf_config), first
    elif kind in ("self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        ours = {"self_attn.o_proj": lambda: layer.self_attention.linear_proj, "mlp.gate_up_proj": lambda: layer.mlp.linear_fc1,
                "mlp.down_proj": lambda: layer.mlp.linear_fc2}[kind]()  # fmt: skip
        yield "linear", ours(inputs[0][:, None])[0], first
    elif kind == "mlp.act_fn":
        gate, up = inputs[0].chunk(2, -1)
        yield "SiLU x up", torch.nn.functional.silu(gate) * up, first
    elif kind == "mlp" and not hasattr(layer.mlp, "linear_fc1"):
        yield "mixture of experts", layer.mlp(inputs[0][:, None])[0], first


def _head(gpt):
    return gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None


def _split_qkv(mixed: torch.Tensor, hf) -> torch.Tensor:
    """Megatron's [tokens, groups x (queries, key, value)] -> vLLM's [tokens, all queries, all keys, all values]."""
    from megatron_sr.rollout.names import head_dim

    grouped = mixed.view(len(mixed), hf.num_key_value_heads, -1, head_dim(hf))
    return torch.cat([x.reshape(len(mixed), -1) for x in (grouped[:, :, :-2], grouped[:, :, -2], grouped[:, :, -1])], 1)


def _rotary_pairs(gpt, inputs, output):
    import megatron.core.transformer.attention as attention

    positions = inputs[0]
    freqs = gpt.rotary_pos_emb(int(positions.max()) + 1)[positions]  # [tokens, 1, 1, head size]
    for x, theirs in zip(inputs[1:], output):
        heads = x.view(len(x), 1, -1, freqs.shape[-1])
        yield "rotary embedding", attention.apply_rotary_pos_emb(heads, freqs, config=gpt.config), theirs


def _attention(layer, inputs, hf) -> torch.Tensor:
    """The trainer's attention over the one sequence of a call (inputs: q, k, v, [tokens, heads x head size])."""
    from megatron_sr.rollout.names import head_dim

    query, key, value = (x.view(len(x), 1, -1, head_dim(hf)).contiguous() for x in inputs[:3])
    mask = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)[None, None]
    return layer.self_attention.core_attention(query, key, value, mask)[:, 0]
