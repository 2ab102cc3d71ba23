"""Server, client, transports and sessions around a fake engine: order, loss, damage, tokens, paths. Real engines: tests/rollout."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_sr.rollout import wire
from megatron_sr.rollout.client import RemoteEngine
from megatron_sr.rollout.engine import (
    DEAD,
    SERVING,
    Completion,
    EngineDead,
    Health,
    SamplingConfig,
    UpdateFailed,
    UpdateRefused,
    UpdateReport,
    WeightsUnverified,
)
from megatron_sr.rollout.manifest import Manifest
from megatron_sr.rollout.server import EngineServer, is_loopback
from megatron_sr.rollout.shared_memory import SharedBuffer, share
from megatron_sr.rollout.staging import Incoming
from megatron_sr.rollout.sync import WeightSync
from megatron_sr.rollout.transport import make_sender
from megatron_sr.rollout.update_sender import send_update

WANTED = {f"model.layers.{i}.{x}.weight": ((3, 5 + i), torch.bfloat16) for i in range(6) for x in ("a", "b")}
TOKEN = "a token of more than sixteen characters"


class FakeEngine:
    """What a `VLLMEngine` promises about updates, with the same checks (`staging.Incoming`), and tensors in a dictionary."""

    def __init__(self):
        self.version, self.held, self.refusal, self.fail_once = 0, {}, "", None

    def update_weights(self, tensors, version, *, in_flight="drain", expected=None, stage="whole"):
        incoming = Incoming(WANTED, expected)
        if stage == "whole":
            staged = {name: tensor.clone() for name, tensor in incoming.passing(tensors)}
        else:
            self.refusal = "half an update"
            staged = {}
            for name, tensor in incoming.passing(tensors):
                staged[name] = tensor.clone()
                self.held[name] = staged[name]
        if version <= self.version:
            raise UpdateRefused(f"version {version} is not above the present one, {self.version}")
        incoming.check(version)
        if self.fail_once:
            error, self.fail_once, self.refusal = self.fail_once, None, "half an update"
            raise error
        self.held, self.version, self.refusal = staged, version, ""
        return UpdateReport(version, len(staged), [], 0.1, 0.1, incoming.manifest(version).digest)

    def generate(self, prompts, sampling, seeds):
        if self.refusal:
            raise WeightsUnverified(self.refusal)
        return [[Completion(i, [1, 2], [-0.1, -1e-300], "length", self.version)] for i in range(len(prompts))]

    def health(self):
        return Health("refusing" if self.refusal else SERVING, self.version, 0, self.refusal)

    def weights_version(self):
        return self.version

    def weights_digest(self):
        return Manifest.of(self.held.items(), self.version).digest

    def weights_manifest(self):
        return Manifest.of(self.held.items(), self.version)

    def pause(self, in_flight="drain"):
        pass

    def resume(self):
        pass


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, (shape, dtype) in WANTED.items()}


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def server(engine, tmp_path):
    server = EngineServer(engine, token=TOKEN, weights_directory=tmp_path, update_timeout=2.0).start()
    yield server
    server.close()


def remote(server, transport="shared_memory", **more):
    return RemoteEngine(server.url, token=TOKEN, transport=transport, bucket=100, update_timeout=2.0, **more)


@pytest.mark.parametrize("stage", ["whole", "stream"])
@pytest.mark.parametrize("transport", ["shared_memory", "file", "http", "gloo"])
def test_point_7_every_transport_moves_the_same_bits_twice(transport, stage, engine, server, tmp_path):
    client = remote(server, transport, directory=tmp_path, stage=stage)
    for version in (1, 2):
        sent = weights(version)
        report = client.update_weights(iter(sent.items()), version)
        assert report.good
        assert report.version == client.weights_version() == version
        assert report.digest == client.weights_digest() == Manifest.of(sent.items(), 0).digest
        assert all(torch.equal(engine.held[n].view(torch.int16), t.view(torch.int16)) for n, t in sent.items())
    assert client.weights_manifest() == Manifest.of(sent.items(), 2)
    client.shutdown()
    assert not list(tmp_path.iterdir()), "files were left"


def test_point_7_one_broadcast_feeds_several_engines(engine, server):
    other = FakeEngine()
    second = EngineServer(other, token=TOKEN).start()
    sender = make_sender("gloo", 2, timeout=5.0)
    clients = [remote(server, "gloo"), remote(second, "gloo")]
    reports = send_update(clients, sender, iter(weights(3).items()), 1, in_flight="drain")
    assert [r.digest for r in reports] == [Manifest.of(weights(3).items(), 1).digest] * 2
    assert engine.weights_digest() == other.weights_digest()
    sender.close()
    second.close()


class Faulty:
    """A transport's sender with one fault: `damage(number, header, tensors of the bucket)` gives the header that is sent."""

    def __init__(self, sender, damage):
        self._sender, self._damage, self.kind = sender, damage, sender.kind

    def put(self, number, tensors):
        return self._damage(number, self._sender.put(number, tensors), self._sender)

    def __getattr__(self, name):
        return getattr(self._sender, name)


def flip_a_bit(number, header, sender):
    if number == 2:
        sender._used[2].bytes[7] ^= 4
    return header


def drop_a_tensor(number, header, sender):
    return header if number != 2 else {**header, "places": header["places"][:-1]}


def other_dtype(number, header, sender):
    if number == 1:
        header["places"][0][1] = "float16"
    return header


def outside(number, header, sender):
    if number == 1:
        header["places"][0][3] = 1 << 40
    return header


@pytest.mark.parametrize(
    "damage, words",
    [
        (flip_a_bit, "damaged on the way"),
        (drop_a_tensor, "other tensors"),
        (other_dtype, "float16"),
        (outside, "does not lie"),
    ],
)
def test_point_2_damage_on_the_way_leaves_the_old_version_and_is_resent(damage, words, engine, server):
    client = remote(server)
    client.update_weights(weights(1).items(), 1)
    client._sender = Faulty(client.sender(), damage)
    with pytest.raises((UpdateFailed, UpdateRefused), match=words):
        client.update_weights(weights(2).items(), 2)
    assert client.health().state == SERVING
    assert client.weights_version() == 1
    assert client.weights_digest() == Manifest.of(weights(1).items(), 1).digest

    good, lines = client._sender._sender, []
    sync = WeightSync(client, lambda: iter(weights(2).items()), announce=lines.append)
    original = sync._try

    def second_time_good(*arguments):
        result = original(*arguments)
        client._sender = good
        return result

    sync._try = second_time_good
    report = sync.sync(2)
    assert report.attempts == 2
    assert "attempt 1" in lines[0]
    assert "still serves version 1; sending all weights again" in lines[0]
    assert client.weights_version() == 2


def test_point_2_damage_while_streaming_leaves_an_engine_that_refuses(engine, server):
    client = remote(server, stage="stream")
    client._sender = Faulty(client.sender(), flip_a_bit)
    with pytest.raises((UpdateFailed, UpdateRefused), match="damaged on the way"):
        client.update_weights(weights(2).items(), 1)
    with pytest.raises(WeightsUnverified, match="half an update"):
        client.generate([[1]], SamplingConfig(), [0])
    client._sender = client._sender._sender
    assert client.update_weights(weights(2).items(), 1).good
    assert client.generate([[1]], SamplingConfig(), [0])[0][0].version == 1


def test_point_2_the_exports_iterator_is_used_up_whatever_happens(engine, server):
    client = remote(server)
    client.update_weights(weights(1).items(), 5)
    items = iter(weights(2).items())
    with pytest.raises(UpdateRefused, match="not above"):
        client.update_weights(items, 5)
    assert next(items, None) is None


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.pop("model.layers.3.a.weight"), "missing tensors: .*layers.3.a"),
        (lambda w: w.update(extra=torch.zeros(2)), "extra is not a tensor of the model"),
        (lambda w: w.update({"model.layers.3.a.weight": torch.zeros(2, 2).bfloat16()}), "layers.3.a.weight has shape"),
        (lambda w: w.update({"model.layers.3.a.weight": torch.zeros(3, 8)}), "is torch.float32"),
        (lambda w: w.update({"model.layers.3.a.weight": torch.full((3, 8), torch.nan).bfloat16()}), "NaN"),
    ],
)
def test_point_2_tensors_that_do_not_fit_are_refused(change, words, engine, server):
    client, wrong = remote(server), weights(2)
    client.update_weights(weights(1).items(), 1)
    change(wrong)
    with pytest.raises(UpdateRefused, match=words):
        client.update_weights(wrong.items(), 2)
    assert client.weights_version() == 1
    assert client.weights_digest() == Manifest.of(weights(1).items(), 1).digest


def begun(client, version, update="0" * 16):
    client.request(
        "/update/begin",
        dict(update=update, version=version, transport="http", spec={}, stage="whole", in_flight="drain", timeout=1.0),
    )
    return update


def bucket_of(names, seed=2):
    from megatron_sr.rollout.manifest import TensorRecord
    from megatron_sr.rollout.transport.http import HTTPSender

    tensors = [(n, weights(seed)[n]) for n in names]
    return {
        "header": HTTPSender().put(0, tensors),
        "records": wire.record_values({n: TensorRecord.of(t) for n, t in tensors}),
    }


def test_point_2_a_lost_or_repeated_bucket_ends_the_update(engine, server):
    client, names = remote(server), list(WANTED)
    for numbers in ((0, 2), (0, 0)):
        update = begun(client, 1)
        client.request("/update/bucket", {"update": update, "number": 0, **bucket_of(names[:2])})
        with pytest.raises(UpdateFailed, match="arrived where 1 was due"):
            client.request("/update/bucket", {"update": update, "number": numbers[1], **bucket_of(names[2:4])})
    update = begun(client, 1)
    client.request("/update/bucket", {"update": update, "number": 0, **bucket_of(names)})
    with pytest.raises(UpdateFailed, match="2 buckets were sent, 1 arrived"):
        client.request("/update/commit", {"update": update, "buckets": 2, "digest": ""})
    update = begun(client, 1)
    client.request("/update/bucket", {"update": update, "number": 0, **bucket_of(names)})
    with pytest.raises(UpdateFailed, match="total digest"):
        client.request("/update/commit", {"update": update, "buckets": 1, "digest": "0" * 32})
    assert client.health() == Health(SERVING, 0, 0, "")


def test_point_2_a_trainer_that_falls_silent_times_out(engine, server):
    client = remote(server)
    update = begun(client, 1)
    client.request("/update/bucket", {"update": update, "number": 0, **bucket_of(list(WANTED)[:2])})
    time.sleep(1.5)  # the session's own limit is 1 s
    with pytest.raises(UpdateFailed, match="nothing arrived for 1 s"):
        client.request("/update/bucket", {"update": update, "number": 1, **bucket_of(list(WANTED)[2:])})
    assert client.update_weights(weights(4).items(), 1).good


def test_point_2_a_trainer_that_begins_anew_supersedes_its_old_update(engine, server):
    client = remote(server)
    old = begun(client, 1)
    client.request("/update/bucket", {"update": old, "number": 0, **bucket_of(list(WANTED)[:2])})
    assert client.update_weights(weights(4).items(), 1).good
    with pytest.raises(UpdateFailed, match="another one began"):
        client.request("/update/commit", {"update": old, "buckets": 1, "digest": ""})


def test_point_2_sync_gives_up_with_the_last_fault(engine, server):
    client = remote(server)
    broken = [(n, t) for n, t in weights(1).items()][1:]
    lines = []
    with pytest.raises(UpdateRefused, match="missing"):
        WeightSync(client, lambda: iter(broken), attempts=2, announce=lines.append).sync(1)
    assert [line.rsplit("; ", 1)[1] for line in lines] == ["sending all weights again", "giving up"]


def test_point_2_sync_recovers_from_an_error_inside_the_engine_but_not_from_one_of_the_export(engine):
    engine.fail_once = OSError("lost the connection")
    lines = []
    sync = WeightSync(engine, lambda: iter(weights(1).items()), announce=lines.append)
    assert sync.sync(1).attempts == 2
    assert "lost the connection. The engine is refusing; sending all weights again" in lines[0]

    def broken():
        yield from list(weights(2).items())[:3]
        raise OSError("a collective failed")

    with pytest.raises(OSError, match="a collective failed"):
        WeightSync(engine, broken).sync(2)
    assert engine.version == 1


def test_point_2_all_ranks_export_again_when_one_must(engine):
    """This rank's engine is good at once; another rank's is not: the export, which is collective, is repeated."""
    answers, exports = iter([False, True]), []

    def export():
        exports.append(1)
        return iter(weights(1).items())

    assert WeightSync(engine, export, agree=lambda good: good and next(answers)).sync(1).update.good
    assert len(exports) == 2
    assert engine.version == 1


def test_point_2_a_server_that_is_gone_is_dead_not_an_exception(engine, server):
    client = remote(server)
    assert client.health().state == SERVING
    server.close()
    client._disconnect()
    assert client.health().state == DEAD
    with pytest.raises(EngineDead, match="cannot be reached"):
        client.generate([[1]], SamplingConfig(), [0])


def test_point_6_other_addresses_need_a_token():
    assert all(map(is_loopback, ("127.0.0.1", "127.5.5.5", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "", "example.org")))
    with pytest.raises(ValueError, match="reached from other machines"):
        EngineServer(FakeEngine(), host="0.0.0.0")
    with pytest.raises(ValueError, match="at least 16"):
        EngineServer(FakeEngine(), host="0.0.0.0", token="short")


@pytest.mark.parametrize("token", [None, "another token of good length"])
def test_point_6_requests_without_the_token_are_refused(token, engine, server):
    stranger = RemoteEngine(server.url, token=token)
    with pytest.raises(ValueError, match="no valid token"):
        stranger.generate([[1]], SamplingConfig(), [0])


def test_point_6_nothing_is_unpickled_and_nonsense_is_refused(engine, server):
    import pickle

    client = remote(server)
    with pytest.raises(ValueError, match="no such request"):
        client.request("/nonsense", {})
    with pytest.raises(ValueError, match="unexpected keyword"):
        client.request("/pause", {"a": 1})
    for data in (pickle.dumps({"a": 1}), b"", b"\x91\x01"):
        with pytest.raises(ValueError, match="msgpack|a map"):
            wire.unpack(data)
    update = begun(client, 1)
    with pytest.raises(UpdateFailed, match="not a safetensors bucket"):
        client.request(
            "/update/bucket",
            {
                "update": update,
                "number": 0,
                "header": {"names": ["a"], "safetensors": pickle.dumps([1])},
                "records": {},
            },
        )
    for source in Path(wire.__file__).parent.rglob("*.py"):
        assert not re.search(r"import pickle|torch\.load\(|\beval\(", source.read_text()), source


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sr-0-0.safetensors", "a" * 40])
def test_point_6_file_names_are_validated(name, tmp_path):
    from megatron_sr.rollout.transport.file import FileReceiver

    with pytest.raises(ValueError, match="not the name of a weights file"):
        FileReceiver(tmp_path).get({"file": name, "names": []})


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/fd/0", "/proc/1/fd/../../etc/passwd", "/proc/0/fd/1", ""])
def test_point_6_shared_memory_paths_are_validated(path):
    with pytest.raises(ValueError, match="not the path of a shared buffer"):
        SharedBuffer.open(path, 1)


def test_point_6_only_our_own_buffers_are_opened(tmp_path):
    with open(tmp_path / "file", "w+b") as other, pytest.raises(ValueError, match="not a shared buffer of megatron-sr"):
        SharedBuffer.open(f"/proc/{os.getpid()}/fd/{other.fileno()}", 1)
    buffer, shared = share([("a", torch.arange(5.0))])
    with pytest.raises(ValueError, match="not the one announced"):
        SharedBuffer.open(shared.path, shared.size + 1)
    with pytest.raises(ValueError, match="not the one announced"):
        SharedBuffer.open(shared.path, shared.size, buffer.inode + 1)
    assert os.stat(shared.path).st_mode & 0o777 == 0o600
    other, found = shared.open()
    buffer.close()
    assert torch.equal(dict(found)["a"], torch.arange(5.0)), "a mapping outlives its owner's handle"
    other.close()


def test_point_6_shared_memory_is_gone_with_its_processes_also_after_sigkill():
    """A process fills buffers and is killed: no file appears anywhere, and its memory cannot be opened any more."""
    code = (
        "import torch, time\n"
        "from megatron_sr.rollout.shared_memory import share\n"
        "kept = share([('a', torch.ones(1 << 20))])\n"
        "print(kept[1].path, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    path = process.stdout.readline().strip()
    SharedBuffer.open(path, 4 << 20).close()
    with open(f"/proc/{process.pid}/maps") as file:
        mapped = file.read()
    assert "/memfd:" in mapped
    assert "/dev/shm/" not in mapped, "shared memory with a name in a file system"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with pytest.raises(ValueError, match="the sender must live"):
        SharedBuffer.open(path, 4 << 20)


def test_completions_and_errors_keep_every_bit_on_the_way(engine, server):
    engine.version = 7
    completion = remote(server).generate([[1], [2]], SamplingConfig(stop_token_ids=(5,)), [0, 9])[1][0]
    assert completion == Completion(1, [1, 2], [-0.1, -1e-300], "length", 7)


def test_several_threads_may_ask_at_once(engine, server):
    client, seen = remote(server), []
    threads = [
        threading.Thread(target=lambda: seen.append(client.generate([[1]], SamplingConfig(), [0]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
