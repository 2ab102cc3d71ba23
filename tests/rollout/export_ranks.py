"""Two ranks: for each layout load a checkpoint into Megatron's shards, export it, and compare bit for bit."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sr.megatron import host

host.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megatron_sr.megatron.model import gpt_model, transformer_config, wrap_ddp  # noqa: E402
from megatron_sr.rollout import export, names  # noqa: E402
from tests.rollout.layouts import CASES  # noqa: E402
from tests.tiny_models import hf_config, make_checkpoint  # noqa: E402


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def build(config, layout, expert_tensor):
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    transformer = transformer_config(config, layout)
    if expert_tensor:
        transformer.expert_tensor_parallel_size = expert_tensor
    return transformer, gpt_model(config, transformer)


def check(name, family, arguments, layout, expert_tensor, directory):
    config = hf_config(family, **arguments)
    checkpoint = load_file(directory / "model.safetensors")
    transformer, model = build(config, layout, expert_tensor)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    export.load_hf(model, checkpoint, config)
    wrapped = wrap_ddp(model, transformer) if name == "dense-tp2" else model
    seen = []
    for hf_name, tensor in export.export_hf(wrapped, config):
        assert same_bits(tensor, checkpoint[hf_name]), f"{name}: {hf_name} differs after load and export"
        seen.append(hf_name)
    assert seen == list(names.expected_shapes(config)), f"{name}: {seen}"

    # FP32 main params in place of the parameters: here 1.001 times their values.
    main = {parameter: parameter.detach().float() * 1.001 for parameter in model.parameters()}
    for hf_name, tensor in export.export_hf([wrapped], config, tensors=main):
        assert same_bits(tensor, checkpoint[hf_name].float() * 1.001), f"{name}: {hf_name} is not the value given"

    if config.tie_word_embeddings and layout.pipeline == 2 and parallel_state.is_pipeline_last_stage():
        assert same_bits(model.output_layer.weight.detach(), checkpoint["model.embed_tokens.weight"]), (
            "the tied copy was not loaded"
        )
    bad_input(model, checkpoint, config)
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        print(f"ok {name}", flush=True)


def bad_input(model, checkpoint, config):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    norm = (
        f"model.layers.{model.decoder.layers[0].layer_number - 1}.input_layernorm.weight"  # one that this stage holds
    )
    missing = {k: v for k, v in checkpoint.items() if k != norm}
    for damaged, words in (
        (missing, ["missing", norm]),
        ({**checkpoint, "model.extra": checkpoint[norm]}, ["unexpected", "model.extra"]),
        ({**checkpoint, norm: checkpoint[norm][:-1]}, ["wrong shape", norm]),
        ({**checkpoint, norm: checkpoint[norm].double()}, [norm, "float64", "round"]),
    ):
        refused(lambda d=damaged: export.load_hf(model, d, config), words)
    assert all(same_bits(a, b.detach()) for a, b in zip(before, model.parameters())), (
        "a refused checkpoint changed the model"
    )
    some = dict(list({p: p.detach().float() for p in model.parameters()}.items())[:1])
    refused(lambda: list(export.export_hf(model, config, tensors=some)), ["no value given"])


def refused(call, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        call()
    assert all(word in str(refusal.value) for word in words), f"{refusal.value} lacks one of {words}"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = Path(sys.argv[1])
    for case in CASES:
        name, family, arguments = case[:3]
        directory = shared / name
        if dist.get_rank() == 0:
            make_checkpoint(directory, family, **arguments)
        dist.barrier()
        check(*case, directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
