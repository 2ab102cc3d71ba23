"""`crashing_ranks.py LOG WHEN SCRIPT ARGS...` runs a pretrain script through the plugin and kills rank 1 (SIGKILL):

    WHEN step:N   in the N-th optimizer step, after Adam and before the weights are rounded
         save:N   in the N-th save, after its first tensors are on the disk
         none     not at all

Rank 0 appends a line of JSON to LOG for each iteration: WHEN, iteration, loss and gradient norm as exact hexadecimal floats.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import sys

import psutil


def main(log: str, when: str, script: str, *argv: str) -> None:
    from megatron_sr.megatron import host

    host.install()
    host.install_training()
    import torch.distributed as dist

    import megatron_sr.megatron.plugin  # noqa: F401

    what, _, number = when.partition(":")
    if os.environ["RANK"] == "1" and what != "none":
        {"step": kill_in_step, "save": kill_in_save}[what](int(number))
    record_iterations(log, when)
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
    dist.barrier()
    dist.destroy_process_group()


def kill() -> None:
    """The helper processes that Megatron's save has started would outlive this rank: they go with it, as on a lost machine."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_step(number: int) -> None:
    from megatron_sr.megatron.fused_adam import FusedAdam

    original, steps = FusedAdam.step, iter(range(1, number + 1))

    def step(self, closure=None):
        result = original(self, closure)
        if next(steps) == number:
            kill()
        return result

    FusedAdam.step = step


def kill_in_save(number: int) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.training import checkpointing

    saves, written = [], []
    save, write = checkpointing.dist_checkpointing.save, filesystem_async._write_item

    def counted_save(*args, **named):
        saves.append(1)
        return save(*args, **named)

    @functools.wraps(write)  # Megatron looks at its signature
    def write_item(*args, **named):
        result = write(*args, **named)
        if len(saves) == number:
            written.append(1)
            if len(written) == 5:
                stream = next(argument for argument in args if hasattr(argument, "fileno"))
                stream.flush()
                os.fsync(stream.fileno())
                kill()
        return result

    checkpointing.dist_checkpointing.save = counted_save
    filesystem_async._write_item = write_item


def record_iterations(log: str, when: str) -> None:
    from megatron.training import training

    original = training.train_step

    def train_step(*args, **named):
        result = original(*args, **named)
        losses, grad_norm = result[0], result[5]
        if os.environ["RANK"] == "0":
            record = {"when": when, "iteration": named["iteration"]}
            record |= {"loss": float(losses["lm loss"]).hex(), "grad_norm": float(grad_norm).hex()}
            with open(log, "a") as file:
                file.write(json.dumps(record) + "\n")
        return result

    training.train_step = train_step


if __name__ == "__main__":  # distributed checkpointing may start helper processes that import this module
    main(*sys.argv[1:])
