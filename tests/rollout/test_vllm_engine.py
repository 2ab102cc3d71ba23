"""Real vLLM engines (C5: the digests of trainer weights and of live engine weights agree after every sync)."""

import os
import re
import subprocess
import sys

import pytest

from tests.launch import ROOT, torchrun

pytestmark = pytest.mark.rollout

FAMILIES = ("dense", "tied-bias", "moe", "moe-padded")
CHECKS = {
    "checkpoint": FAMILIES,
    "updates": FAMILIES,
    "fresh-engine": FAMILIES,
    "prefix-cache": FAMILIES,
    "refusals": ("dense", "tied-bias", "moe"),
    "flipped-bits": FAMILIES,
    "aborted-update": ("dense", "tied-bias", "moe"),
    "faults-are-seen": ("tied-bias", "moe"),
    "fp16": ("tied-bias",),
    "sampling": ("dense",),
    "amx-layouts": ("dense",),
    "large-linears": ("dense",),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """All checks of `engine_checks.py` in one process; vLLM's import and start-up take most of the time."""
    command = [sys.executable, "-m", "tests.rollout.engine_checks", str(tmp_path_factory.mktemp("engines")), *FAMILIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    "check, family", [(check, family) for check, families in CHECKS.items() for family in families]
)
def test_c5_live_weights(check, family, printed):
    """Each is a function `check_*` of `engine_checks.py`, which says what it proves."""
    if skipped := re.search(rf"^skip {family} {check}: (.+)$", printed, re.MULTILINE):
        pytest.skip(skipped[1])
    assert f"ok {family} {check}\n" in printed, printed[-6000:]


@pytest.mark.distributed
def test_c5_expert_parallel_trainer_feeds_an_engine_on_each_rank(tmp_path):
    assert "ok two engines" in torchrun(2, "tests/rollout/engine_ranks.py", tmp_path).stdout
