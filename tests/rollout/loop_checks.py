"""One process, real vLLM engines: delta updates into packed layouts, and rollouts that run ahead while weights change.

Prints one JSON object with what the checks found; test_delta_engines.py and test_staleness.py assert on it.
"""

import contextlib
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_sr import cli
from megatron_sr.megatron.launch import default_to_one_rank
from megatron_sr.rl.async_rollouts import RolloutQueue
from megatron_sr.rl.rollouts import Batch, gather, staleness
from megatron_sr.rl.tasks import Example
from megatron_sr.rollout.client import RemoteEngine
from megatron_sr.rollout.delta import DeltaEngine
from megatron_sr.rollout.engine import SamplingConfig
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.server import EngineServer
from megatron_sr.rollout.vllm import VLLMEngine
from tests.tiny_models import make_checkpoint

PROMPTS, N, ITERATIONS, STALENESS = 6, 2, 6, 2
SAMPLING = SamplingConfig(n=N, max_tokens=32, ignore_eos=True)


def weights(base, version):
    """Another policy for every version: about 3 % of the weights a BF16 neighbour up."""
    generator = torch.Generator().manual_seed(version)
    out = {}
    for name, tensor in base.items():
        bits = tensor.view(torch.int16).clone()
        bits += (torch.rand(tensor.shape, generator=generator) < 0.03).to(torch.int16)
        out[name] = bits.view(torch.bfloat16)
    return out


def build(directory):
    return VLLMEngine(directory, max_model_len=128, max_num_seqs=32, max_num_batched_tokens=512)


def check_delta(engine, base):
    """Three updates by delta; the engine reads every tensor back. Then a receiver that lost its base."""
    by_delta, out = DeltaEngine(engine), []
    for version in (1, 2, 3):
        sent = weights(base, version)
        report = by_delta.update_weights(sent.items(), version)
        live = engine.weights_digest() == Manifest.of(sent.items(), 0).digest
        out.append({**by_delta.last, "good": report.good, "live": live, "version": engine.weights_version()})
    by_delta._receiver._manifest = None  # as after a restart of the engine's process
    sent = weights(base, 4)
    report = by_delta.update_weights(sent.items(), 4)
    live = engine.weights_digest() == Manifest.of(sent.items(), 0).digest
    out.append({**by_delta.last, "good": report.good, "live": live, "version": engine.weights_version()})
    return out


def draw(iteration):
    generator = torch.Generator().manual_seed(iteration)
    examples = [Example(torch.randint(0, 250, (6,), generator=generator).tolist(), "") for _ in range(PROMPTS)]
    seeds = [1000 * iteration + 10 * i for i in range(PROMPTS)]
    return Batch(iteration, examples, seeds, torch.arange(PROMPTS))


def train(engine, queue):
    """Take some time, in which the later batches, if there are any, begin to be decoded."""
    limit = time.monotonic() + 5
    while queue.waiting and not engine._requests.running and time.monotonic() < limit:
        time.sleep(1e-3)
    time.sleep(0.01)


def check_queue(engine, base, in_flight, offset):
    """Iterations of a trainer that takes a batch and then changes the weights while later batches are being decoded."""
    engine.update_weights(weights(base, offset + 1).items(), offset + 1)
    queue = RolloutQueue(engine, draw, SAMPLING, STALENESS, ITERATIONS)
    histogram, waiting, mixed, batches = {}, 0, 0, []
    for iteration in range(ITERATIONS):
        queue.advance(iteration)
        waiting = max(waiting, queue.waiting)
        batch, groups = queue.take(iteration)
        rollouts = gather(batch, groups, 0, 1)
        for age, count in staleness(rollouts, offset + iteration + 1, STALENESS).items():
            histogram[age] = histogram.get(age, 0) + count
        mixed += sum(c.last_version not in (None, c.version) for group in groups for c in group)
        complete = all(
            len(c.token_ids) == SAMPLING.max_tokens and c.finish_reason == "length" for g in groups for c in g
        )
        assert complete, "a completion was cut off"
        batches.append((batch, groups))
        version = offset + iteration + 2
        train(engine, queue)
        assert engine.update_weights(weights(base, version).items(), version, in_flight=in_flight).good
    queue.close()
    # The logprobs are those of the policy that made the sample: its weights and seeds give them again, other weights do not.
    version, replayed = offset + ITERATIONS + 2, {"own": [], "other": []}
    for batch, groups in batches[2:4]:
        made_by = groups[0][0].version
        if groups[0][0].last_version not in (None, made_by):
            continue
        for key, weights_of in (("own", made_by), ("other", made_by + 1)):
            engine.update_weights(weights(base, weights_of).items(), version)
            version += 1
            again = engine.generate([e.prompt_ids for e in batch.examples], SAMPLING, batch.seeds)
            pairs = zip((c for g in groups for c in g), (c for g in again for c in g))
            same_maker = [(a, b) for a, b in pairs if a.version == made_by]  # an aborted one was made later
            replayed[key] += [x == y for a, b in same_maker for x, y in zip(a.logprobs, b.logprobs)]
    return {
        "histogram": histogram,
        "waiting": waiting,
        "mixed": mixed,
        "asked_again": queue.aborted,
        "replayed": {key: sum(equal) / len(equal) for key, equal in replayed.items() if equal},
    }, version


def check_prompts_in_parts(engine):
    """Prompts of which an engine step holds four and a part of the next: how many completions are those that a prompt gets alone."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 250, (24, 110), generator=generator).tolist()
    sampling = SamplingConfig(n=1, max_tokens=12, ignore_eos=True)
    seeds = list(range(900, 924))
    together = engine.generate(prompts, sampling, seeds)
    alone = [engine.generate([prompt], sampling, [seed])[0] for prompt, seed in zip(prompts, seeds)]
    return sum(a[0].token_ids == b[0].token_ids for a, b in zip(together, alone))


def check_over_http(engine, base, root, version):
    """Deltas to a server, and `megatron-sr verify --engine` against folders that hold its policy and that do not."""
    server = EngineServer(engine, port=0).start()
    remote = DeltaEngine(RemoteEngine(server.url))
    sizes = []
    for v in (version, version + 1):
        sent = weights(base, v)
        assert remote.update_weights(sent.items(), v).good
        assert remote.weights_digest() == Manifest.of(sent.items(), 0).digest
        sizes.append(remote.last["bytes"])
    codes, printed = {}, io.StringIO()
    folder = root / "served"
    folder.mkdir()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for name, held in (("same", sent), ("other", base)):
            save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
            codes[name] = cli.main(["verify", "--engine", server.url, "--checkpoint", str(folder)])
        codes["damaged engine"] = None
        with engine._requests.exclusive():
            (model,) = engine._rpc(lambda worker: worker.model_runner.get_model())
            model.model.norm.weight.data.view(torch.int16)[3] ^= 1
        save_file(sent, folder / "model.safetensors", metadata={"format": "pt"})
        codes["damaged engine"] = cli.main(["verify", "--engine", server.url, "--checkpoint", str(folder)])
        codes["nothing there"] = cli.main(["verify", "--engine", server.url, "--checkpoint", str(root / "none")])
        codes["no checkpoint"] = cli.main(["verify", "--engine", server.url])
        server.close()
        codes["no engine"] = cli.main(["verify", "--engine", "http://127.0.0.1:9", "--checkpoint", str(folder)])
    assert engine.update_weights(base.items(), version + 2).good
    return {"sizes": sizes, "codes": codes, "printed": printed.getvalue()}


def check_dead_engine_ends_the_wait(engine):
    """An engine that refuses to generate must not leave the trainer waiting."""
    queue = RolloutQueue(engine, draw, SAMPLING, STALENESS, ITERATIONS)
    engine._refusal = "weights unverified (set by this check)"
    queue.advance(0)
    found = []

    def take():
        try:
            queue.take(0)
        except Exception as error:
            found.append(type(error).__name__)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(30)
    engine._refusal = None
    return found


def main():
    torch.set_num_threads(1)
    default_to_one_rank()
    dist.init_process_group("gloo")
    root, result = Path(sys.argv[1]), {}
    for family in ("qwen3_moe", "qwen3"):
        directory = make_checkpoint(root / family, family)
        base, engine = load_file(directory / "model.safetensors"), build(directory)
        result[f"delta {family}"] = check_delta(engine, base)
        if family == "qwen3":
            result["in parts"] = check_prompts_in_parts(engine)
            offset = 10
            for in_flight in ("drain", "abort", "keep"):
                result[in_flight], offset = check_queue(engine, base, in_flight, offset)
            result["http"] = check_over_http(engine, base, root, offset)
            result["refusing"] = check_dead_engine_ends_the_wait(engine)
        engine.shutdown()
    print("result " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
