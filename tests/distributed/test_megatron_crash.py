"""SIGKILL of a rank during the step and during the save: torchrun starts the job again, and it ends with the same bits.

Two jobs on two real gloo ranks, side by side: one is never interrupted; the other is killed in an optimizer step, then, resumed,
in a save, and resumes once more from the last complete checkpoint, which holds no model params (--param-rounding-save-model none).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_sr import cli
from tests.distributed.test_megatron_pretrain import FLAGS, SCRIPT, STOCHASTIC, checkpoint
from tests.launch import ROOT

pytestmark = pytest.mark.distributed
PLAN = "step:3,save:1,none"  # saves are at iterations 2, 4 and 6


def pretrain(folder: Path, name: str, plan: str) -> subprocess.CompletedProcess:
    ranks = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--monitor-interval=0.1",
    ]
    job = [ROOT / "tests/distributed/crashing_ranks.py", folder / f"{name}.jsonl", plan, SCRIPT, *FLAGS, *STOCHASTIC]
    where = ["--train-iters", "6", "--save", folder / name, "--load", folder / name]
    command = [*ranks, f"--max-restarts={plan.count(',')}", *job, *where]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, timeout=280,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(pretrain, folder, name, plan) for name, plan in (("whole", "none"), ("killed", PLAN))}
    for name, run in runs.items():
        done = run.result()
        (folder / f"{name}.txt").write_text(done.stdout)
        assert done.returncode == 0, done.stdout[-6000:]
    return folder


def iterations(folder: Path, name: str, start: int) -> dict[int, tuple[str, str]]:
    records = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return {r["iteration"]: (r["loss"], r["grad_norm"]) for r in records if r["start"] == start}


def test_killed_in_the_step_and_in_the_save_and_started_again(folder):
    """The plan was carried out: which iterations each start has finished."""
    finished = [sorted(iterations(folder, "killed", start)) for start in range(3)]
    first = min(iterations(folder, "whole", 0))
    assert [[i - first + 1 for i in start] for start in finished] == [[1, 2], [3, 4], [3, 4, 5, 6]]
    assert (folder / "killed.txt").read_text().count("Signal 9 (SIGKILL)") >= 2
    assert "model params are recomputed from main params at step 2" in (folder / "killed.txt").read_text()


@pytest.mark.parametrize("start", [0, 1, 2])
def test_losses_and_gradient_norms_equal_the_uninterrupted_run_bit_for_bit(folder, start):
    whole = iterations(folder, "whole", 0)
    killed = iterations(folder, "killed", start)
    assert killed == {iteration: whole[iteration] for iteration in killed}


def test_weights_main_params_and_moments_equal_the_uninterrupted_run_bit_for_bit(folder):
    whole, killed = (checkpoint(folder, name, 6) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert {tensor.dtype for tensor in whole.values()} >= {torch.bfloat16, torch.float32}
    assert [key for key in whole if not torch.equal(whole[key], killed[key])] == []


@pytest.mark.parametrize("name, iteration", [("whole", 6), ("whole", 2), ("killed", 6), ("killed", 2)])
def test_verify_agrees_with_every_complete_checkpoint(folder, capsys, name, iteration):
    assert cli.main(["verify", str(folder / name / f"iter_{iteration:07d}")]) == 0
    assert "ok:" in capsys.readouterr().out
