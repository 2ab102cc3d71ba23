"""Points 4 and 6 of the MXFP8 mode: real vLLM engines that hold MXFP8, emulated on CPU."""

import os
import subprocess
import sys

import pytest

from tests.launch import ROOT

pytestmark = pytest.mark.rollout

FAMILIES = ("dense", "moe")
CHECKS = {
    "point4": ("load", "audit", "updates", "refusals", "logprobs"),
    "point6": ("flipped-bits",),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """All checks of `mxfp8_checks.py` in one process."""
    command = [sys.executable, "-m", "tests.rollout.mxfp8_checks", str(tmp_path_factory.mktemp("mxfp8")), *FAMILIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=400, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("point, check", [(point, check) for point, checks in CHECKS.items() for check in checks])
def test_mxfp8_engine(point, check, family, printed):
    """Each is a function `check_*` of `mxfp8_checks.py`, which says what it proves."""
    assert f"ok {family} {check}\n" in printed, printed[-6000:]


@pytest.mark.parametrize("check", ["bf16-layers", "substring-trap"])
def test_mxfp8_engine_point4_which_layers(check, printed):
    assert f"ok dense {check}\n" in printed, printed[-6000:]
