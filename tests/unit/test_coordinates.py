"""Affine segments: their indices, what a cut in the middle leaves, and full coverage."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sr.coordinates import Segment, check_cover, clip

segment = st.builds(
    Segment,
    local_start=st.integers(0, 100),
    length=st.integers(1, 200),
    global_start=st.integers(0, 1000),
    stride=st.integers(1, 40),
    run=st.integers(1, 40),
)


def indices(segments) -> dict[int, int]:
    """local position -> global index"""
    return {s.local_start + i: s.global_index(i) for s in segments for i in range(s.length)}


def test_global_index_of_a_column_shard():
    """Columns 4..6 of a matrix with 10 columns."""
    s = Segment(0, 9, 4, stride=10, run=3)
    assert [s.global_index(i) for i in range(9)] == [4, 5, 6, 14, 15, 16, 24, 25, 26]
    assert not s.contiguous


def test_contiguous_segments():
    assert Segment(0, 9, 4).contiguous
    assert Segment(0, 9, 4, stride=10, run=10).contiguous
    assert Segment(0, 3, 4, stride=10, run=3).contiguous


@given(segment, st.integers(0, 320), st.integers(0, 320))
def test_c2_clip_keeps_exactly_the_elements_inside(s, start, stop):
    clipped = clip([s], start, stop)
    expected = {local - start: g for local, g in indices([s]).items() if start <= local < stop}
    assert indices(clipped) == expected
    assert sum(c.length for c in clipped) == len(expected), "an element is named twice"
    assert len(clipped) <= 3


@given(segment, st.lists(st.integers(0, 300), max_size=4))
def test_c2_shards_of_any_size_together_give_the_whole(s, cuts):
    bounds = [0, *sorted(cuts), 301]
    pieces = {}
    for start, stop in pairwise(bounds):
        pieces |= {local + start: g for local, g in indices(clip([s], start, stop)).items()}
    assert pieces == indices([s])


def test_cover_accepts_any_order():
    check_cover([Segment(5, 5, 0), Segment(0, 5, 100)], 10, "w")
    check_cover([], 0, "w")


@pytest.mark.parametrize(
    "segments, message",
    [
        ([Segment(0, 4, 0), Segment(5, 5, 4)], "w: local elements 4..5 are not covered"),
        ([Segment(0, 6, 0), Segment(5, 5, 4)], "w: local elements 5..6 are covered twice"),
        ([Segment(0, 9, 0)], "w: segments cover 9 of 10 local elements"),
        ([Segment(0, 11, 0)], "w: segments cover 11 of 10 local elements"),
    ],
)
def test_c6_cover_names_the_gap(segments, message):
    with pytest.raises(ValueError, match=message):
        check_cover(segments, 10, "w")
