"""Two trainer ranks, vLLM engines of one and of two workers as rank 0's children: export, sync, read back, compare. Prints "ok ...".

usage: parity_ranks.py DIRECTORY FAMILY
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sr.megatron import host

host.install()

from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from megatron_sr.rollout.engine import DEAD, EngineDead, SamplingConfig  # noqa: E402
from megatron_sr.rollout.export import export_hf, load_hf  # noqa: E402
from megatron_sr.rollout.manifest import Manifest  # noqa: E402
from megatron_sr.rollout.subprocess_engine import SubprocessEngine  # noqa: E402
from megatron_sr.rollout.transport import make_sender  # noqa: E402
from megatron_sr.rollout.update_sender import send_update  # noqa: E402
from tests.launch import ROOT  # noqa: E402
from tests.rollout.bits import hard_weights, shuffled  # noqa: E402
from tests.rollout.export_ranks import build  # noqa: E402
from tests.rollout.layouts import CASES, PARITY  # noqa: E402
from tests.tiny_models import hf_config, make_checkpoint  # noqa: E402

SAMPLING = SamplingConfig(n=2, max_tokens=8, ignore_eos=True)
WORKERS = (1, 2)


def start(directory, size):
    return SubprocessEngine(
        directory,
        wait=False,
        bucket=1 << 15,
        tensor_parallel_size=size,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def results(engine):
    groups = engine.generate([[1, 2, 3], list(range(40))], SAMPLING, [0, 10])
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


def said(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def check_layout(case, base, version, engines):
    """One layout's export into both engines at once; the digests read back from them are those of the checkpoint that was loaded."""
    name, family, arguments, layout, expert_tensor = case
    config, weights = hf_config(family, **arguments), hard_weights(base, version)
    _, model = build(config, layout, expert_tensor)
    load_hf(model, weights, config)
    exported = export_hf(model, config)
    if version % 2 == 0:  # every other time in shuffled order
        exported = iter(shuffled({n: t.clone() for n, t in exported}, version))
    if engines:
        sender = make_sender("shared_memory")
        reports = send_update(engines, sender, exported, version, in_flight="drain")
        sender.close()
        expected = Manifest.of(weights.items(), version)
        for engine, report in zip(engines, reports):
            assert report.good, report.mismatched
            assert report.tensors == len(weights)
            assert report.digest == engine.weights_digest() == expected.digest
            assert engine.weights_version() == version
            assert engine.weights_manifest() == expected
    else:
        for _ in exported:
            pass
    dist.barrier()
    parallel_state.destroy_model_parallel()
    said(f"ok {name}")
    return weights


def check_fresh(directory, weights, live):
    """Engines that load the same weights from disk compute the same logprobs: difference 0.0."""
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    fresh = [start(directory, size) for size in WORKERS]
    for size, engine, ours in zip(WORKERS, fresh, live):
        theirs = results(engine)
        assert [tokens for tokens, _ in theirs] == [tokens for tokens, _ in ours]
        assert max(abs(a - b) for (_, x), (_, y) in zip(theirs, ours) for a, b in zip(x, y)) == 0.0
        assert engine.weights_digest() == Manifest.of(weights.items(), 0).digest
        engine.shutdown()
        said(f"ok fresh-tp{size}")


def check_dead_worker(engine, weights, version):
    """One of two vLLM workers is killed in mid-update: no completions any more, and the trainer is told."""
    worker = workers_of(engine.pid)[0]

    def export():
        for i, item in enumerate(weights.items()):
            if i == len(weights) // 2:
                os.kill(worker, signal.SIGKILL)
            yield item

    try:
        engine.update_weights(export(), version)
    except EngineDead as error:
        said(f"the trainer is told: {error}")
    else:
        raise AssertionError("an update of a dead worker went through")
    assert engine.health().state == DEAD, engine.health()
    try:
        results(engine)
    except (EngineDead, RuntimeError):
        said("ok dead-worker")


def workers_of(pid):
    """The children of a vLLM engine's process that run its workers: the large ones."""
    children = [p for p in Path("/proc").iterdir() if p.name.isdigit() and parent_of(p) == pid]
    pages = {int(p.name): int((p / "statm").read_text().split()[1]) for p in children}
    return sorted(child for child, resident in pages.items() if resident * 4096 > 200 << 20)


def parent_of(process):
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, family = Path(sys.argv[1]), sys.argv[2]
    cases = [case for case in CASES if case[0] in PARITY[family]]
    engines = []
    if dist.get_rank() == 0:
        make_checkpoint(directory, cases[0][1], **cases[0][2])
        engines = [start(directory, size) for size in WORKERS]
    dist.barrier()
    base = load_file(directory / "model.safetensors")
    try:
        for version, case in enumerate(cases, start=1):
            weights = check_layout(case, base, version, engines)
        if engines:
            live = [results(engine) for engine in engines]
            if family == "dense":
                check_dead_worker(engines[1], weights, version + 1)
            for engine in engines:
                engine.shutdown()
            check_fresh(directory, weights, live)
    finally:
        for engine in engines:
            engine.kill()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
