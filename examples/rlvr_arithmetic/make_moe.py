"""Make a Qwen3-MoE from the dense base by sparse upcycling (Komatsuzaki et al. 2023): in a second, and it can add at once.

    python examples/rlvr_arithmetic/make_moe.py --base examples/rlvr_arithmetic/base --out runs/moe_base

Every expert starts as the dense MLP plus a little noise, the router is random. The chosen experts' weights sum to one, so the
model computes nearly what the dense one does.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch


def upcycle(base: Path, out: Path, experts: int = 4, active: int = 2, noise: float = 0.01, seed: int = 0) -> Path:
    """Write the MoE (BF16) with the base's tokenizer to `out`. `noise`: standard deviation relative to each tensor's."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3Config, Qwen3MoeConfig

    dense = Qwen3Config.from_pretrained(base)
    fields = {
        k: v
        for k, v in dense.to_dict().items()
        if k not in ("architectures", "model_type", "layer_types", "transformers_version")
    }
    config = Qwen3MoeConfig(
        **fields,
        moe_intermediate_size=dense.intermediate_size,
        num_experts=experts,
        num_experts_per_tok=active,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        architectures=["Qwen3MoeForCausalLM"],
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if ".mlp." not in name:
            tensors[name] = tensor
            continue
        for expert in range(experts):
            perturbed = tensor.float() + noise * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
            tensors[name.replace(".mlp.", f".mlp.experts.{expert}.")] = perturbed.to(torch.bfloat16)
    for layer in range(dense.num_hidden_layers):
        router = 0.1 * torch.randn(experts, dense.hidden_size, generator=generator)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = router.to(torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(out)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=4)
    args = parser.parse_args()
    print(f"saved {upcycle(args.base, args.out, experts=args.experts)}")


if __name__ == "__main__":
    main()
