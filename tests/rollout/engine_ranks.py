"""Two ranks, a MoE model split over them (EP2), one engine on each: export, update, generate, shut down."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sr.megatron import host

host.install()

from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megatron_sr.megatron.model import Layout, gpt_model, initialize_model_parallel, transformer_config  # noqa: E402
from megatron_sr.rollout.engine import SamplingConfig  # noqa: E402
from megatron_sr.rollout.export import export_hf, load_hf  # noqa: E402
from megatron_sr.rollout.manifest import Manifest  # noqa: E402
from megatron_sr.rollout.vllm import VLLMEngine  # noqa: E402
from tests.tiny_models import hf_config, make_checkpoint  # noqa: E402


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, layout, config = Path(sys.argv[1]), Layout(expert=2), hf_config("qwen3_moe")
    if dist.get_rank() == 0:
        make_checkpoint(directory, "qwen3_moe")
    dist.barrier()
    initialize_model_parallel(layout, seed=1)
    model = gpt_model(config, transformer_config(config, layout))
    load_hf(model, load_file(directory / "model.safetensors"), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    expected = Manifest.of(export_hf(model, config), 1)

    engine = VLLMEngine(directory, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=512)
    report = engine.update_weights(export_hf(model, config), 1)
    assert report.good, report.mismatched
    sampling = SamplingConfig(n=4, max_tokens=8, ignore_eos=True)
    mine = expected.digest, report.digest, engine.weights_digest(), engine.generate([[1, 2, 3]], sampling, [0])
    everyone = [None, None]
    dist.all_gather_object(everyone, mine)
    assert len(set(mine[:3])) == 1, mine[:3]
    assert everyone[0] == everyone[1], "the ranks' engines differ"

    engine.shutdown()
    dist.barrier()  # the trainer's groups must have survived the engine
    parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        print("ok two engines", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
