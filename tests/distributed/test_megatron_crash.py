"""SIGKILL of a rank during the step and during the save: started again from the last complete checkpoint, the bits are the same.

Two jobs on two real gloo ranks, side by side: one is never interrupted; the other is killed in an optimizer step, then, resumed,
in a save, and resumes once more from a checkpoint that holds no model params (--param-rounding-save-model none).
"""

from __future__ import annotations

import json
import os
import re
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
WHOLE, KILLED = ("none",), ("step:3", "save:1", "none")  # saves are at iterations 2, 4 and 6


def pretrain(folder: Path, name: str, starts: tuple[str, ...]) -> list[subprocess.CompletedProcess]:
    """One torchrun after another on one folder of checkpoints; all but the last leave model params out of these."""
    done = []
    for when in starts:
        ranks = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--monitor-interval=0.1",
        ]
        job = [
            ROOT / "tests/distributed/crashing_ranks.py",
            folder / f"{name}.jsonl",
            when,
            SCRIPT,
            *FLAGS,
            *STOCHASTIC,
        ]
        where = ["--train-iters", "6", "--save", folder / name, "--load", folder / name]
        where += ["--param-rounding-save-model", "full" if when == "none" else "none"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        command = [str(word) for word in (*ranks, *job, *where)]
        run = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=240, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        (folder / f"{name} {when}.txt").write_text(run.stdout)
        assert (run.returncode == 0) == (when == "none"), run.stdout[-6000:]
        done.append(run)
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(pretrain, folder, *job) for job in (("whole", WHOLE), ("killed", KILLED))]
    for run in runs:
        run.result()
    return folder


def iterations(folder: Path, name: str, when: str) -> dict[int, tuple[str, str]]:
    records = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return {r["iteration"]: (r["loss"], r["grad_norm"]) for r in records if r["when"] == when}


def test_killed_in_the_step_and_in_the_save_and_started_again(folder):
    """It went as planned: which iterations (from 0) each start has finished, and what was left of the save."""
    assert [sorted(iterations(folder, "killed", when)) for when in KILLED] == [[0, 1], [2, 3], [2, 3, 4, 5]]
    for when in KILLED[:2]:
        assert re.search(r"exitcode *: -9 \(pid: \d+\) +\(SIGKILL\)", (folder / f"killed {when}.txt").read_text())
    for when in KILLED[1:]:
        printed = (folder / f"killed {when}.txt").read_text()
        assert "model params are recomputed from main params at step 2: the checkpoint holds none" in printed
    assert "Overwriting old incomplete / corrupted checkpoint" in (folder / "killed none.txt").read_text()


@pytest.mark.parametrize("when", KILLED)
def test_losses_and_gradient_norms_equal_the_uninterrupted_run_bit_for_bit(folder, when):
    whole = iterations(folder, "whole", "none")
    killed = iterations(folder, "killed", when)
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
