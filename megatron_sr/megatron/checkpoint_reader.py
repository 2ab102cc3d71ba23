"""Read a Megatron distributed checkpoint (`torch_dist`) in one process, chunk by chunk, without Megatron and without its model.

Memory is bounded by the largest chunk, which is one rank's shard of one tensor of one layer. Pickled objects are read without
importing or calling anything but tensors' own constructors: a class that is not known becomes an inert placeholder.
Source of the format: torch.distributed.checkpoint.filesystem; megatron.core.dist_checkpointing.strategies.torch, core 0.19.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

LATEST = "latest_checkpointed_iteration.txt"  # Megatron's own name for it
KEPT = 4  # chunks that were read last and are kept


class Chunk(NamedTuple):
    """A block of a stored tensor: `offset` and `shape` in the whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(NamedTuple):
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]


class DamagedCheckpoint(ValueError):
    """A file of the checkpoint is missing, cut off or unreadable."""


class CheckpointReader:
    """`tensors`: key -> StoredTensor. `objects`: the keys of pickled objects.

    path  the folder of one checkpoint (iter_0000010), or that of --save, whose newest checkpoint is taken.
    Raises FileNotFoundError or ValueError, saying what is wrong with the folder, and DamagedCheckpoint while reading.
    """

    def __init__(self, path: str | Path):
        self.path = _checkpoint_folder(Path(path))
        try:
            metadata = _load_inert((self.path / ".metadata").read_bytes())
            self._storage = {(i.fqn, i.offset and tuple(i.offset)): info for i, info in metadata.storage_data.items()}
            stored = metadata.state_dict_metadata
            self.tensors = {
                key: _stored_tensor(key, entry) for key, entry in stored.items() if hasattr(entry, "chunks")
            }
            self.objects = [key for key in stored if key not in self.tensors]
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError) as error:
            raise DamagedCheckpoint(f"{self.path / '.metadata'} cannot be read ({error})") from None
        self._kept: OrderedDict[tuple, torch.Tensor] = OrderedDict()

    def check_files(self) -> None:
        """Raise DamagedCheckpoint for a file that is missing or shorter than .metadata says. Reads no content."""
        needed: dict[str, int] = {}
        for info in self._storage.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, length in sorted(needed.items()):
            file = self.path / name
            if not file.is_file():
                raise DamagedCheckpoint(f"{name} is missing; copy the checkpoint again")
            if file.stat().st_size < length:
                raise DamagedCheckpoint(
                    f"{name} ends too early ({file.stat().st_size:,} of {length:,} bytes); copy it again"
                )

    def object(self, key: str):
        """A pickled object: dicts, lists, numbers and tensors as they were, anything else as a placeholder."""
        return _load_torch(self._record(key, None), f"object {key}", inert=True)

    def chunk(self, key: str, chunk: Chunk) -> torch.Tensor:
        """A stored chunk, of its shape and the tensor's dtype."""
        if (key, chunk.offset) in self._kept:
            self._kept.move_to_end((key, chunk.offset))
            return self._kept[key, chunk.offset]
        value = _load_torch(self._record(key, chunk.offset), f"tensor {key}").view(chunk.shape)
        self._kept[key, chunk.offset] = value
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return value

    def region(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Any block of a stored tensor, put together from the chunks that it meets. Raises DamagedCheckpoint if these leave a gap."""
        tensor, wanted = self.tensors[key], Chunk(tuple(offset), tuple(shape))
        if wanted in tensor.chunks:
            return self.chunk(key, wanted)
        result, filled = torch.empty(wanted.shape, dtype=tensor.dtype), 0
        for chunk in tensor.chunks:
            common = _common(wanted, chunk)
            if common is not None:
                to, source = _slices(common, wanted), _slices(common, chunk)
                result[to] = self.chunk(key, chunk)[source]
                filled += result[to].numel()
        if filled != result.numel():
            raise DamagedCheckpoint(
                f"tensor {key}: {result.numel() - filled} elements at {wanted.offset} are not stored"
            )
        return result

    def _record(self, key: str, offset: tuple[int, ...] | None) -> bytes:
        info = self._storage.get((key, offset))
        if info is None:
            raise DamagedCheckpoint(f"{key} at {offset} is named in .metadata but stored nowhere")
        try:
            with (self.path / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
        except OSError as error:
            raise DamagedCheckpoint(f"{key}: {info.relative_path} cannot be read ({error.strerror})") from None
        if len(content) != info.length:
            raise DamagedCheckpoint(f"{key}: {info.relative_path} ends too early; copy the checkpoint again")
        return content


def _checkpoint_folder(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: there is no such folder; give that of a checkpoint, or the one that --save wrote to"
        )
    if (path / LATEST).is_file():
        latest = (path / LATEST).read_text().strip()
        path = path / (f"iter_{int(latest):07d}" if latest.isdigit() else latest)
        if not path.is_dir():
            raise FileNotFoundError(f"{path}: {LATEST} names it, but there is no such folder")
    if not (path / ".metadata").is_file():
        kind = "this looks like --ckpt-format torch; " if any(path.glob("mp_rank_*")) else ""
        raise ValueError(
            f"{path}: not a distributed checkpoint (no .metadata in it); {kind}only --ckpt-format torch_dist can be read here, "
            "and a save that was interrupted has none either"
        )
    return path


def _stored_tensor(key: str, entry) -> StoredTensor:
    chunks = [Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    return StoredTensor(key, tuple(entry.size), entry.properties.dtype, chunks)


def _common(a: Chunk, b: Chunk) -> Chunk | None:
    """Where two blocks meet; None if they do not."""
    starts = [max(x, y) for x, y in zip(a.offset, b.offset, strict=True)]
    ends = [min(x + n, y + m) for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)]
    if any(start >= end for start, end in zip(starts, ends)):
        return None
    return Chunk(tuple(starts), tuple(end - start for start, end in zip(starts, ends)))


def _slices(block: Chunk, within: Chunk) -> tuple[slice, ...]:
    return tuple(slice(o - w, o - w + n) for o, n, w in zip(block.offset, block.shape, within.offset))


class _Placeholder:
    """Stands for an object of a class that is not imported here."""

    def __init__(self, *args, **named):
        pass

    def __setstate__(self, state):
        self.state = state

    def append(self, value):
        pass

    def __setitem__(self, key, value):
        pass

    def __hash__(self):
        return id(self)


_TORCH_DISTRIBUTED = "torch.distributed.checkpoint."
_METADATA_CLASSES = {"Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                     "ChunkStorageMetadata", "_StorageInfo", "_MEM_FORMAT_ENCODING", "StorageMeta"}  # fmt: skip
_KNOWN = {("collections", "OrderedDict"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2"), ("_io", "BytesIO"),
          ("torch.serialization", "_get_layout"), ("_codecs", "encode")}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        known = (module, name) in _KNOWN or (module.startswith(_TORCH_DISTRIBUTED) and name in _METADATA_CLASSES)
        if not known and module == "torch":
            value = getattr(torch, name, None)
            known = isinstance(value, torch.dtype) or name.endswith("Storage")
        return super().find_class(module, name) if known else _Placeholder


def _load_inert(content: bytes):
    return _Unpickler(io.BytesIO(content)).load()


_INERT = ModuleType("inert_pickle")  # what torch.load asks of a pickle module
_INERT.Unpickler = _Unpickler
_INERT.load = lambda file, **options: _Unpickler(file, **options).load()


def _load_torch(content: bytes, what: str, inert: bool = False):
    """What torch.save wrote. `inert`: with placeholders for unknown classes; otherwise a tensor."""
    try:
        options = dict(weights_only=False, pickle_module=_INERT) if inert else dict(weights_only=True)
        value = torch.load(io.BytesIO(content), map_location="cpu", **options)
        if isinstance(value, io.BytesIO):  # Megatron wraps an object twice
            value.seek(0)
            value = torch.load(value, map_location="cpu", **options)
        return value
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, KeyError) as error:
        raise DamagedCheckpoint(f"{what} cannot be read ({str(error).splitlines()[0]})") from None


def walk(value) -> Iterator[dict]:
    """All dicts in nested dicts and lists."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, (list, tuple)):
        for inner in itertools.chain(value):
            yield from walk(inner)
