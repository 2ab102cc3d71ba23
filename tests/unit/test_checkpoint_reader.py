"""Reading distributed checkpoints in one process: regions from chunks, damage, and pickles that must not run."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_sr.megatron.checkpoint_reader import CheckpointReader, Chunk, DamagedCheckpoint, StoredTensor, walk


@pytest.fixture
def path(tmp_path):
    """What torch itself writes: two tensors, each one chunk, and an object."""
    state = {"a": torch.arange(24.0).view(4, 6), "b": torch.ones(3, dtype=torch.bfloat16), "o": {"x": [1, {"y": 2}]}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_tensors_and_their_regions(path):
    reader = CheckpointReader(path)
    whole = torch.arange(24.0).view(4, 6)
    assert reader.tensors["a"] == StoredTensor("a", (4, 6), torch.float32, [Chunk((0, 0), (4, 6))])
    assert torch.equal(reader.chunk("a", reader.tensors["a"].chunks[0]), whole)
    assert torch.equal(reader.region("a", (1, 2), (2, 3)), whole[1:3, 2:5])
    assert reader.tensors["b"].dtype == torch.bfloat16


def test_a_region_is_put_together_from_the_chunks_that_it_meets(path, monkeypatch):
    reader, whole = CheckpointReader(path), torch.arange(24.0).view(4, 6)
    chunks = [Chunk((r, c), (2, 3)) for r in (0, 2) for c in (0, 3)]
    reader.tensors["a"] = reader.tensors["a"]._replace(chunks=chunks)
    monkeypatch.setattr(
        reader, "chunk", lambda key, c: whole[c.offset[0] : c.offset[0] + 2, c.offset[1] : c.offset[1] + 3]
    )
    assert torch.equal(reader.region("a", (1, 1), (2, 4)), whole[1:3, 1:5])
    reader.tensors["a"] = reader.tensors["a"]._replace(chunks=chunks[:-1])
    with pytest.raises(DamagedCheckpoint, match="tensor a: 2 elements at .* are not stored"):
        reader.region("a", (1, 1), (2, 4))


def test_a_pickle_in_a_checkpoint_is_read_but_not_run(path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return exec, ("import pathlib; pathlib.Path('ran').touch()",)

    monkeypatch.chdir(path)
    buffer = io.BytesIO()
    torch.save([{"args": Evil(), "param_rounding": {"step": 3}, "tensor": torch.ones(2)}], buffer)
    reader = CheckpointReader(path)
    monkeypatch.setattr(reader, "_record", lambda key, offset: buffer.getvalue())
    found = [d["param_rounding"] for d in walk(reader.object("any")) if "param_rounding" in d]
    assert found == [{"step": 3}]
    assert not (path / "ran").exists()


def test_a_pickle_in_the_metadata_is_not_run_either(path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return exec, ("import pathlib; pathlib.Path('ran').touch()",)

    monkeypatch.chdir(path)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        CheckpointReader(path)
    assert not (path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nothing of the kind"])
def test_damaged_metadata(path, content):
    (path / ".metadata").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata cannot be read"):
        CheckpointReader(path)


def test_damaged_tensors(path):
    file = next(path.glob("*.distcp"))
    content = file.read_bytes()
    reader = CheckpointReader(path)
    file.write_bytes(content[:100])
    with pytest.raises(DamagedCheckpoint, match="ends too early"):
        reader.region("a", (0, 0), (1, 1))
    file.write_bytes(bytes(len(content)))
    with pytest.raises(DamagedCheckpoint, match="tensor a cannot be read"):
        reader.region("a", (0, 0), (1, 1))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: (path / "mp_rank_00").mkdir(), "this looks like --ckpt-format torch"),
        (lambda path: (path / "latest_checkpointed_iteration.txt").write_text("7"), "iter_0000007: .* names it, but"),
        (lambda path: None, "a save that was interrupted has none either"),
    ],
)
def test_folders_without_a_checkpoint(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        CheckpointReader(tmp_path)
