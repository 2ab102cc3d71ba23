"""Delta updates: the codec is exact for any bits, the chain refuses what does not fit, and a receiver that lost its base gets all.

The engine here is a mock (a dictionary); tests/rollout/test_delta_engines.py uses vLLM.
"""

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_sr as sr
from megatron_sr.mxfp8 import quantize
from megatron_sr.rollout import delta
from megatron_sr.rollout.delta import DeltaEngine, DeltaReceiver, DeltaSender, DeltaUpdate, send
from megatron_sr.rollout.delta_codec import DeltaDamaged, TensorDelta, decode, encode
from megatron_sr.rollout.engine import UpdateFailed, UpdateRefused, UpdateReport
from megatron_sr.rollout.manifest import Manifest

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_bits(count, size, generator):
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return raw.view(DTYPES[size])


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@st.composite
def pairs(draw):
    """(new, base): every bit pattern (NaN, -0.0, subnormals), changes of any density, scattered or in runs, near or far."""
    size, count = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 5000))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    base = random_bits(count, size, generator)
    density = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.2, 0.6, 1.0]))
    changed = torch.rand(count, generator=generator) < density
    if draw(st.booleans()) and count:  # one run
        changed = torch.zeros(count, dtype=torch.bool)
        start = draw(st.integers(0, count - 1))
        changed[start : draw(st.integers(start, count))] = True
    bits = base.view(INTEGERS[size]).clone()
    if draw(st.booleans()):
        bits[changed] += torch.randint(-1, 2, (count,), generator=generator).to(bits.dtype)[changed]
    else:
        bits[changed] = random_bits(count, size, generator).view(bits.dtype)[changed]
    return bits.view(base.dtype), base


@settings(deadline=None, max_examples=300)
@given(pairs(), st.booleans())
def test_point_3_delta_gives_the_new_bits_back_exactly_and_is_never_larger_than_the_tensor(pair, zstd):
    new, base = pair
    before = base.clone()
    coded = encode(new, base, zstd=zstd)
    assert same_bits(decode(coded, tuple(new.shape), new.dtype, base), new)
    assert same_bits(base, before)
    assert coded.nbytes <= new.numel() * new.element_size()
    whole = encode(new, None, zstd=zstd)
    assert same_bits(decode(whole, tuple(new.shape), new.dtype, None), new)


@pytest.mark.parametrize(
    ("change", "positions", "values", "most"),
    [
        (lambda x: x, "none", "bits", 0),
        (lambda x: x.index_add_(0, torch.arange(0, 100_000, 1000), torch.ones(100, dtype=torch.int16)), "gaps", "steps", 300),
        (lambda x: x[40_000:60_000].add_(1) * 0, "runs", "steps", 20_006),
        (lambda x: x[::3].add_(-1) * 0, "bitmap", "steps", 12_500 + 33_334),
        (lambda x: x[::100].add_(1000) * 0, "gaps", "bits", 1000 * 3),
        (lambda x: x.add_(1000), "all", "bits", 200_000),
    ],
    ids=["unchanged", "sparse", "one run", "dense", "sparse and far", "everything"],
)  # fmt: skip
def test_point_3_the_coding_follows_the_density(change, positions, values, most):
    base = torch.randint(-20_000, 20_000, (100_000,), dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    new = base.clone()
    change(new)
    coded = encode(new.view(torch.bfloat16), base.view(torch.bfloat16))
    assert (coded.positions, coded.values) == (positions, values)
    assert coded.nbytes <= most
    assert coded.changed == (base != new).sum() or positions == "all"


def test_point_3_a_far_step_among_near_ones_is_escaped():
    base = torch.zeros(1000, dtype=torch.int16)
    new = base.clone()
    new[:500] = 1
    new[7], new[8], new[9], new[10] = -128, 128, -32768, 127
    coded = encode(new.view(torch.bfloat16), base.view(torch.bfloat16))
    assert coded.values == "steps"
    assert len(coded.what) == 500 + 3 * 2
    assert torch.equal(decode(coded, (1000,), torch.bfloat16, base.view(torch.bfloat16)).view(torch.int16), new)


def mxfp8_pair():
    """(data, scale) of one weight at two neighbouring optimizer steps, stochastically rounded: E4M3 bytes and E8M0 scales."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    blocks = [quantize(weight * scale, noise=sr.Noise(seed=1, step=s, key="w")) for s, scale in ((1, 1.0), (2, 1.02))]
    return [(b.data.view(torch.float8_e4m3fn), b.scale) for b in blocks]


def test_point_3_mxfp8_data_and_e8m0_scales():
    (old_data, old_scale), (data, scale) = mxfp8_pair()
    assert not torch.equal(old_scale, scale), "some scale must move, else this proves nothing"
    sender, engine = DeltaSender(), Mock()
    receiver = DeltaReceiver(engine)
    names = "x.weight", "x.weight_scale"
    receiver.apply(sender.encode(zip(names, (old_data, old_scale)), 1).to_bytes())
    update = sender.encode(zip(names, (data, scale)), 2)
    assert update.nbytes < data.numel() + scale.numel()
    receiver.apply(update.to_bytes())
    assert same_bits(engine.weights["x.weight"], data)
    assert same_bits(engine.weights["x.weight_scale"], scale)


@given(pairs(), st.data())
@settings(deadline=None, max_examples=200)
def test_point_2_damaged_deltas_are_refused_or_seen_by_the_digest(pair, data):
    """Any byte of any part changed, cut or added: an error, or other bits than the trainer's, which the digest names."""
    new, base = pair
    coded = encode(new, base, zstd=data.draw(st.booleans()))
    part = data.draw(st.sampled_from(["where", "what"]))
    content = bytearray(getattr(coded, part))
    kind = data.draw(st.sampled_from(["flip", "cut", "add"]))
    if kind == "add" or not content:
        content += b"\x01"
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    fields = {**vars(coded), part: bytes(content)}
    try:
        out = decode(TensorDelta(**fields), tuple(new.shape), new.dtype, base)
    except DeltaDamaged:
        return
    assert out.shape == new.shape
    assert out.dtype == new.dtype  # whatever its bits are: `DeltaReceiver` compares their digest


class Mock:
    """Holds what it is given; `fails`: exceptions of the next calls."""

    def __init__(self):
        self.weights, self.version, self.fails, self.good = {}, 0, [], True

    def update_weights(self, tensors, version, *, in_flight="drain"):
        sent = {name: tensor.clone() for name, tensor in tensors}
        if self.fails:
            raise self.fails.pop()
        self.weights, self.version = sent, version
        return UpdateReport(
            version, len(sent), [] if self.good else ["w0"], 0.0, 0.0, Manifest.of(sent.items(), 0).digest
        )


def weights(step, size=3000):
    """BF16 weights that move a little from step to step."""
    generator = torch.Generator().manual_seed(9)
    base = {f"w{i}": torch.randn(size + i, generator=generator).to(torch.bfloat16) for i in range(3)}
    for tensor in base.values():
        tensor.view(torch.int16)[step::7] += step
    return base


def held(engine, expected):
    return engine.weights.keys() == expected.keys() and all(same_bits(engine.weights[n], expected[n]) for n in expected)


@pytest.mark.parametrize("zstd", [False, True], ids=["plain", "zstd"])
def test_point_3_a_chain_of_updates(zstd):
    engine = Mock()
    by_delta = DeltaEngine(engine, zstd)
    for version in range(1, 6):
        report = by_delta.update_weights(weights(version).items(), version)
        assert report.good
        assert held(engine, weights(version))
        assert by_delta.last["whole"] == (version == 1)
        assert by_delta.last["bytes"] < by_delta.last["whole_bytes"] or version == 1
    assert by_delta.version == 5  # everything else is the engine's own


def test_point_2_updates_that_do_not_fit_are_refused_and_the_old_weights_stay():
    sender, engine = DeltaSender(), Mock()
    receiver = DeltaReceiver(engine)
    first = sender.encode(weights(1).items(), 1)
    second = sender.encode(weights(2).items(), 2)
    third = sender.encode(weights(3).items(), 3)
    other = DeltaSender()
    other.encode(weights(5).items(), 1)
    other_second = other.encode(weights(2).items(), 2)

    def refused(update, words):
        with pytest.raises(UpdateRefused, match=words):
            receiver.apply(update if isinstance(update, bytes) else update.to_bytes())

    refused(second, "builds on version 1, the engine holds -1; send all weights")
    receiver.apply(first.to_bytes())
    refused(third, "builds on version 2, the engine holds 1; send all weights")
    refused(other_second, "builds on other bits of version 1")
    refused(first.to_bytes()[:-100], "not a weight update")
    refused(b"", "not a weight update")
    refused(msgpack.packb([2, "", {}]), "format 2, this version reads 1")
    lost = DeltaUpdate(second.manifest, {n: c for n, c in second.chunks.items() if n != "w1"})
    refused(lost, "its tensors are not those that its manifest names")
    swapped = DeltaUpdate(second.manifest, {**second.chunks, "w1": second.chunks["w0"]})
    refused(swapped, "w1 ")
    flipped = bytearray(second.chunks["w2"][0].what)
    flipped[5] ^= 1
    chunk = TensorDelta(**{**vars(second.chunks["w2"][0]), "what": bytes(flipped)})
    refused(DeltaUpdate(second.manifest, {**second.chunks, "w2": [chunk]}), "w2 comes out as .*not as the trainer's")
    refused(DeltaUpdate(second.manifest, {**second.chunks, "w2": []}), "w2 has chunks missing")
    assert engine.version == 1
    assert held(engine, weights(1))
    receiver.apply(second.to_bytes())
    assert held(engine, weights(2))


@pytest.mark.parametrize("error", [UpdateRefused("no"), UpdateFailed("lost")], ids=["refused", "broke off"])
def test_point_2_after_a_failure_all_weights_are_sent(error):
    sender, engine = DeltaSender(), Mock()
    receiver = DeltaReceiver(engine)
    send(sender, sender.encode(weights(1).items(), 1), receiver.apply)
    engine.fails = [error]
    _, resynced = send(sender, sender.encode(weights(2).items(), 2), receiver.apply)
    assert resynced
    assert held(engine, weights(2))
    engine.good = False  # the engine's read-back differs: its report says so, and the next update must not build on it
    report, resynced = send(sender, sender.encode(weights(3).items(), 3), receiver.apply)
    assert not report.good
    engine.good = True
    _, resynced = send(sender, sender.encode(weights(4).items(), 4), receiver.apply)
    assert resynced
    assert held(engine, weights(4))
    restarted = DeltaReceiver(Mock())  # a new engine process has no base
    _, resynced = send(sender, sender.encode(weights(5).items(), 5), restarted.apply)
    assert resynced


def test_point_3_tensors_larger_than_a_chunk(monkeypatch):
    monkeypatch.setattr(delta, "_CHUNK", 1000)
    engine = Mock()
    by_delta = DeltaEngine(engine)
    for version in (1, 2):
        by_delta.update_weights(weights(version, size=2500).items(), version)
        assert held(engine, weights(version, size=2500))
    assert sum(by_delta.last["positions"].values()) == 9


def test_point_3_changed_shapes_and_names_send_everything():
    sender = DeltaSender()
    sender.encode(weights(1).items(), 1)
    assert sender.encode((weights(2) | {"w3": torch.zeros(4, dtype=torch.bfloat16)}).items(), 2).whole
    assert not sender.encode((weights(3) | {"w3": torch.zeros(2, 2, dtype=torch.bfloat16)}).items(), 3).whole
    assert sender.encode(weights(4).items(), 3).whole  # the same version again: its update broke off
    with pytest.raises(ValueError, match="version 2 is below the last one sent, 3"):
        sender.encode(weights(4).items(), 2)


def test_point_6_a_forged_size_takes_no_memory():
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(DeltaDamaged, match="more than the tensor can need"):
        decode(TensorDelta("all", "bits", 10, zstandard.compress(b""), bomb, True), (10,), torch.uint8, None)
    with pytest.raises(DeltaDamaged):
        decode(
            TensorDelta("gaps", "bits", 1, b"\xff" * 9 + b"\x7f", b"\x00"),
            (10,),
            torch.uint8,
            torch.zeros(10, dtype=torch.uint8),
        )


def test_point_3_tensors_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="a delta needs equal tensors"):
        encode(torch.zeros(3), torch.zeros(4))
    with pytest.raises(TypeError, match="no delta of torch.float64"):
        encode(torch.zeros(3, dtype=torch.float64), None)


def test_point_3_non_contiguous_and_empty_tensors():
    engine = Mock()
    by_delta = DeltaEngine(engine)
    for version in (1, 2):
        tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4).add(version).t()
        by_delta.update_weights([("t", tensor), ("empty", torch.zeros(0, 3, dtype=torch.bfloat16))], version)
        assert same_bits(engine.weights["t"], tensor.contiguous())
    assert np.prod(engine.weights["empty"].shape) == 0
