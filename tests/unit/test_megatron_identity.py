"""Segments of a checkpoint entry: affine, and equal to the entry's own coordinates element by element. No Megatron needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sr.coordinates import Segment, check_cover
from megatron_sr.megatron.identity import Identity, _compose, _segments


def entry(data: torch.Tensor, global_shape, global_offset, prepend_axis_num=0):
    """What `_segments` reads of a megatron.core ShardedTensor."""
    return SimpleNamespace(
        data=data, global_shape=global_shape, global_offset=global_offset, prepend_axis_num=prepend_axis_num
    )


def where(segments, numel: int) -> list:
    """Global index by local element, from the definition of Segment; None where no segment lies."""
    found = [None] * numel
    for s in segments:
        for i in range(s.length):
            assert found[s.local_start + i] is None
            found[s.local_start + i] = s.global_index(i)
    return found


def expected(piece, numel: int) -> list:
    """The same from the entry's offsets, one element at a time."""
    whole = torch.arange(torch.Size(piece.global_shape).numel()).view(piece.global_shape)
    axes = [slice(o, o + 1) for o in piece.global_offset[: piece.prepend_axis_num]]
    axes += [slice(o, o + n) for o, n in zip(piece.global_offset[piece.prepend_axis_num :], piece.data.shape)]
    indices = whole[tuple(axes)].reshape(piece.data.shape)
    positions = torch.as_strided(
        torch.arange(numel), piece.data.shape, piece.data.stride(), piece.data.storage_offset()
    )
    found = [None] * numel
    for local, index in zip(positions.flatten().tolist(), indices.flatten().tolist()):
        found[local] = index
    return found


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_segments_equal_the_entrys_coordinates(data):
    local_shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    parts = [data.draw(st.integers(1, 3)) for _ in local_shape]
    prepended = [data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(0, 2)))]
    offsets = [data.draw(st.integers(0, size - 1)) for size in prepended]
    offsets += [size * data.draw(st.integers(0, n - 1)) for size, n in zip(local_shape, parts)]
    probe = torch.empty(local_shape, device="meta")
    piece = entry(probe, (*prepended, *(s * n for s, n in zip(local_shape, parts))), tuple(offsets), len(prepended))
    segments = _segments(piece, "parameter w")
    check_cover(segments, probe.numel(), "parameter w")
    assert where(segments, probe.numel()) == expected(piece, probe.numel())


def test_a_column_shard_is_one_segment():
    piece = entry(torch.empty(5, 4, device="meta"), (5, 12), (0, 8))
    (segment,) = _segments(piece, "parameter w")
    assert segment == (0, 20, 8, 12, 4)


def test_a_single_column_is_one_segment():
    piece = entry(torch.empty(5, 1, device="meta"), (5, 3), (0, 2))
    (segment,) = _segments(piece, "parameter w")
    assert segment == (0, 5, 2, 3, 1)


@pytest.mark.parametrize("half", [0, 1])
def test_halves_of_a_factory_keep_their_local_positions(half):
    """SwiGLU's fc1 under TP2, second rank: a [gate; up] shard of 2 x 3 rows, whose halves lie 6 rows apart in the whole."""
    probe = torch.empty(6, 2, device="meta")
    piece = entry(torch.chunk(probe, 2, dim=0)[half], (12, 2), (3 + 6 * half, 0))
    assert where(_segments(piece, "parameter w"), 12) == expected(piece, 12)


def test_halves_of_rows_make_one_segment_per_row():
    probe = torch.empty(3, 4, device="meta")
    piece = entry(torch.chunk(probe, 2, dim=1)[1], (3, 2), (0, 0))
    segments = _segments(piece, "parameter w")
    assert len(segments) == 3
    assert where(segments, 12) == expected(piece, 12)


def test_a_transposed_entry_is_refused_by_name():
    piece = entry(torch.empty(3, 4, device="meta").t(), (4, 3), (0, 0))
    with pytest.raises(ValueError, match=r"parameter w: .* transposed; use --param-rounding nearest"):
        _segments(piece, "parameter w")


def test_tensors_that_a_checkpoint_splits_make_up_one_in_the_order_of_their_names():
    stem = "decoder.layers.0.mixer.in_proj.weight"
    found = {f"{stem}.z": [Segment(0, 4, 4)], f"{stem}.B": [Segment(4, 2, 2)]}  # the second half of each
    identity = _compose(found, {f"{stem}.z": 8, f"{stem}.B": 4})
    assert identity == (stem, [(0, 4, 8, 1, 1), (4, 2, 2, 1, 1)])
    assert identity.parts == ((f"{stem}.B", 0), (f"{stem}.z", 4))
    key, _ = _compose({"q_down.weight": [Segment(0, 5, 0)], "kv_down.weight": [Segment(5, 3, 0)]}, dict.fromkeys(
        ("q_down.weight", "kv_down.weight"), 5))  # fmt: skip
    assert key == "kv_down.weight+q_down.weight"
    assert type(_compose({"a.weight": [Segment(0, 6, 0)]}, {"a.weight": 6})) is Identity
