"""Two vLLM engines as Ray actors: updates, a killed engine while generating, one killed before an update, limits.

Prints "ok NAME" for each check that held; test_ray_engines.py asserts on them.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_sr.rollout.engine import DEAD, SERVING, EngineDead, SamplingConfig, UpdateRefused
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.ray import RayEngines, start_local_cluster
from tests.rollout.loop_checks import weights
from tests.tiny_models import make_checkpoint

PROMPTS = [[i + 1, i + 2, i + 3] for i in range(6)]
SEEDS = [10 * i for i in range(6)]
SAMPLING = SamplingConfig(n=2, max_tokens=40, ignore_eos=True)
OPTIONS = {"max_model_len": 128, "max_num_seqs": 32, "max_num_batched_tokens": 512}


def answers(engine):
    return [[(c.token_ids, c.logprobs) for c in group] for group in engine.generate(PROMPTS, SAMPLING, SEEDS)]


def kill_one(engines, i):
    pid = engines.processes()[i]
    os.kill(pid, signal.SIGKILL)
    return pid


def check_placement(directory):
    start = time.monotonic()
    with pytest.raises(
        ValueError, match="cannot place 2 engines of .*'GPU': 1.0.*ask for fewer engines, smaller shares"
    ):
        RayEngines(directory, engines=2, gpus=1.0, start_timeout=3, **OPTIONS)
    assert time.monotonic() - start < 60
    with pytest.raises(ValueError, match="engines=0: at least one"):
        RayEngines(directory, engines=0, **OPTIONS)


def check_updates(engines, base):
    for version in (1, 2):
        sent = weights(base, version)
        report = engines.update_weights(sent.items(), version)
        assert report.good
        assert engines.weights_digest() == report.digest == Manifest.of(sent.items(), 0).digest
    assert engines.weights_version() == 2
    assert {c.version for group in engines.generate(PROMPTS, SAMPLING, SEEDS) for c in group} == {2}
    assert [c.prompt_index for group in engines.generate(PROMPTS, SAMPLING, SEEDS) for c in group] == [
        i // 2 for i in range(12)
    ]
    with pytest.raises(UpdateRefused, match="version 2 is not above"):
        engines.update_weights(sent.items(), 2)
    engines.pause()
    assert engines.health().state == "paused"
    engines.resume()
    assert engines.health().state == SERVING


def check_killed_while_generating(engines, base):
    """All completions arrive, as if nothing had happened, and the new engine has the present weights."""
    expected = answers(engines)
    before, out = engines.processes(), []
    thread = threading.Thread(target=lambda: out.extend(answers(engines)))
    thread.start()
    time.sleep(0.05)
    kill_one(engines, 1)
    thread.join(200)
    assert out == expected
    after = engines.processes()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert engines.weights_version() == 2
    assert engines.weights_digest() == Manifest.of(weights(base, 2).items(), 0).digest


def check_killed_before_an_update(engines, base):
    kill_one(engines, 0)
    while engines.healths()[0].state != DEAD:
        time.sleep(0.1)
    assert engines.health().state == DEAD
    with pytest.raises(EngineDead, match="`repair` replaces it"):
        engines.weights_version()
    report = engines.update_weights(weights(base, 3).items(), 3)
    assert report.good
    assert [h.version for h in engines.healths()] == [3, 3]
    assert engines.weights_digest() == report.digest


def check_no_more_replacements(engines):
    engines._restarts = 0
    kill_one(engines, 1)
    with pytest.raises(EngineDead, match="rollout engine 1 died and may not be replaced any more"):
        answers(engines)


def main():
    os.environ["RANK"], os.environ["WORLD_SIZE"] = (
        "0",
        "2",
    )  # as under torchrun: the actors must not take themselves for ranks
    torch.set_num_threads(1)
    directory = make_checkpoint(Path(sys.argv[1]) / "model", "qwen3")
    base = load_file(directory / "model.safetensors")
    import ray

    start_local_cluster(2)
    check_placement(directory)
    print("ok placement", flush=True)
    engines = RayEngines(directory, engines=2, cpus=0.5, **OPTIONS)
    for check in (check_updates, check_killed_while_generating, check_killed_before_an_update):
        check(engines, base)
        print(f"ok {check.__name__.removeprefix('check_').replace('_', '-')}", flush=True)
    check_no_more_replacements(engines)
    print("ok no-more-replacements", flush=True)
    engines.shutdown()
    ray.shutdown()
    print("ok shutdown", flush=True)


if __name__ == "__main__":
    main()
