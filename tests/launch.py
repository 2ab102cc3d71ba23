"""Start real gloo ranks for a test: `torchrun(nproc, "module.or.file.py", *args)`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(nproc: int, target: str | Path, *args, timeout: float = 600, check: bool = True, env: dict | None = None):
    """Run `target` (a file, or a module as 'pkg.mod') on `nproc` ranks on this machine; return the CompletedProcess.

    With `check`, a non-zero exit fails the calling test and shows the end of what the ranks printed.
    """
    run = [target] if str(target).endswith(".py") else ["-m", target]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *run, *args]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **(env or {}),
    }
    command = [str(c) for c in command]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks; were it killed, they would live on
            output, _ = process.communicate(timeout=60)
            raise AssertionError(f"{' '.join(command)}\nnot done after {timeout} s\n{output[-6000:]}") from None
    if check and process.returncode:
        raise AssertionError(f"{' '.join(command)}\nexit {process.returncode}\n{output[-6000:]}")
    return subprocess.CompletedProcess(command, process.returncode, output)


@contextlib.contextmanager
def ray_environment():
    """Variables for a process that starts a Ray cluster; what the cluster leaves behind (logs, sockets) is removed at the end."""
    folder = tempfile.mkdtemp(prefix="sr-")  # short: the paths of Ray's sockets may have 107 bytes
    try:
        yield {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
