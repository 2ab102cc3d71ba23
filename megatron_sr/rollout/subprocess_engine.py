"""A rollout engine in a child process: it may have several workers, and a crash of it does not take the trainer along."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_sr.rollout.client import RemoteEngine
from megatron_sr.rollout.engine import EngineDead

# What a launcher sets for the trainer's ranks; a child that sees it would take itself for one of them.
_RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
)  # fmt: skip
_RANK_PREFIXES = ("TORCHELASTIC_", "PET_", "SLURM_", "OMPI_", "PMI_")


class SubprocessEngine(RemoteEngine):
    """vLLM in a child of this process, reached over the loopback interface with a token of its own; implements `RolloutEngine`.

    model_dir      see `VLLMEngine`, which gets `options` (max_model_len, tensor_parallel_size, ...)
    wait           False: return at once, and wait for the engine at its first use or `wait_until_ready`
    start_timeout  seconds that its start may take
    transport, directory, stage, bucket, timeout, update_timeout: see `RemoteEngine`

    The child does not inherit the trainer's rank variables, leads a process group of its own, and ends with this process, also when
    that is killed. Raises EngineDead with the end of the child's output when it does not start.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        transport: str = "shared_memory",
        directory: str | Path | None = None,
        stage: str = "whole",
        bucket: int = 64 << 20,
        timeout: float = 600.0,
        update_timeout: float = 120.0,
        start_timeout: float = 600.0,
        wait: bool = True,
        environment: dict[str, str] | None = None,
        **options,
    ):
        super().__init__(
            "http://127.0.0.1:1",  # replaced when the child says where it listens
            token=secrets.token_hex(32),
            transport=transport,
            directory=directory,
            stage=stage,
            bucket=bucket,
            timeout=timeout,
            update_timeout=update_timeout,
        )
        self._settings = {
            "model": str(model_dir),
            "engine": options,
            "token": self._token,
            "weights_directory": str(directory) if directory is not None else None,
            "update_timeout": update_timeout,
        }
        self._environment, self._start_timeout = environment or {}, start_timeout
        self._child: subprocess.Popen | None = None
        self._ready = None
        self.start(wait)

    @property
    def pid(self) -> int | None:
        """Of the child; None when there is none."""
        return self._child.pid if self._child is not None else None

    def start(self, wait: bool = True) -> None:
        """Start a child where none runs. It serves version 0, the checkpoint's weights. Raises EngineDead when it does not start."""
        if self._child is not None and self._child.poll() is None:
            return
        self.release()
        self._version = 0
        read, write = os.pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the child; vanishes with its last user
        self._child = subprocess.Popen(
            [sys.executable, "-m", "megatron_sr.rollout.serve", "--child"],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            env=child_environment(self._environment),
            pass_fds=(write,),
            start_new_session=True,
            text=True,
        )
        os.close(write)
        self._ready = os.fdopen(read)
        self._child.stdin.write(json.dumps(self._settings | {"ready_fd": write}) + "\n")
        self._child.stdin.flush()
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Until the child serves. Raises EngineDead when it ended or took longer than start_timeout."""
        if self._ready is None:
            return
        ready, self._ready = self._ready, None
        with ready:
            within, _, _ = select.select([ready], [], [], self._start_timeout)
            line = ready.readline() if within else ""
        answer = json.loads(line) if line else {}
        if "url" not in answer:
            reason = answer.get("message") or f"no answer within {self._start_timeout:g} s, or it ended"
            tail = self.output_tail()
            self.kill()
            raise EngineDead(f"the rollout engine's process did not start: {reason}\n{tail}")
        host, _, port = answer["url"].removeprefix("http://").rpartition(":")
        self.url, self._address = answer["url"], (host, int(port))

    def restart(self) -> None:
        """End the child, if it still runs, and start another one. It must then be given all weights."""
        self.kill()
        self.start()

    def request(self, path: str, message: dict, timeout: float | None = None) -> dict:
        self.wait_until_ready()
        if self._child is None:
            raise EngineDead("the rollout engine was shut down; build a new one")
        return super().request(path, message, timeout)

    def _unreachable(self, path: str, error: Exception) -> str:
        for _ in range(20):  # its end shows a little later than the end of its connections
            if self._child is None or self._child.poll() is not None:
                break
            time.sleep(0.05)
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return super()._unreachable(path, error)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the rollout engine's process ended ({how}) at {path}; {self.output_tail(600)}"

    def output_tail(self, most: int = 4000) -> str:
        """The end of what the child printed."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - most))
        return (
            f"its output ends with:\n{self._output.read().decode(errors='replace')}" if size else "it printed nothing"
        )

    def kill(self) -> None:
        """End the child and its workers at once."""
        if self._child is None:
            return
        self.release()
        if self._ready is not None:
            self._ready.close()
            self._ready = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._child.stdin.close()
        self._child = None

    def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        self.kill()


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment without what a launcher set for its ranks, plus `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }
    return kept | extra
