"""What a set of weights is: per tensor its Hugging Face name, shape, dtype and digest, and the version that they form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_sr.rollout.digest import tensor_digest


@dataclass(frozen=True)
class TensorRecord:
    """shape: sizes; dtype: torch's name without the prefix ("bfloat16"); digest: 32 hex digits (`digest.tensor_digest`)."""

    shape: tuple[int, ...]
    dtype: str
    digest: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorRecord:
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype), tensor_digest(tensor))


@dataclass(frozen=True)
class Manifest:
    """The weights of one version.

    version       grows with every update; 0 is the checkpoint that the engine started from.
    tensors       Hugging Face name -> TensorRecord: the state after the update, all of it, also when less was sent.
    base_version  the version that a partial update builds on; None: the tensors sent are complete in themselves.
    base_digest   `digest` of that version's manifest: two engines at "version 7" need not hold the same bits.
    """

    version: int
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    base_version: int | None = None
    base_digest: str | None = None

    def __post_init__(self):
        if (self.base_version is None) != (self.base_digest is None):
            raise ValueError(
                f"manifest of version {self.version}: base_version={self.base_version} and base_digest={self.base_digest} "
                f"go together; give both or neither"
            )
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError(
                f"manifest of version {self.version} builds on version {self.base_version}, which is not older"
            )

    def check_base(self, held: Manifest) -> None:
        """Raise ValueError unless this update may be applied to an engine that holds `held`."""
        if self.version <= held.version:
            raise ValueError(f"version {self.version} is not above the present one, {held.version}")
        if self.base_version is None:
            return
        if self.base_version != held.version:
            raise ValueError(
                f"the update to version {self.version} builds on version {self.base_version}, the engine holds {held.version}; "
                f"send all weights"
            )
        if self.base_digest != held.digest:
            raise ValueError(
                f"the update to version {self.version} builds on other bits of version {self.base_version} (digest "
                f"{self.base_digest}) than the engine holds ({held.digest}); send all weights"
            )

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Manifest:
        """Digest `tensors`, (name, tensor) pairs, one at a time."""
        return cls(version, {name: TensorRecord.of(tensor) for name, tensor in tensors})

    @property
    def digest(self) -> str:
        """One digest (32 hex digits) of all names, shapes, dtypes and bits. Order and version do not enter."""
        total = hashlib.blake2b(digest_size=16)
        for name, record in sorted(self.tensors.items()):
            total.update(json.dumps([name, record.shape, record.dtype, record.digest]).encode())
        return total.hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version,
                "base_version": self.base_version,
                "base_digest": self.base_digest,
                "digest": self.digest,
                "tensors": {name: [list(r.shape), r.dtype, r.digest] for name, r in self.tensors.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError when `text` is not a manifest, or its total digest does not fit its tensors."""
        try:
            raw = json.loads(text)
            tensors = {name: TensorRecord(tuple(shape), dtype, d) for name, (shape, dtype, d) in raw["tensors"].items()}
            manifest = cls(raw["version"], tensors, raw["base_version"], raw["base_digest"])
            total = raw["digest"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a weight manifest ({type(error).__name__}: {error})") from error
        if manifest.digest != total:
            raise ValueError(
                f"manifest of version {manifest.version} is damaged: total digest {total}, its tensors give {manifest.digest}"
            )
        return manifest


def compare(a: Manifest, b: Manifest) -> list[str]:
    """Readable differences between two sets of weights, one per tensor; empty when they are the same. Versions do not enter."""
    out = [f"{name}: missing in the second" for name in a.tensors if name not in b.tensors]
    out += [f"{name}: missing in the first" for name in b.tensors if name not in a.tensors]
    for name, x in a.tensors.items():
        y = b.tensors.get(name)
        if y is None or x == y:
            continue
        if x.shape != y.shape:
            out.append(f"{name}: shape {list(x.shape)} against {list(y.shape)}")
        elif x.dtype != y.dtype:
            out.append(f"{name}: dtype {x.dtype} against {y.dtype}")
        else:
            out.append(f"{name}: bits differ (digest {x.digest} against {y.digest})")
    return out


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
