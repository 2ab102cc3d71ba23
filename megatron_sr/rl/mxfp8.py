"""What a post-training job does otherwise when the trainer holds MXFP8 weights."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sr.rollout import names
from megatron_sr.rollout.mxfp8_layout import is_linear


@contextlib.contextmanager
def engine_start(model: Path, weights) -> Iterator[Path]:
    """Within the context, the folder to build an engine from: `model` itself, or with MXFP8 weights a temporary MXFP8 version of it.

    model    the job's base, a BF16 checkpoint folder.
    weights  None, or the `MXFP8Weights` of the trainer; their BF16 layers stay BF16 in the engine.

    The engine only starts from it: the first sync replaces its weights by the trainer's codes and scales. The first rank of each
    machine makes it, in the temporary folder (TMPDIR), half the base's size. Collective.
    """
    if weights is None:
        yield model
        return
    from megatron_sr.rollout.mxfp8_checkpoint import convert

    rank = dist.get_node_local_rank(fallback_rank=0)
    folder = Path(tempfile.mkdtemp(prefix="megatron-sr-mxfp8-")) if rank == 0 else None
    try:
        if folder is not None:
            convert(model, folder / "model", weights.bf16_layers)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, folder)
        # The ranks of a machine follow each other, its first one leads.
        yield next(f for f in reversed(everyone[: dist.get_rank() + 1]) if f is not None) / "model"
        dist.barrier()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def counted(tensors: Iterable[tuple[str, torch.Tensor]], weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors over which sticking is counted: all of them, or with MXFP8 `weights` those that are quantized. Uses all up."""
    for name, tensor in tensors:
        if weights is None or (is_linear(name) and names.layer_number(name) not in weights.bf16_layers):
            yield name, tensor
