"""C1: the C++ kernel equals the specification bit for bit, at every instruction set this machine has."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sr import Noise, RoundingPlan, Segment, formats, random_bits, round_segments_, round_to_
from megatron_sr.kernels import cpu
from tests.unit.values import adversarial, bf16_patterns, bits_of, from_bits, random_patterns

LEVELS = cpu.LEVELS[: cpu.LEVELS.index(cpu.best_level()) + 1]
STORED = [(f, dtype) for f in formats.FORMATS.values() if f.block_size == 1 for dtype in f.storage]


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setenv("MEGATRON_SR_CPU_LEVEL", request.param)
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def both(x, format, dtype, noise, start=0):
    """(reference, cpu) patterns of the rounded x."""
    return [
        bits_of(round_to_(torch.empty(x.shape, dtype=dtype), x, noise=noise, format=format, start=start, backend=b))
        for b in ("reference", "cpu")
    ]


@pytest.mark.parametrize("format, dtype", STORED, ids=lambda v: getattr(v, "name", str(v)))
def test_c1_cpu_equals_reference_on_adversarial_and_random_input(format, dtype, level):
    x = torch.cat([adversarial()[::3], random_patterns(20_000, 1), torch.randn(5_001) * 0.02])
    for noise in (None, Noise(5, 2**33 + 1, "w")):
        reference, cpu_bits = both(x, format, dtype, noise, start=13)
        assert torch.equal(reference, cpu_bits)


def test_c1_cpu_equals_reference_on_all_bf16_patterns(level):
    x = torch.cat([bf16_patterns(), adversarial()])
    reference, cpu_bits = both(x, formats.BF16, torch.bfloat16, Noise(5, 6, "w"))
    assert torch.equal(reference, cpu_bits)


def test_c3_exact_cpu_bf16_over_every_random_word(level):
    """Each of the 65,536 words is drawn for some element of the range; taking each once, exactly the discarded 16 bits go up."""
    count = 1 << 20
    draws = random_bits(Noise(1, 2, "every word"), 0, count).numpy()
    words, first = np.unique(draws, return_index=True)
    assert len(words) == 65536
    first = torch.from_numpy(first)
    dst = torch.empty(count, dtype=torch.bfloat16)
    for top in (0x0000, 0x0080, 0x3C23, 0xBF80, 0x7F7E):
        for discarded in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
            x = from_bits([top << 16 | discarded]).expand(count)
            code = bits_of(round_to_(dst, x, noise=Noise(1, 2, "every word"), backend="cpu"))[first]
            assert (code == top + 1).sum().item() == discarded
            assert (code == top).sum().item() == 65536 - discarded
    for discarded in (1, 0x8000, 0xFFFF):  # nothing lies above: every word gives the largest finite number
        x = from_bits([0x7F7F << 16 | discarded]).expand(count)
        assert (bits_of(round_to_(dst, x, noise=Noise(1, 2, "every word"), backend="cpu")) == 0x7F7F).all()


@pytest.mark.parametrize("start", [2**35 - 100, 2**34 - 77, 2**63 - 5, 2**64 - 1000], ids=hex)
@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_c1_block_counters_carry_into_their_high_word(start, name, level):
    """16-bit draws leave the low counter word at element 2**35, 32-bit ones at 2**34."""
    x = torch.randn(1000)
    format = formats.get(name)
    reference, cpu_bits = both(x, format, format.storage[0], Noise(5, 2**64 - 1, "w"), start)
    assert torch.equal(reference, cpu_bits)


def test_c1_every_length_and_start_around_the_tiles(level):
    """Each call gives its part of the whole and writes nothing before or after it."""
    x = torch.randn(400)
    for noise in (None, Noise(5, 6, "w")):
        whole = round_to_(torch.empty(400, dtype=torch.bfloat16), x, noise=noise, backend="reference")
        for start in range(9):
            for length in range(270):
                buffer = torch.zeros(length + 16, dtype=torch.bfloat16)
                part = slice(start, start + length)
                round_to_(buffer[8 : 8 + length], x[part], noise=noise, start=start, backend="cpu")
                assert torch.equal(buffer[8 : 8 + length], whole[part])
                assert not buffer[:8].any()
                assert not buffer[8 + length :].any()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_c1_any_length_alignment_and_start(data):
    format, dtype = data.draw(st.sampled_from(STORED))
    length = data.draw(st.integers(0, 700))
    start = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1 - length)))
    skip_dst, skip_src = data.draw(st.integers(0, 33)), data.draw(st.integers(0, 33))
    noise = data.draw(
        st.one_of(st.none(), st.builds(Noise, st.just(7), st.integers(0, 2**64 - 1), st.text(max_size=5)))
    )
    src = random_patterns(skip_src + length, length)[skip_src:]
    for level in LEVELS:
        outcomes = []
        for backend in ("reference", "cpu"):
            buffer = torch.zeros(skip_dst + length + 40, dtype=dtype)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MEGATRON_SR_CPU_LEVEL", level)
                round_to_(
                    buffer[skip_dst : skip_dst + length], src, noise=noise, format=format, start=start, backend=backend
                )
            outcomes.append(bits_of(buffer))
        assert torch.equal(*outcomes)
        assert not outcomes[1][:skip_dst].any(), "wrote before its destination"
        assert not outcomes[1][skip_dst + length :].any(), "wrote past its destination"


segments = st.builds(
    Segment,
    local_start=st.integers(0, 50),
    length=st.integers(0, 400),
    global_start=st.one_of(st.integers(0, 100), st.integers(0, 2**40)),
    stride=st.integers(0, 300),
    run=st.integers(1, 300),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=3), segments), max_size=6), st.sampled_from(["bf16", "e8m4", "fp16"]))
def test_c1_segments_equal_element_by_element_rounding(keyed, name):
    """Affine segments on both backends against one call of round_to_ for each element's global index."""
    format = formats.get(name)
    src = [random_patterns(450, i) for i in range(len(keyed))]
    work = [(Noise(1, 9, key), segment) for key, segment in keyed]
    outcomes = []
    for backend in ("reference", "cpu"):
        dst = [torch.zeros(450, dtype=format.storage[0]) for _ in keyed]
        round_segments_(dst, src, work, format, backend)
        outcomes.append(dst)
    for r, c, s, (noise, segment) in zip(*outcomes, src, work):
        assert torch.equal(bits_of(r), bits_of(c))
        expected = torch.zeros_like(r)
        for i in range(0, segment.length, max(1, segment.length // 5)):
            at = segment.local_start + i
            round_to_(
                expected[at : at + 1],
                s[at : at + 1],
                noise=noise,
                format=format,
                start=segment.global_index(i),
                backend="cpu",
            )
            assert bits_of(expected[at : at + 1]) == bits_of(c[at : at + 1])


def test_c1_thread_count_does_not_matter(level, threads):
    sizes = [200_001, 1, 65_536, 40_003, 7]
    src = [random_patterns(n, i) for i, n in enumerate(sizes)]
    keyed = [(f"tensor {i}", [Segment(0, n, 5 * i, 64, 48)]) for i, n in enumerate(sizes)]
    outcomes = []
    for count in (1, 2, 3):
        threads(count)
        dst = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
        RoundingPlan(dst, src, keyed, seed=1).run_(3)
        outcomes.append(torch.cat([bits_of(d) for d in dst]))
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])
    reference = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    RoundingPlan(reference, src, keyed, seed=1, backend="reference").run_(3)
    assert torch.equal(outcomes[0], torch.cat([bits_of(d) for d in reference]))


def test_c1_launches_larger_than_the_caches(level, threads):
    """Two threads then write past the caches (2**25 elements on); one does not, and was compared with the reference."""
    sizes = [1 << 25, 999, 65_536, 100_032]
    src = torch.randn(sum(sizes) + 1)[1:].split(sizes)
    keyed = [(f"tensor {i}", [Segment(0, n, 3 * i)]) for i, n in enumerate(sizes)]
    outcomes = [torch.empty(sum(sizes), dtype=torch.bfloat16) for _ in range(2)]
    for count, dst in enumerate(outcomes, start=1):
        threads(count)
        RoundingPlan(list(dst.split(sizes)), list(src), keyed, seed=1).run_(3)
    assert torch.equal(*outcomes)


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("MEGATRON_SR_CPU_LEVEL", "avx1024")
    with pytest.raises(ValueError, match=r"MEGATRON_SR_CPU_LEVEL='avx1024'; this machine offers: plain"):
        round_to_(torch.empty(1, dtype=torch.bfloat16), torch.zeros(1))


def test_c6_a_missing_or_old_library_says_how_to_build_it(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match=r"_cpu.so has not been built; build it with: pip install -e \."):
        cpu.load_library(tmp_path / "_cpu.so")
    monkeypatch.setattr(cpu, "ABI", cpu.ABI + 1)
    with pytest.raises(RuntimeError, match=r"is of another version .*build it with"):
        cpu.load_library()
