"""The trained model as a Hugging Face folder: safetensors in shards, written as the tensors come, with config and tokenizer."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

SHARD_BYTES = 5 * 10**9  # as transformers' save_pretrained; also the most that is in memory
_INDEX = "model.safetensors.index.json"


def check_new(directory: Path) -> None:
    """Raise ValueError unless `directory` is missing or empty and can be written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"--save-hf {directory} exists and is not empty; choose a new folder, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")
    except OSError as error:
        raise ValueError(f"--save-hf {directory} cannot be written ({error.strerror}); choose another place") from None


def write(
    directory: Path | None,
    tensors: Iterable[tuple[str, torch.Tensor]],
    base: Path,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write (Hugging Face name, tensor) pairs with all files of the checkpoint folder `base` but its weights.

    directory    None consumes the tensors only: what a rank that does not write does in a collective export
    dtype        of the tensors, which config.json must name: transformers would load FP16 weights as BF16, rounding them
    shard_bytes  most bytes of a safetensors file, and most that is held in memory (one tensor may exceed it)

    The weights get their final names, and config.json, without which nobody takes the folder for a model, comes last: a kill
    leaves no folder that loads but is incomplete.
    """
    if directory is None:
        for _ in tensors:
            pass
        return
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush():
        nonlocal held, size
        from safetensors.torch import save_file

        save_file(held, directory / f"{len(shards)}.partial", metadata={"format": "pt"})
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        held[name] = (
            tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        )  # it may be a view of a live parameter
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    count, where = len(shards), {}
    for i, names in enumerate(shards):
        file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        (directory / f"{i}.partial").rename(directory / file)
        where |= dict.fromkeys(names, file)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    others = [f for f in sorted(base.iterdir()) if f.is_file() and f.suffix != ".safetensors" and f.name != _INDEX]
    for file in sorted(others, key=lambda f: f.name == "config.json"):
        if file.name == "config.json" and dtype != torch.bfloat16:
            _write_config(file, directory / file.name, dtype)
        else:
            shutil.copyfile(file, directory / file.name)


def _write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = json.loads(source.read_text())
    fields = [name for name in ("dtype", "torch_dtype") if name in config] or [
        "dtype"
    ]  # torch_dtype: before transformers 5
    target.write_text(json.dumps(config | dict.fromkeys(fields, str(dtype).removeprefix("torch.")), indent=2) + "\n")
