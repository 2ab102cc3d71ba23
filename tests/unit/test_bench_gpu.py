"""The GPU benchmark: its cases run (here on the CPU, tiny), and without a GPU it says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOL = Path(__file__).parents[2] / "tools" / "bench_gpu.py"


def run_tool(*args: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, TOOL, *args], env=environment, capture_output=True, text=True, timeout=120)


def test_every_case_runs_and_is_reported(tmp_path):
    path = tmp_path / "report.json"
    done = run_tool("--device", "cpu", "--elements", "5000", "--rounds", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    groups = json.loads(path.read_text())["groups"]
    assert {"copy", "nearest", "stochastic", "stochastic, 1000 tensors"} <= set(groups["rounding"])
    assert len(groups["adamw"]) == 5
    for cases in groups.values():
        for figures in cases.values():
            assert all(figure > 0 for figure in figures.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_c6_without_a_gpu_it_says_so():
    done = run_tool()
    assert done.returncode == 1
    assert "no CUDA GPU on this machine" in done.stderr
