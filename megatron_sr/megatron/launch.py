"""Run an unmodified Megatron-LM script with the `--param-rounding` flags: `python -m megatron_sr run SCRIPT ...`."""

from __future__ import annotations

import os
import random
import runpy
import socket
import sys
from pathlib import Path

from megatron_sr.megatron import host


def run_script(script: str | Path, argv: list[str]) -> None:
    """Run `script` as `python script *argv` would, with the plugin and, without CUDA, the CPU host installed.

    Call it in every rank (under torchrun); without a launcher it is a world of one rank. When the script has ended well,
    the ranks wait for each other and leave their process groups: gloo aborts ranks that exit with live ones.
    Raises FileNotFoundError, and whatever the script raises.
    """
    script = Path(script)
    if not script.is_file():
        raise FileNotFoundError(f"script {script} does not exist; give the path of a Megatron-LM pretrain script")
    default_to_one_rank()
    host.install()
    host.install_training()
    import megatron_sr.megatron.plugin  # noqa: F401

    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:  # Megatron ends with sys.exit() at --exit-interval
        if stop.code not in (None, 0):
            raise
    _leave_process_groups()


def default_to_one_rank() -> None:
    """Say what torchrun would say, if no launcher (torchrun, Slurm, MPI scripts) has said anything."""
    if os.environ.keys().isdisjoint(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )


def _free_port() -> int:
    """A port that nobody listens on, below those that Linux gives to outgoing connections.

    The store binds it seconds later, when all is imported: one that the kernel hands out might be handed to somebody else until then.
    """
    try:
        outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        outgoing = 32768
    below = range(10_000, outgoing)
    for port in (*random.SystemRandom().sample(below, min(64, len(below))), 0):  # 0: whatever the kernel has
        try:
            with socket.create_server(("127.0.0.1", port)) as server:
                return server.getsockname()[1]
        except OSError:
            continue
    raise OSError("no free port on 127.0.0.1; set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE")


def _leave_process_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
