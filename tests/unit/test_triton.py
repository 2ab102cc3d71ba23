"""The GPU kernels: in Triton's interpreter, bit for bit; how work is cut into chunks; what is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_sr import Noise, Segment, round_to_
from megatron_sr.formats import BF16
from megatron_sr.kernels import triton_device
from megatron_sr.kernels.gpu_chunks import CHUNK, cut
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


@pytest.mark.parametrize("group", [8, 4])
def test_chunks_cover_every_element_once_with_its_global_index(group):
    """Random affine pieces: contiguous, short and long rows, aligned to Philox blocks and not; near 2**64 too."""
    rng = np.random.default_rng(group)
    for _ in range(60):
        run = int(rng.choice([1, 3, 4, 8, 24, 100, 8192, 9001]))
        segment = Segment(
            local_start=int(rng.integers(0, 20)),
            length=int(rng.integers(1, 4 * CHUNK)),
            global_start=int(rng.choice([0, 8, 2**63 - 4])) + int(rng.choice([0, 3, 8])),
            stride=run + int(rng.choice([0, 0, 5, 8, 4000])),
            run=run,
        )
        table = PieceTable([torch.empty(0, dtype=torch.bfloat16)], [torch.empty(0)], BF16, stochastic=True)
        table.add(0, segment, (7, 9), 11)
        rows = table.seal().rows
        addresses = np.array([[1 << 20, 1 << 30]], dtype=np.uint64)
        grouped, scattered = cut(addresses, [2, 4], rows, group)
        seen = 0
        for kind, chunks in (("grouped", grouped), ("scattered", scattered)):
            for dst, src, length, start, offset, run_, stride, key, step in chunks.astype(object):
                assert dst == (1 << 20) + 2 * seen
                assert src == (1 << 30) + 4 * seen
                assert (key, step) == (9 << 32 | 7, 11)
                i = np.arange(length, dtype=object)
                q = (offset + i) // run_
                index = (start % 2**64 + q * stride + (offset + i) - q * run_) % 2**64
                assert index.tolist() == [segment.global_index(seen + int(j)) for j in (0, *i[1:])]
                if (
                    kind == "grouped"
                ):  # what the kernel's layout needs: groups lie together, chunks end at a group's end
                    skip = index[0] % group
                    assert length + skip <= CHUNK
                    assert skip == 0 or seen == 0
                    first = index[(group - skip) % group :: group]
                    assert all(g % group == 0 for g in first)
                    assert run_ >= CHUNK or run_ % group == 0
                    assert run_ >= CHUNK or offset + length + CHUNK < 2**32
                seen += length
        assert seen == segment.length
        assert not len(grouped) or not len(scattered)


def test_c6_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="backend 'triton' works on CUDA tensors, not on cpu; pass backend='auto'"):
        round_to_(torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8), noise=Noise(1, 1, "w"), backend="triton")


def test_c6_cvt_rs_is_off_by_default_and_refused_where_it_does_not_exist(monkeypatch):
    monkeypatch.delenv("MEGATRON_SR_CVT_RS", raising=False)
    assert not triton_device.use_cvt_rs(torch.device("cpu"))
    monkeypatch.setenv("MEGATRON_SR_CVT_RS", "1")
    with pytest.raises(RuntimeError, match="needs a GPU of compute capability 10.0 or 10.3, cpu is None; unset it"):
        triton_device.use_cvt_rs(torch.device("cpu"))
