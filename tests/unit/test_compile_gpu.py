"""Ahead-of-time compilation of the GPU kernels, as tools/compile_gpu.py reports it. No GPU is needed, none is used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "compile_gpu.py"
BYTES = {
    "round bf16": 6,
    "round e4m3": 5,
    "adamw": 30,
    "adamw bf16 grad": 28,
    "adamw remainders": 28,
    "recode to nearest": 8,
}
OTHERS = ["round bf16 scattered", "round bf16 cvt.rs"]


def run_tool(*args: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOL, *args]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """One ahead-of-time compilation for the oldest and the newest GPU."""
    path = tmp_path_factory.mktemp("compile_gpu") / "report.json"
    done = run_tool("--targets", "80", "103", "--kernels", *BYTES, *OTHERS, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 2 * len(BYTES) + 3, done.stdout
    return json.loads(path.read_text())


@pytest.mark.parametrize("target", ["sm_80", "sm_103"])
@pytest.mark.parametrize("name", [*BYTES, "round bf16 scattered"])
def test_registers_hold_everything(report, name, target):
    assert report[name][target]["spill_bytes"] == 0
    # 65,536 registers a multiprocessor: three programs of 128 threads, each thread with 32 to 128 bytes under way.
    assert 16 <= report[name][target]["registers"] <= 65536 // (3 * 128)
    # Rounding moves nothing between threads. AdamW's FP32 results go through shared memory on their way to wide stores.
    assert report[name][target]["shared_bytes"] == (4096 if name.startswith("adamw") else 0)


@pytest.mark.parametrize("target", ["sm_80", "sm_103"])
@pytest.mark.parametrize("name", BYTES)
def test_each_byte_moves_once_in_wide_accesses(report, name, target):
    assert report[name][target]["bytes_per_element"] == BYTES[name]
    assert report[name][target]["widest_access"] == 16


@pytest.mark.parametrize("target", ["sm_80", "sm_103"])
def test_bf16_rounding_takes_few_instructions(report, target):
    """Two fifths of what an H100 issues while it moves 6 bytes (docs/numerics.md); Philox alone takes 9 of them."""
    assert 9 < report["round bf16"][target]["instructions_per_element"] <= 24


@pytest.mark.parametrize("target", ["sm_80", "sm_103"])
def test_arithmetic_is_that_of_the_source(report, target):
    """Two multiply-adds an element, none from the compiler (8 elements in each of the two loops), subnormals kept."""
    for name in BYTES:
        fused = 2 * 8 * 2 if name.startswith("adamw") else 0
        assert report[name][target]["fused_multiply_adds"] == fused, name
        assert not (fused and report[name][target]["fusion"]), name
        assert report[name][target]["flush_to_zero"] == 0, name


def test_cvt_rs_is_compiled_only_where_it_exists(report):
    assert set(report["round bf16 cvt.rs"]) == {"sm_103"}
    assert report["round bf16 cvt.rs"]["sm_103"]["cvt_rs"] == 4 * 2  # 8 elements in pairs, in each of the two loops
    assert report["round bf16"]["sm_103"]["cvt_rs"] == 0


def test_c6_what_cannot_be_compiled_is_refused():
    done = run_tool("--kernels", "round bf15")
    assert done.returncode == 2
    assert "no kernel is called round bf15; there are: round bf16" in done.stderr
    done = run_tool(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
