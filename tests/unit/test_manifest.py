"""Digests and manifests: what they detect, and that pieces add up."""

import hashlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sr.coordinates import Segment
from megatron_sr.kernels import cpu, digest_cpu
from megatron_sr.rollout.digest import add_words_reference, finish, tensor_digest, word_sums
from megatron_sr.rollout.manifest import Manifest, TensorRecord, compare

SIZES = st.integers(1, 40_000)  # several rows of 4096 words, and parts of them
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float8_e4m3fn])


def random_bits(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def test_digest_of_known_tensor_follows_the_published_definition():
    """The docstring's formula in plain Python integers, over three rows of words and a last word of one element."""
    tensor = random_bits(2 * 2 * 4096 + 2501, torch.bfloat16, 1)
    data = tensor.view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]

    def splitmix(x):
        z = (x + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) | 1

    sums = [
        sum(w * splitmix(2 * (2**61 + j % 4096) + k) * splitmix(2 * (j // 4096) + k) for j, w in enumerate(words))
        % 2**64
        for k in (0, 1)
    ]
    head = f"megatron-sr digest 1\nbfloat16\n{tensor.numel()}\n".encode()
    body = b"".join(s.to_bytes(8, "little") for s in sums)
    assert tensor_digest(tensor) == hashlib.blake2b(head + body, digest_size=16).hexdigest()


@settings(max_examples=60, deadline=None)
@given(SIZES, DTYPES, st.data())
def test_c5_one_flipped_bit_changes_the_digest(count, dtype, data):
    """Certain, not only likely: the constants are odd."""
    tensor = random_bits(count, dtype, 2)
    before = tensor_digest(tensor)
    byte = data.draw(st.integers(0, count * dtype.itemsize - 1))
    tensor.view(torch.uint8)[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(tensor) != before


@settings(max_examples=60, deadline=None)
@given(SIZES.filter(lambda n: n > 1), st.data())
def test_c5_two_swapped_elements_change_the_digest(count, data):
    tensor = random_bits(count, torch.bfloat16, 3).view(torch.int16)
    i, j = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    tensor[j] = tensor[i] ^ 0x55  # two different values
    before = tensor_digest(tensor)
    tensor[[i, j]] = tensor[[j, i]]
    assert tensor_digest(tensor) != before


def test_c5_digest_depends_on_shape_dtype_and_sign_of_zero():
    zeros = torch.zeros(6, 4, dtype=torch.bfloat16)
    others = [
        zeros.t().contiguous(),
        zeros.view(24),
        zeros.half(),
        zeros.view(torch.int16),
        -zeros,
        torch.zeros(6, 5, dtype=torch.bfloat16),
    ]
    assert len({tensor_digest(t) for t in [zeros, *others]}) == 1 + len(others)
    assert tensor_digest(torch.arange(24.0).view(4, 6).t()) == tensor_digest(
        torch.arange(24.0).view(4, 6).t().contiguous()
    )


@settings(max_examples=60, deadline=None)
@given(SIZES, DTYPES, st.data())
def test_c5_flat_pieces_in_any_order_give_the_whole_digest(count, dtype, data):
    """ZeRO shards: cut anywhere, also in the middle of a 32-bit word."""
    tensor = random_bits(count, dtype, 4)
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    sums = sum(word_sums(tensor[a:b], [Segment(0, b - a, a)]) for a, b in pieces)
    assert finish(sums, dtype, tensor.shape) == tensor_digest(tensor)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(2, 300), DTYPES, st.data())
def test_c5_column_shards_give_the_whole_digest(rows, columns, dtype, data):
    """Row-parallel weights are split along columns: every row in runs."""
    tensor = random_bits(rows * columns, dtype, 5).view(rows, columns)
    cut = data.draw(st.integers(1, columns - 1))
    sums = torch.zeros(2, dtype=torch.int64)
    for a, b in ((cut, columns), (0, cut)):
        piece = tensor.view(torch.uint8).view(rows, columns, -1)[:, a:b].contiguous().view(dtype).view(rows, b - a)
        sums += word_sums(piece, [Segment(0, piece.numel(), a, columns, b - a)])
    assert finish(sums, dtype, tensor.shape) == tensor_digest(tensor)


def test_c5_piece_at_an_odd_storage_offset():
    whole = random_bits(1001, torch.bfloat16, 6)
    assert tensor_digest(whole[1:]) == tensor_digest(whole[1:].clone())


def test_digest_of_an_empty_tensor_and_of_unsupported_elements():
    assert len(tensor_digest(torch.empty(0, 3))) == 32
    with pytest.raises(TypeError, match="float64"):
        word_sums(torch.zeros(3, dtype=torch.float64))


def example(version=3):
    return Manifest.of([("a", torch.ones(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))], version)


def test_manifest_survives_json_and_its_digest_ignores_order_and_version():
    manifest = example()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.tensors["b"] == TensorRecord.of(torch.zeros(4, dtype=torch.bfloat16))
    backwards = Manifest(7, dict(reversed(manifest.tensors.items())))
    assert backwards.digest == manifest.digest
    renamed = Manifest(3, {"a": manifest.tensors["a"], "c": manifest.tensors["b"]})
    assert renamed.digest != manifest.digest


def test_damaged_manifests_are_refused():
    text = example().to_json()
    digest = example().tensors["a"].digest
    for damaged, words in (
        (text.replace(digest, "0" * 32), "is damaged"),
        (text[:-1], "not a weight manifest"),
        ("[]", "not a weight manifest"),
        (text.replace('"version"', '"v"'), "not a weight manifest"),
    ):
        with pytest.raises(ValueError, match=words):
            Manifest.from_json(damaged)


def test_compare_names_every_difference():
    ours = example()
    theirs = Manifest.of(
        [("a", torch.ones(3, 2)), ("b", torch.zeros(4)), ("d", torch.zeros(1))],
        3,
    )
    differences = compare(ours, theirs)
    assert differences == [
        "d: missing in the first",
        "a: shape [2, 3] against [3, 2]",
        "b: dtype bfloat16 against float32",
    ]
    changed = Manifest.of([("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))], 9)
    assert [line.split(" (")[0] for line in compare(ours, changed)] == ["a: bits differ"]
    assert compare(ours, Manifest(5, {"b": ours.tensors["b"]})) == ["a: missing in the second"]
    assert compare(ours, example(version=8)) == []


LEVELS_HERE = cpu.LEVELS[: cpu.library.msr_best_level() + 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5 * 4096), st.integers(0, 3 * 4096), st.integers(1, 3), st.sampled_from(LEVELS_HERE))
def test_c5_the_kernel_gives_the_sums_of_the_reference(count, first, threads, level):
    """Rows cut anywhere, one or two at a time, on every instruction set of this machine, with several threads; wrapping sums."""
    words = random_bits(4 * count, torch.uint8, 7).view(torch.int32)
    ours, reference = torch.full((2,), -5, dtype=torch.int64), torch.full((2,), -5, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_SR_CPU_LEVEL", level)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        digest_cpu.add_words_(ours, words, first)
    add_words_reference(reference, words, first)
    assert torch.equal(ours, reference)


def test_c5_the_kernel_splits_many_rows_over_threads():
    words = random_bits(4 * (100 * 4096 + 77), torch.uint8, 8).view(torch.int32)
    sums = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    for i, threads in enumerate((1, 2, 5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            digest_cpu.add_words_(sums[i], words, 4000)
    add_words_reference(sums[3], words, 4000)
    assert all(torch.equal(s, sums[3]) for s in sums)
    words.fill_(-(2**31))  # every product at its largest
    a, b = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    digest_cpu.add_words_(a, words, 0)
    add_words_reference(b, words, 0)
    assert torch.equal(a, b)


def test_point_2_an_update_names_the_version_and_the_bits_that_it_builds_on():
    held = example(version=3)
    Manifest(4, held.tensors, 3, held.digest).check_base(held)
    Manifest(9, held.tensors).check_base(held)
    for version, base, digest, words in (
        (3, None, None, "version 3 is not above the present one, 3"),
        (5, 4, held.digest, "builds on version 4, the engine holds 3; send all weights"),
        (5, 3, "0" * 32, "builds on other bits of version 3"),
    ):
        with pytest.raises(ValueError, match=words):
            Manifest(version, held.tensors, base, digest).check_base(held)
    with pytest.raises(ValueError, match="go together"):
        Manifest(5, {}, 3)
    with pytest.raises(ValueError, match="which is not older"):
        Manifest(5, {}, 5, "0" * 32)
    chained = Manifest(4, held.tensors, 3, held.digest)
    assert Manifest.from_json(chained.to_json()) == chained
