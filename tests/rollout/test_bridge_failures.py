"""Faults between real processes: a vLLM engine in a child, a trainer here or in another child. Never a mix of two versions.

Each ends in the old version still served, to the last bit of its logprobs, or in an engine that refuses to generate; and the trainer
says what happened and sends all weights again by itself.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import load_file

from megatron_sr.rollout.engine import (
    ABORT,
    DEAD,
    DRAIN,
    KEEP,
    REFUSING,
    SERVING,
    EngineDead,
    SamplingConfig,
    UpdateFailed,
    UpdateRefused,
    WeightsUnverified,
)
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.subprocess_engine import SubprocessEngine
from megatron_sr.rollout.sync import WeightSync
from tests.launch import ROOT
from tests.rollout.bits import hard_weights
from tests.tiny_models import make_checkpoint

pytestmark = pytest.mark.rollout

SAMPLING = SamplingConfig(n=2, max_tokens=8, ignore_eos=True)
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def mapped():
    """Names of the shared memory that the engine and the trainer had mapped during updates: in /dev/shm, and without a name."""
    return {"/dev/shm/": set(), "/memfd:": set()}


def recording(items, mapped, *processes):
    """The same items; in between, what these processes have mapped is noted."""
    for item in items:
        yield item
        for process in processes:
            with open(f"/proc/{process}/maps") as file:
                paths = [line.split(maxsplit=5)[5].strip() for line in file if line.count(" ") > 5 and "/" in line]
            for place, names in mapped.items():
                names |= {path.removeprefix(place) for path in paths if path.startswith(place)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("model"))
    return directory, load_file(directory / "model.safetensors")


@pytest.fixture(scope="module")
def child(mapped, checkpoint):
    os.environ.update(
        RANK="3", WORLD_SIZE="4", MASTER_ADDR="nowhere.invalid", MASTER_PORT="1"
    )  # must not reach the child
    engine = SubprocessEngine(
        checkpoint[0],
        bucket=1 << 14,  # several buckets, one of them for a large tensor alone
        update_timeout=4.0,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    yield engine
    engine.shutdown()


def logprobs(engine):
    groups = engine.generate([[1, 2, 3], [7] * 40], SAMPLING, [0, 10])
    return [(c.token_ids, c.logprobs) for group in groups for c in group]


class Weights:
    """Versions of a model's weights by number."""

    def __init__(self, base):
        self.base = base

    def __call__(self, version):
        return hard_weights(self.base, version)

    def digest(self, version):
        return Manifest.of(self(version).items(), 0).digest


@pytest.fixture
def engine(child, checkpoint, mapped):
    """The child, serving a good version above all before."""
    weights = Weights(checkpoint[1])
    if child.health().state != SERVING:
        child.restart()
    version = child.weights_version() + 1
    items = recording(weights(version).items(), mapped, child.pid, os.getpid())
    assert child.update_weights(items, version).good
    return child, weights, version


def resync(engine, weights, version, repair=lambda: None):
    """What the trainer does by itself; its words, the first attempt's fault included."""
    lines = []

    def announce(line):
        lines.append(line)
        repair()

    report = WeightSync(engine, lambda: iter(weights(version).items()), announce=announce).sync(version)
    assert report.update.good
    assert report.attempts == 2, lines
    assert engine.weights_version() == version
    assert engine.weights_digest() == weights.digest(version)
    assert all(c.version == version for group in engine.generate([[1, 2]], SAMPLING, [0]) for c in group)
    return lines[0]


def corrupt(engine, when, change):
    """Let `change(header, sender)` spoil one bucket of the next update, once."""
    sender = engine.sender()
    put = type(sender).put

    def spoiled(number, tensors):
        header = put(sender, number, tensors)
        if number == when:
            del sender.put
            return change(header, sender)
        return header

    sender.put = spoiled


def flip(header, sender):
    sender._used[1].bytes[99] ^= 1
    return header


def lose_bytes(header, sender):
    sender._used[1].bytes.zero_()
    return header


def misplace(header, sender):
    header["places"][0][2] = list(reversed(header["places"][0][2]))
    return header


def rename(header, sender):
    header["places"][0][0] = "model.layers.9.input_layernorm.weight"
    return header


@pytest.mark.parametrize("change", [flip, lose_bytes, misplace, rename])
def test_point_2_damage_on_the_way(change, engine):
    engine, weights, version = engine
    before = logprobs(engine)
    corrupt(engine, 1, change)
    with pytest.raises((UpdateFailed, UpdateRefused), match="damaged|other tensors|shape|broke off"):
        engine.update_weights(weights(version + 1).items(), version + 1)
    assert engine.health().state == SERVING
    assert engine.weights_version() == version
    assert engine.weights_digest() == weights.digest(version)
    assert logprobs(engine) == before
    corrupt(engine, 1, change)
    assert f"still serves version {version}; sending all weights again" in resync(engine, weights, version + 1)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.pop(NAME), f"missing tensors: .*{NAME}"),
        (
            lambda w: w.update({"model.layers.7.mlp.down_proj.weight": w[NAME]}),
            "layers.7.mlp.down_proj.weight is not a tensor",
        ),
        (lambda w: w.update({NAME: w[NAME].t().contiguous()}), f"{NAME} has shape"),
        (lambda w: w.update({NAME: w[NAME].half()}), f"{NAME} is torch.float16"),
        (
            lambda w: w.update({"model.layers.1.mlp.down.weight": w.pop(NAME)}),
            "down.weight is not a tensor of the model",
        ),
    ],
    ids=["missing", "extra", "shape", "dtype", "name"],
)
def test_point_2_tensors_that_do_not_fit(change, words, engine):
    engine, weights, version = engine
    before, wrong = logprobs(engine), weights(version + 1)
    change(wrong)
    items = iter(wrong.items())
    with pytest.raises(UpdateRefused, match=words):
        engine.update_weights(items, version + 1)
    assert next(items, None) is None, "a collective export would hang: the iterable was not used up"
    assert engine.health().state == SERVING
    assert logprobs(engine) == before
    assert engine.update_weights(weights(version + 1).items(), version + 1).good


def test_point_2_versions_only_grow(engine):
    engine, weights, version = engine
    before = logprobs(engine)
    for stale in (version, version - 1):
        with pytest.raises(UpdateRefused, match=f"not above the present one, {version}"):
            engine.update_weights(weights(99).items(), stale)
    assert logprobs(engine) == before


def test_point_2_damage_while_streaming_makes_the_engine_refuse(engine):
    """Half of the new weights are in: it must not generate until it has all of them."""
    engine, weights, version = engine
    engine.stage = "stream"
    try:
        corrupt(engine, 3, lambda header, sender: sender._used[3].bytes.fill_(7) is None or header)
        with pytest.raises((UpdateFailed, UpdateRefused)):
            engine.update_weights(weights(version + 1).items(), version + 1)
        assert engine.health().state == REFUSING
        with pytest.raises(WeightsUnverified, match="did not finish"):
            engine.generate([[1]], SAMPLING, [0])
        with pytest.raises(WeightsUnverified):
            engine.weights_digest()
        corrupt(engine, 3, lambda header, sender: sender._used[3].bytes.fill_(7) is None or header)
        assert "is refusing; sending all weights again" in resync(engine, weights, version + 1)
    finally:
        engine.stage = "whole"


def test_point_2_timeout(engine):
    """The engine stands still in mid-update, and goes on later: it was not told all, so it keeps the old version."""
    engine, weights, version = engine
    before = logprobs(engine)

    def stalling(stop):
        for i, item in enumerate(weights(version + 1).items()):
            if i == 8:
                stop()
            yield item

    stop = lambda: os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineDead, match="did not answer in time"):
        engine.update_weights(stalling(stop), version + 1)
    os.kill(engine.pid, signal.SIGCONT)
    assert engine.health().version == version
    assert logprobs(engine) == before

    stops = iter([stop])
    lines = []

    def announce(line):
        lines.append(line)
        os.kill(engine.pid, signal.SIGCONT)

    sync = WeightSync(engine, lambda: stalling(next(stops, lambda: None)), announce=announce)
    assert sync.sync(version + 1).update.good
    assert "did not answer in time" in lines[0]
    assert engine.weights_digest() == weights.digest(version + 1)


def test_point_2_trainer_killed_in_mid_update(engine, checkpoint):
    """Another process sends half an update and is killed. The engine waits, gives up, and serves on; the next trainer is welcome."""
    engine, weights, version = engine
    before = logprobs(engine)
    code = (
        "import os, signal, sys\n"
        "from safetensors.torch import load_file\n"
        "from megatron_sr.rollout.client import RemoteEngine\n"
        "base = load_file(sys.argv[1] + '/model.safetensors')\n"
        "def export():\n"
        "    for i, item in enumerate(base.items()):\n"
        "        if i == 12:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield item\n"
        "engine = RemoteEngine(sys.argv[2], token=sys.stdin.read(), transport='shared_memory', bucket=1 << 14)\n"
        "engine.update_weights(export(), int(sys.argv[3]))\n"
    )
    trainer = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint[0]), engine.url, str(version + 1)],
        input=engine._token, text=True, cwd=ROOT, timeout=120, check=False, capture_output=True,
    )  # fmt: skip
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    assert logprobs(engine) == before, "serves on while it waits for the rest"
    time.sleep(4.5)  # update_timeout
    assert engine.health().state == SERVING
    assert engine.weights_digest() == weights.digest(version)
    assert logprobs(engine) == before
    assert engine.update_weights(weights(version + 1).items(), version + 1).good


@pytest.mark.parametrize("in_flight", [DRAIN, ABORT, KEEP])
def test_point_2_running_requests_at_an_update(in_flight, engine):
    """Each completion carries the version that produced it; those kept over the update carry both."""
    engine, weights, version = engine
    long = SamplingConfig(n=4, max_tokens=200, min_tokens=200, ignore_eos=True)
    found = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate([[1, 2, 3]], long, [0])[0]))
    thread.start()
    while engine.health().running < 4:
        time.sleep(0.01)
    assert engine.update_weights(weights(version + 1).items(), version + 1, in_flight=in_flight).good
    thread.join()
    assert [c.version for c in found] == [version] * 4
    assert [c.last_version for c in found] == [version + (in_flight == KEEP)] * 4
    assert [c.finish_reason for c in found] == ["abort" if in_flight == ABORT else "length"] * 4
    assert all(len(c.token_ids) == len(c.logprobs) for c in found)
    assert all((len(c.token_ids) < 200) == (in_flight == ABORT) for c in found)
    assert engine.generate([[1, 2, 3]], SAMPLING, [0])[0][0].version == version + 1


def test_point_2_pause_holds_new_requests_until_resume(engine):
    engine, _, _ = engine
    engine.pause(DRAIN)
    assert engine.health().state == "paused"
    found = []
    thread = threading.Thread(target=lambda: found.extend(engine.generate([[1, 2, 3]], SAMPLING, [0])))
    thread.start()
    time.sleep(0.3)
    assert not found
    engine.resume()
    thread.join()
    assert found
    with pytest.raises(ValueError, match="in_flight='later'"):
        engine.pause("later")


def test_point_2_worker_killed_in_mid_update(engine):
    """The trainer says so, starts the engine again, and gives it all weights before it serves."""
    engine, weights, version = engine
    deaths = iter([engine.pid])

    def export():
        kill = next(deaths, None)
        for i, item in enumerate(weights(version + 1).items()):
            if i == 12 and kill:
                os.kill(kill, signal.SIGKILL)
            yield item

    lines = []
    report = WeightSync(engine, export, announce=lines.append).sync(version + 1)
    assert report.update.good
    assert "process ended (signal SIGKILL)" in lines[0]
    assert f"is {DEAD}; sending all weights again" in lines[0]
    assert engine.weights_digest() == weights.digest(version + 1)
    assert all(c.version == version + 1 for group in engine.generate([[1]], SAMPLING, [0]) for c in group)


def test_point_2_an_engine_that_cannot_start_says_why(tmp_path):
    with pytest.raises(EngineDead, match="no config.json"):
        SubprocessEngine(tmp_path, max_model_len=32)


def test_point_6_nothing_is_left_in_dev_shm(child, mapped):
    """After all of the above, with the engine killed and restarted on the way. Other tests' shared memory may be there."""
    child.shutdown()
    assert mapped["/memfd:"], "the updates were not seen"
    assert not mapped["/dev/shm/"].intersection(os.listdir("/dev/shm"))
    assert child.health().state == DEAD


def test_point_6_the_token_is_not_on_the_command_line(checkpoint):
    engine = SubprocessEngine(checkpoint[0], max_model_len=32, wait=False)
    try:
        with open(f"/proc/{engine.pid}/cmdline", "rb") as file:
            assert engine._token.encode() not in file.read()
        with open(f"/proc/{engine.pid}/environ", "rb") as file:
            assert engine._token.encode() not in file.read()
    finally:
        engine.kill()
