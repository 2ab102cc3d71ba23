"""Issue point 5: engines placed by Ray; one of two is killed and replaced. Real Ray, real vLLM, no GPU."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, ray_environment

pytest.importorskip("ray", reason="engines on Ray need ray: pip install 'megatron-sr[ray]'")
pytestmark = pytest.mark.rollout
CHECKS = (
    "placement",
    "updates",
    "killed-while-generating",
    "killed-before-an-update",
    "no-more-replacements",
    "shutdown",
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """All checks of `ray_checks.py` on one cluster; starting it and its engines takes most of the time."""
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "tests.rollout.ray_checks", str(tmp_path_factory.mktemp("ray"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    with ray_environment() as variables:
        done = subprocess.run(command, cwd=ROOT, env=environment | variables, timeout=600, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    left = {name for name in set(os.listdir("/dev/shm")) - before if "plasma" in name or "ray" in name}
    return done.stdout, {name for name in left if not in_use(name)}


def in_use(name):
    """Whether some process has this file of /dev/shm mapped: another test's cluster may run."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


@pytest.mark.parametrize("check", CHECKS)
def test_point_5_ray(check, printed):
    """Each is a function `check_*` of `ray_checks.py`, which says what it proves."""
    assert f"ok {check}\n" in printed[0], printed[0][-6000:]


def test_point_6_ray_leaves_nothing_in_shared_memory(printed):
    assert printed[1] == set()
