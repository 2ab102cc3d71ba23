"""The GPU kernels: in Triton's interpreter, bit for bit; how work is cut into chunks; what is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_sr import Noise, Segment, round_to_
from megatron_sr.formats import BF16, E4M3
from megatron_sr.kernels import triton_device
from megatron_sr.kernels.gpu_chunks import CHUNK, DeviceTables, cut
from megatron_sr.kernels.table import PieceTable
from tests.unit import triton_cases

CASES = sorted(name for name in vars(triton_cases) if name.startswith("case_"))


@pytest.fixture(scope="module")
def outcome() -> dict:
    """Runs every case once, in one process, where Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.triton_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_interpreted(case, outcome):
    assert outcome[case] is None, outcome[case]


def make_table(segments: list[Segment], format=BF16) -> PieceTable:
    """A table of one tensor pair with these pieces."""
    numel = max(s.local_start + s.length for s in segments)
    dst, src = torch.empty(numel, dtype=format.storage[0]), torch.empty(numel)
    table = PieceTable([dst], [src], format, stochastic=True)
    for segment in segments:
        table.add(0, segment, (7, 9), 11)
    table = table.seal()
    table.refresh()
    return table


@pytest.mark.parametrize("format, group", [(BF16, 8), (E4M3, 4)])
def test_every_piece_has_the_chunks_it_needs(format, group):
    """Random affine pieces: each one's chunks follow its first one; groups stay together in what is not scattered."""
    rng = np.random.default_rng(group)
    segments = []
    for _ in range(300):
        run = int(rng.choice([1, 3, 4, 8, 24, 100, 8192, 9001]))
        stride, length = run + int(rng.choice([0, 0, 5, 8, 4000])), int(rng.integers(1, 4 * CHUNK))
        length = int(rng.choice([length, CHUNK, 2 * CHUNK - 2]))  # the last two need one chunk more if a group is cut
        segments.append(Segment(int(rng.integers(0, 20)), length, int(rng.integers(0, 3)) * 4 + 8, stride, run))
    lists, first = cut(make_table(segments, format))
    dtype = format.storage[0]
    for piece, s in enumerate(segments):
        together = s.contiguous or not (s.global_start % group or s.stride % group or s.run % group)
        skip = s.global_start % group if s.contiguous else 0  # elements of the first group that are not the piece's
        own = np.flatnonzero(lists[dtype, not together] == piece)
        assert own.tolist() == list(range(first[piece], first[piece] + -(-(s.length + skip) // CHUNK)))
        assert (dtype, together) not in lists or not (lists[dtype, together] == piece).any()


def test_the_device_tables_follow_steps_without_a_copy_and_moved_storage_with_one():
    table, tables = make_table([Segment(0, 9000, 3), Segment(9000, 5, 0)]), DeviceTables()
    launch = tables.get(table, torch.device("cpu"))
    table.set_step(2**64 - 1)
    again = tables.get(table, torch.device("cpu"))
    assert again.pieces is launch.pieces
    assert (launch.step, again.step) == (11, 2**64 - 1)
    assert all(again.chunks[kind] is launch.chunks[kind] for kind in launch.chunks)
    table.src[0].data = torch.empty_like(table.src[0])
    assert table.refresh()
    moved = tables.get(table, torch.device("cpu"))
    assert moved.pieces[:, 1].tolist() == [table.src[0].data_ptr(), table.src[0].data_ptr() + 36_000]
    assert all(moved.chunks[kind] is launch.chunks[kind] for kind in launch.chunks)


def test_c6_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="backend 'triton' works on CUDA tensors, not on cpu; pass backend='auto'"):
        round_to_(torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8), noise=Noise(1, 1, "w"), backend="triton")


def test_c6_cvt_rs_is_off_by_default_and_refused_where_it_does_not_exist(monkeypatch):
    monkeypatch.delenv("MEGATRON_SR_CVT_RS", raising=False)
    assert not triton_device.use_cvt_rs(torch.device("cpu"))
    monkeypatch.setenv("MEGATRON_SR_CVT_RS", "1")
    with pytest.raises(RuntimeError, match="needs a GPU of compute capability 10.0 or 10.3, cpu is None; unset it"):
        triton_device.use_cvt_rs(torch.device("cpu"))
