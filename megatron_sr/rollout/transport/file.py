"""Buckets as safetensors files in a directory that trainer and engines share; a file appears whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path

import torch

from megatron_sr.rollout.transport.base import Tensors

_FILE = re.compile(r"sr-[0-9a-f]{32}-\d+\.safetensors")
_STALE = 3600.0  # seconds after which a file is one that a killed trainer left


class FileSender:
    """Files of mode 0600 with unguessable names, removed when they were taken. See `base.Sender`.

    A trainer that is killed leaves the files of its running update; the next sender removes those older than an hour.
    """

    kind = "file"

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise ValueError(f"transport 'file': {self._directory} is not a directory")
        self._token = secrets.token_hex(16)
        self._written: dict[int, Path] = {}
        for old in self._directory.glob("sr-*.safetensors*"):
            if time.time() - old.stat().st_mtime > _STALE:
                old.unlink(missing_ok=True)

    def spec(self, receiver: int) -> dict:
        return {}

    def put(self, number: int, tensors: Tensors) -> dict:
        from safetensors.torch import save_file

        path = self._directory / f"sr-{self._token}-{number}.safetensors"
        writing = path.with_suffix(".safetensors.part")
        os.close(os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        save_file(dict(_alone(tensors)), writing)
        os.replace(writing, path)
        self._written[number] = path
        return {"file": path.name, "names": [name for name, _ in tensors]}

    def deliver(self, number: int) -> None:
        pass

    def taken(self, number: int) -> None:
        self._written.pop(number).unlink(missing_ok=True)

    def end(self, good: bool) -> None:
        for number in list(self._written):
            self.taken(number)

    def close(self) -> None:
        self.end(True)


def _alone(tensors: Tensors):
    """Tensors that share no memory with each other, as safetensors wants them."""
    for name, tensor in tensors:
        whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        yield name, tensor if whole else tensor.contiguous().clone()


class FileReceiver:
    """Reads from one directory only. See `base.Receiver`."""

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)

    def get(self, header: dict) -> list[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        if not _FILE.fullmatch(header["file"]):
            raise ValueError(f"{header['file']!r} is not the name of a weights file of this transport")
        path = self._directory / header["file"]
        try:
            found = load_file(path)
        except Exception as error:  # safetensors has an error class of its own, and the file may be gone
            raise RuntimeError(f"cannot read the weights file {path} ({error})") from error
        if set(found) != set(header["names"]):
            raise ValueError(f"{path} holds other tensors than announced")
        return [(name, found[name]) for name in header["names"]]

    def end(self, good: bool) -> None:
        pass

    def close(self) -> None:
        pass
